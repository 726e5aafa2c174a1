"""Faults of a cluster, put into real runs of a real Slurm, and what becomes of them."""
