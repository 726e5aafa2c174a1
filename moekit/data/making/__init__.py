"""Text to shards: worker processes make parts of them, one an input file, which are put one behind the other."""
