"""Trusting the machine before a model is blamed: `moekit preflight`, and what a job does before it trains."""
