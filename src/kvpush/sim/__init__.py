"""A vLLM worker whose forward pass takes the time that a device profile says."""
