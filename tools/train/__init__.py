"""Real training runs: a small language model, and blocks of a large one."""
