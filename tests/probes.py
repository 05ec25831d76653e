"""The gradient of one update, for docs/learn/choices_and_gap.md."""
import torch

import grpo
import learning
from fakes import Spy, World
from learning import fabricate


def gradient(samples="mixed", **flags) -> torch.Tensor:
    """Of one grpo.learn of 7 prompts x 4 completions, over all parameters."""
    args, policy, reference = learning.arguments(**flags), Spy(), Spy(0.05)
    grpo.learn(args, World(), policy, fabricate(samples, 7), lr=1e-3, reference=reference)
    return policy.gradients[0]
