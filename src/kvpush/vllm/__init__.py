"""The adapter to vLLM's KV connector interface: the only package that imports vllm besides sim."""
