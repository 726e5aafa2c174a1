"""Reading what a run writes: metrics, tokens per expert, and the summary at its end."""
