"""Adapters (--lora_rank)."""
