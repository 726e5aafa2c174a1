"""The router of a run: what its files say of load, weights and traffic."""
