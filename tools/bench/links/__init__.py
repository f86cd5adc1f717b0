"""What the links between GPUs give our transfers: ``mok bench links``."""
