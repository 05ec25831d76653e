"""What is measured: RESULTS.md has the numbers."""
