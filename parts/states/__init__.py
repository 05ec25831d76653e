"""Layers with a state (Qwen3.5)."""
