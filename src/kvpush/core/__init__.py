"""The sans-IO protocol: no clock, thread, socket, torch, nixl or vllm."""
