"""The backward megakernel, a role to a file; ``kernel`` puts them together."""
