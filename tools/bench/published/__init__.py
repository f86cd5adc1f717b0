"""The published comparison, run again: ``mok bench --suite published`` under torchrun or Slurm."""
