"""What a recipe costs, worked out at the desk: parameters and floating-point operations."""
