"""How does a batch become a gradient? Read batch.py, packing.py, logprobs.py, model.py.

model_files.py: which model, files and tensors. lora.py: adapters. experts.py: mixtures of experts.
This room may import dist, rewards and data, and no other room but scoring.
"""
