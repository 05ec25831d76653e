"""Models that see."""
