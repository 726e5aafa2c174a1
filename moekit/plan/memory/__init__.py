"""What a GPU of each pipeline stage holds: weights, gradients, optimizer, activations, buffers."""
