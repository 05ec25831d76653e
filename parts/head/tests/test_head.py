"""The head's product in float32: exact sums, in trainer and engine, and planned."""
import json

import pytest
import torch
from torch import nn

import fakes
import memory
import part
import plan
import ranks
from conftest import ROOT
from examples import tiny
from grpo import Args
from parts.head import head, plug
from shapes import shape_of


@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_of_products_is_not_rounded(bias):
    """Against float64 on the same bfloat16 values; its gradients are bfloat16's too."""
    torch.manual_seed(0)
    plain = nn.Linear(512, 64, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(32, 512, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.double(), plain.weight.double(),
                                 plain.bias.double() if bias else None)
    rounded = (plain(x) - exact).abs().max()
    plain.__class__ = head.Float32Linear
    found = plain(x)
    assert found.dtype == torch.float32 and (found - exact).abs().max() < 1e-5 < rounded / 100
    found.sum().backward()
    assert plain.weight.grad.dtype == torch.bfloat16
    assert torch.equal(plain.weight.grad, x.float().sum(0).bfloat16().expand(64, -1))
    double = nn.Linear(4, 4).double()
    double.__class__ = head.Float32Linear
    assert double(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


def test_engine_and_trainer_get_it_together(monkeypatch):
    args = fakes.args(head_dtype="float32")
    assert not plug.engine(None, Args(), None, None) and not plug.memory(None, Args(), None)
    assert plug.engine(None, args, None, None) is head.Float32HeadEngine
    monkeypatch.setattr(head.Engine, "options", lambda self, max_len: {"block_size": max_len})
    engine = object.__new__(head.Float32HeadEngine)
    assert engine.options(7) == {"block_size": 7, "hf_overrides": {"head_dtype": "float32"}}


def test_its_copies_are_planned():
    def logits(dtype: str, head_dtype: str) -> float:
        args = fakes.args(dtype=dtype, head_dtype=head_dtype)
        kind = part.memory(memory.Memory, args, None)
        shape = shape_of("Qwen2.5-0.5B")
        made = kind(plan.Plan(args, 1, 8, 0), shape, 0)
        return made.parts["logits"][1] / (4 * shape.vocab * shape.hidden)
    assert logits("bfloat16", "float32") - logits("bfloat16", "model") == pytest.approx(2)
    assert logits("float32", "float32") == logits("float32", "model")


def test_the_gap_in_bfloat16_is_smaller(tmp_path):
    """On average over 384 completions, with weights that do not move."""
    model, gaps = tiny.ensure(str(ROOT / "runs")), []
    for dtype in "model", "float32":
        ranks.script(ROOT / "grpo.py", *f"--model {model} --name {dtype} --steps 2 --batch 48 "
                     f"--max_tokens 16 --max_prompt_tokens 64 --dtype bfloat16 --lr 1e-9 "
                     f"--no-export --head_dtype {dtype}".split(), ranks=1, cwd=tmp_path)
        rows = map(json.loads, (tmp_path / f"runs/{dtype}/metrics.jsonl").open())
        gaps.append(sum(row["rollout/logprob_gap_mean"] for row in rows))
    assert gaps[1] < 0.95 * gaps[0], gaps
