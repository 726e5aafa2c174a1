"""The same on Slurm: an array with an element a shard, submitted, watched and finished."""
