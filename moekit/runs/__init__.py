"""Runs once they are launched: what their files and Slurm say of them, and the commands that look after them."""
