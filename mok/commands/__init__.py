"""The subcommands of ``python -m mok``."""
