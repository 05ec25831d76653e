"""How does a batch become a gradient? Read batch.py, packing.py, logprobs.py, model.py.

lora.py: adapters. experts.py: mixtures of experts. teacher.py: a second model beside the policy.
This room may import dist, rewards and data, and no other room but scoring.
"""
