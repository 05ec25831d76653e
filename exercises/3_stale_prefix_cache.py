"""3. A stale prefix cache.

An engine keeps the states of prompts that it has seen: completions of a group share them. This one
is a toy. In vLLM the same mistake is as silent. Repair the engine.
"""
import torch

prefills = []  # the prompts whose states were computed


def prefill(embedding, prompt):
    """A prompt's state. This is the slow part."""
    prefills.append(prompt)
    return embedding[prompt].sum(0)


# ---- your turn
class Engine:
    """Logits of the next token: the prompt's state times the head."""

    def __init__(self):
        self.cache = {}  # prompt → state

    def load(self, embedding, head):
        """Take the trainer's weights."""
        self.embedding, self.head = embedding.clone(), head.clone()

    def logprobs(self, prompt):
        if tuple(prompt) not in self.cache:
            self.cache[tuple(prompt)] = prefill(self.embedding, prompt)
        return (self.cache[tuple(prompt)] @ self.head).log_softmax(-1)
# ---- the test


def test():
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(2, 8, 8, generator=generator)
    engine, prompts, group = Engine(), [[1, 4, 2], [3, 3]], 4
    for step in range(3):
        engine.load(embedding, head)
        prefills.clear()
        for prompt in prompts * group:
            trainer = (embedding[prompt].sum(0) @ head).log_softmax(-1)
            gap = (engine.logprobs(prompt) - trainer).abs().max()
            assert gap < 1e-5, f"step {step}: engine and trainer differ by {gap:.2f} nats"
        assert len(prefills) == len(prompts), (
            f"step {step}: {len(prefills)} prefills for {len(prompts)} prompts. The {group} "
            f"completions of a prompt must share one")
        embedding = embedding + 0.1 * torch.randn(8, 8, generator=generator)  # an update


# In the project: `if not self.llm.reset_prefix_cache():` in rollout.py.
