"""Environments and tools: several turns, and their rewards (--reply)."""
