"""The data plane: moves bytes between registered memory of two processes."""
