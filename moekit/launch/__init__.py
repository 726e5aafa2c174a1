"""From a checked recipe to a run: its directory, its job, and where it trains."""
