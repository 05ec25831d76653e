"""How does a batch become a gradient? Read batch.py, packing.py, logprobs.py, model.py.

lora.py: adapters. teacher.py: a second model beside the policy (distill.py). samples.py: what is
kept of a completion for people to read.
This room may import dist, rewards and data, and no other room but scoring.
"""
