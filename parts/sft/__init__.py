"""Which tokens of a chat sft.py learns."""
