"""variants/clip_cov.py with constants that act on many tokens of the tests."""
from variants import clip_cov as file

file.LOW, file.HIGH, file.RATE = 0.05, 0.6, 0.5
clip_cov = file.clip_cov
