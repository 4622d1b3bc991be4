"""The plugin of vLLM inside vLLM (make test-vllm)."""
