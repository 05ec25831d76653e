"""pictures/: prompts with pictures, for models that see. Read in this order.
eyes.py        a picture, from its file
idefics3.py    a family (SmolVLM): ids, pixels, features
qwen2_vl.py    three others, with the same names
rows.py        the pictures of a row, and their places in its prompt
seeing.py      the table of families, and what a model and a policy do beside
"""
