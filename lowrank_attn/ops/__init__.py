"""Attention operations on features: `causal`, `bidirectional`, `decode_step`."""
