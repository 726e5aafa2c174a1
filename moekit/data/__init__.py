"""Text to Megatron's token files, and what a run reads back from them."""
