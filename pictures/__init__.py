"""pictures/: prompts with pictures, for models that see: idefics3 (SmolVLM). Read in this order.
eyes.py     a picture: opened, counted in tokens, made pixels
rows.py     the pictures of a row, and their places in its prompt
seeing.py   what a model and a policy do beside
"""
