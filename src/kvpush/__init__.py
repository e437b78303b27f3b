"""kvpush: push-based KV cache transfer between vLLM's prefill and decode engines."""

__version__ = "0.1.0"
