"""From a symptom to its cause: `moekit doctor`."""
