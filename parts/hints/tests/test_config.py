"""What transformers' training reads in config.json and no run here does is said once."""
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from family_cases import CASES, SIZES
from parts.hints.hints import asked, what_is_not_computed

MIXED = "mixtral", "olmoe", "qwen3_moe", "qwen2_moe"
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
KINDS = {kind: options | {"vocab_size": 320} for kind, options in [*CASES.values()][::-1]} | {
    kind: EXPERTS | {"vocab_size": 320} for kind in MIXED}
IDS = torch.arange(40).unsqueeze(0)


def computed(kind: str, options: dict, train: bool) -> torch.Tensor:
    """The loss of a random model in training, or its logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind] | options)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train(train)
    with torch.no_grad():
        found = lm(IDS, labels=IDS, **({"output_router_logits": True} if kind in MIXED else {}))
    return found.loss if train else found.logits


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_that_acts_in_training_alone_is_named_and_no_other_one(kind):
    """Of all numbers of a config.json that are no counts. A key that does nothing may be named."""
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind]).to_dict()
    keys = [key for key, value in config.items()
            if isinstance(value, float) or "drop" in key and value is not True]
    right, acting = set(), set()
    for key in keys:
        changes = {train: not torch.equal(*(computed(kind, {key: x}, train) for x in (0.2, 0.4)))
                   for train in (True, False)}
        acting |= {key} if changes[False] else set()
        right |= {key} if changes[True] and not changes[False] else set()
    named = {key for key in keys if asked({key: 0.4})}
    assert right <= named and not named & acting, (right, named, acting)
    assert right or kind == "ernie4_5"  # it has no dropout


@pytest.mark.parametrize("stored, right", [
    ({"attn_pdrop": 0.1, "n_layer": 2}, "attn_pdrop 0.1"), ({"attn_pdrop": 0.0}, ""),
    ({"text_config": {"router_aux_loss_coef": 1}}, "router_aux_loss_coef 1"),
    ({"aux_loss_alpha": 0.001, "layerdrop": None, "use_dropout": True}, "aux_loss_alpha 0.001"),
    ({"classifier_dropout": 0.1, "summary_first_dropout": 0.1}, "")])
def test_what_config_json_asks_for_is_one_sentence(stored, right):
    said = [*what_is_not_computed(SimpleNamespace(to_dict=lambda: stored))]
    assert len(said) == bool(right) and right in " ".join(said)
