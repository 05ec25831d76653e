"""clip_cov and geometric of variants/ with constants that act on a part of the tests' tokens."""
from variants import clip_cov as file
from variants import geometric as other

file.LOW, file.HIGH, file.RATE = 0.05, 0.6, 0.5
other.LOW, other.HIGH = 0.7, 1.2
clip_cov, geometric = file.clip_cov, other.geometric
