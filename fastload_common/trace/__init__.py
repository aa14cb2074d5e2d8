"""Lazy tensors that record what an engine's load_weights copies."""
