"""parts/: what most runs do not use, one folder each. A run that uses no part enters no line of it.

turns/      environments and tools: several turns, and their rewards (--reply)
judges/     `async def` rewards, which wait: many calls of one worker run together
lora/       adapters (--lora_rank)
experts/    mixtures of experts
pictures/   models that see
states/     models with layers that have a state (Qwen3.5)
carry/      completions that go on in the next step (--carry)
sft/        which tokens of a chat sft.py learns
distill/    a teacher beside the policy, for distill.py
report/     the page of a run (--report)
pairs.py    which of their flags do not go together
"""
