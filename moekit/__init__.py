"""moekit: from a YAML recipe to a Mixture-of-Experts run that Megatron-Core trains."""

__version__ = "0.1.0"
