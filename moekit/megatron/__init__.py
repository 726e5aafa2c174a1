"""Megatron's side: its options, its own stages, and a recipe as its arguments."""
