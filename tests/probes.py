"""A policy that keeps the gradient of each update."""
import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

import batch
import grpo
import model
from fakes import World
from tools import float64

AttentionInterface.register("packed", batch.attention)


class Spy(model.Policy):
    """A random Qwen2 of three layers or fewer in float64 that keeps its gradients."""

    def __init__(self, noise: float = 0.0, layers: int = 3):
        torch.manual_seed(3)
        lm = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
            initializer_range=0.2, bos_token_id=None, eos_token_id=None)).double().eval()
        float64.widen(lm)
        del lm.model.layers[layers:]
        with torch.no_grad():
            for p in lm.parameters():
                p *= 1 + noise * torch.randn_like(p)
        module, self.gradients = model.LogprobModel(lm, grpo.Args()), []
        lm.set_attn_implementation("packed")
        module.reshard = lambda: None  # it is not sharded
        super().__init__(module, World(), grpo.Args())

    def step(self, lr):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.module.parameters()]))
        return super().step(lr)
