"""Token-to-expert tables for hash layers: made by frequency or read, judged, and written for training."""
