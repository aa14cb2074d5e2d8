"""vLLM adapter of fastload."""
