"""pictures/: prompts with pictures, for models that see. Read in this order.
eyes.py        a picture, from its file
idefics3.py    a family (SmolVLM): ids and pixels, what vLLM leaves out, features
qwen2_vl.py    another, with the same names
qwen2_5_vl.py, qwen3_vl.py   what differs from it
rows.py        the pictures of a row, and their places in its prompt
seeing.py      the table of families, and what a model and a policy do beside
"""
