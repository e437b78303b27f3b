"""An OpenAI-compatible router that pairs prefill and decode engines."""
