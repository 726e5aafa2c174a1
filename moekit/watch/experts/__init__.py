"""What the experts compute: norms of their outputs, zeros in their gradients, their share beside the shared ones."""
