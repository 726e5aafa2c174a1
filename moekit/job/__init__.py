"""What enters the training process: standard library only, Python >= 3.10, copied into each run directory."""
