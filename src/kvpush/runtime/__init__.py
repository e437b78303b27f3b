"""The transfer thread and its control channel."""
