"""A teacher beside the policy, for distill.py."""
