"""What a detail is worth: `probes.py OUT TESTS EXPRESSION...` pickles values, then runs tests.

mutations.py runs it in the code as it is and in a copy with one mistake, and compares.
"""
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import pytest
import torch

import data
import grpo
import learning
import losses
import ppo
import ranks
import rollout
import test_packing
from dist import balance, cut, share, tokens  # noqa: F401
from forked import PYTHON
from learning import Case, fabricate, whole
from running import (
    evaluate,  # noqa: F401
    worst_case,
)
from trainer import model
from trainer.batch import Batch, Micro

F64 = torch.float64


class World(SimpleNamespace):
    """One rank without a process group."""
    rank, size, device = 0, 1, torch.device("cpu")

    def __init__(self):
        super().__init__(same_phase=lambda *_: None, gather=lambda x: x, sum=lambda x: x,
                         max=lambda x: x)


class Spy(model.Policy):
    """A random Qwen2 of three layers in float64 that keeps its gradients."""

    def __init__(self, noise: float = 0.0):
        lm = test_packing.small("qwen2")
        with torch.no_grad():
            for p in lm.parameters():
                p *= 1 + noise * torch.randn_like(p)
        module, self.gradients = model.LogprobModel(lm, 0), []
        lm.set_attn_implementation("packed")
        module.reshard = lambda: None  # it is not sharded
        super().__init__(module, World(), model.ModelArgs(), model.OptimizerArgs())

    def step(self, lr):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.module.parameters()]))
        return super().step(lr)

    def whole(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


def gradient(samples="mixed", **flags) -> torch.Tensor:
    """Of one grpo.learn of 7 prompts x 4 completions, over all parameters."""
    args, policy, reference = learning.arguments(**flags), Spy(), Spy(0.05)
    grpo.learn(args, World(), policy, fabricate(samples, 7), lr=1e-3, reference=reference)
    return policy.gradients[0]


def gradient_on_two_ranks() -> torch.Tensor:
    case = Case(7)
    with tempfile.TemporaryDirectory() as folder:
        ranks.results(1, learning.make_models, folder)
        return whole([outcome.gradients[0] for outcome, in ranks.results(
            2, learning.learn_all, folder, [case], timeout=60)])


def largest_update() -> int:
    """Tokens of the largest micro-batch of an update."""
    shipped, found = Batch.micros, []

    def micros(self, world, rows, budget, phase, *learns):
        made = shipped(self, world, rows, budget, phase, *learns)
        found.extend(micro.tokens for micro in made if phase == "update")
        return made

    Batch.micros = micros
    gradient(update_tokens=50, score_tokens=170)
    Batch.micros = shipped
    return max(found)


ROWS = 6


def tokens_of(seed: int = 0):
    """logp with gradient, old, A, row of ROWS completions: (n,). Off-policy."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(ROWS).repeat_interleave(torch.randint(1, 8, (ROWS,), generator=g))
    logp, noise = -torch.rand(2, len(row), dtype=F64, generator=g) * 2
    A = torch.randn(ROWS, dtype=F64, generator=g)[row]
    return logp.requires_grad_(), logp.detach() + 0.5 * (noise + 1), A, row


def equal_rewards() -> list:
    """Of three rewards of 0.1: would --dynamic_sampling train on them, and the largest |A|."""
    rewards, scored = torch.full((3,), 0.1, dtype=F64), torch.ones(3, dtype=torch.bool)
    advantages = losses.group_advantages(rewards, 3, kind="grpo", eps=0.0, scored=scored)
    return [bool(losses.keep_groups(rewards, 3, scored)), round(float(advantages.abs().max()), 2)]


def loss_gradient(loss, **bounds) -> torch.Tensor:
    """Of the mean token loss."""
    logp, old, A, row = tokens_of()
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None} | bounds
    return torch.autograd.grad(loss(logp, old, A, row, n_rows=ROWS, **bounds)[0].mean(), logp)[0]


def expected_kl_gradient(kind: str) -> float:
    """The norm of the expected gradient of a KL estimate as a loss: a vocabulary of 3, all cases.
    """
    theta, ref = torch.tensor([0.3, -0.2, 0.5], dtype=F64), torch.zeros(3, dtype=F64)
    theta.requires_grad_()
    logp = theta.log_softmax(0)
    estimate = losses.kl_estimate(logp, ref.log_softmax(0), kind=kind)
    loss = (logp.detach().exp() * estimate).sum()
    return round(float(torch.autograd.grad(loss, theta)[0].norm()), 3)


def gae(*lengths) -> torch.Tensor:
    """Advantages of random rewards and values."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, sum(lengths), dtype=F64, generator=g)
    return losses.gae(rewards, values, torch.tensor(lengths), gamma=0.99, lam=0.95)[0]


def value_gradient() -> torch.Tensor:
    values, old, *_ = tokens_of()
    loss = losses.value_loss(values, old, torch.zeros_like(old), clip=0.2)[0]
    return torch.autograd.grad(loss.sum(), values)[0]


def agree(world) -> bool:
    return world.any_rank(world.rank == 2)


def disagree(world) -> bool:
    """Is this rank told that it is in another phase?"""
    try:
        world.same_phase("update", world.rank)
    except RuntimeError:
        return True
    return False


def bfloat16_head() -> tuple[float, torch.dtype]:
    """Log-probs of a model in bfloat16: their mean error in nats, of 1,000 tokens and a vocabulary
    of 1,000, and their dtype."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=0.3)
    hidden = torch.randn(1000, 64).bfloat16()
    lm = SimpleNamespace(lm_head=head, config=SimpleNamespace(vocab_size=1000))
    fake = SimpleNamespace(lm=lm, cap=None, sees=False)
    with torch.no_grad():
        exact = (hidden.double() @ head.weight.double().T).log_softmax(-1)[:, 0]
        ours = model.token_logprobs(
            hidden, lambda h: model.LogprobModel.head(fake, h), torch.zeros(1000, dtype=torch.long),
            1.0, 4096, "none")[0]
    return round(float((ours.double() - exact).abs().mean()), 4), ours.dtype


def one_step(gradient: float, lr: float) -> float:
    """What one weight of 0 is after an optimizer step."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    world = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"))
    trained = model.Trained(layer, world, model.ModelArgs(), model.OptimizerArgs())
    layer.weight.grad = torch.full((1, 1), gradient)
    trained.step(lr)
    return round(float(layer.weight.detach()), 4)


def moved_without_tokens() -> float:
    """How far a step with nothing to learn from moves the weights, after one with something."""
    policy, args = Spy(), learning.arguments()
    seen = [policy.whole()]
    for samples in ("plain", "unscored"):
        grpo.learn(args, World(), policy, fabricate(samples, 4), lr=args.lr)
        seen.append(policy.whole())
    start, learnt, end = seen
    return round(float((end - learnt).norm() / (learnt - start).norm()), 2)


def critic_targets() -> float:
    """The size of what ppo.py's critic is to learn where every reward is 1 and its values are 0."""

    def values(micro):
        return torch.zeros(len(micro.targets), dtype=F64, requires_grad=True)

    critic = SimpleNamespace(values=values, backward=lambda loss: None, step=lambda lr: 0.0)
    policy = SimpleNamespace(logprobs=lambda micro, *_: (values(micro).detach(), None),
                             metrics={})
    metrics = ppo.learn(learning.arguments(ppo, lam=1.0), World(), (policy, critic),
                        fabricate("equal", 4), lr=0.0, critic_lr=1e-3, kl_coef=0.0)
    return round((2 * metrics["loss/value"]) ** 0.5, 6)


def seeds() -> int:
    """Different seeds of 64 prompts x 8 completions."""
    return len({request.seed for request in requests(64, 8)})


def requests(prompts: int, group: int, first: int = 0) -> list:
    """What Engine.sample asks the engine for."""
    asked, row = [], data.Row(0, "", [1], None, {}, "")
    sample = SimpleNamespace(completion=worst_case.sample([1], np.ones(1)).completion)
    engine = SimpleNamespace(
        seed=0, world=SimpleNamespace(same_phase=lambda *_: None, gather=lambda x: x, rank=0),
        log=SimpleNamespace(time=lambda name: torch.no_grad()), args=SimpleNamespace(tp=1),
        engines=1,
        generate=lambda x, *_: asked.extend(x) or [sample.completion for _ in x])
    engine.episodes = engine.carry = None
    engine.complete = partial(rollout.Engine.complete, engine)
    rollout.Engine.sample(engine, [data.Prompt(first + i, row) for i in range(prompts)], group, 1.0)
    return asked


def two_epochs() -> int:
    """Rows seen in 32 batches of 64, of 1,000 rows: two epochs."""
    stream = data.Stream([data.Row(i, "", [1], None, {}, "") for i in range(1000)], seed=0)
    return sum(len(stream.next(64)) for _ in range(32))


def end_tokens(ids) -> int:
    """What ends a completion, by a generation config with these ids."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return len(data.eos_ids(folder, ending_in(None)))


def ending_in(eos_token_id: int | None):
    """A tokenizer of which only its end token is known."""
    return SimpleNamespace(
        eos_token_id=eos_token_id, added_tokens_decoder={}, bos_token=None,
        chat_template=None, convert_tokens_to_ids=list)


def sampled() -> int:
    """Tokens that are kept of five sampled ones, of which the last is the end."""
    logprobs = SimpleNamespace(logprobs=[-0.5] * 5)
    return len(rollout.completion_of(SimpleNamespace(
        token_ids=[5, 6, 7, 8, 2], logprobs=logprobs, finish_reason="stop",
        routed_experts=None)).ids)


def tokens_with_loss() -> int:
    """Of eight sampled tokens, two of which are the end token 0."""
    completions = [3, 0], [4, 4, 0], [5, 5, 5]
    batch = Batch([worst_case.sample([1, 2], np.array(ids)) for ids in completions])
    return len(Micro(batch, [0, 1, 2], torch.device("cpu")).targets)


def bos() -> int:
    """Begin-of-sequence tokens of a prompt whose chat template writes one."""
    from test_data import CHATML, QA, load_row, make_tokenizer
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, bos="<s>")
    return load_row(QA, tokenizer=tokenizer).prompt_ids.count(tokenizer.bos_token_id)


def evaluated() -> str:
    """What sympy, as a reward worker has it, does with code in a formula."""
    from sympy.parsing import sympy_parser

    from scoring import verifiers
    kept = sympy_parser.stringify_expr
    try:
        verifiers.shut_sympy()
        sympy_parser.parse_expr("__import__('os').getpid()")
    except ValueError:
        return "refused"
    finally:
        sympy_parser.stringify_expr = kept
    return "run"


def engine_gap(tied: bool = True) -> float:
    """The largest |engine - trainer| log-prob after three weight syncs, at temperatures 1 and 0.7:
    real engines on two ranks."""
    import test_engine
    with tempfile.TemporaryDirectory() as folder:
        test_engine.make(Path(folder, "model"), tied)
        subprocess.run(
            [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
             "tests/engine_worker.py", f"{folder}/model", f"{folder}/out"], check=True,
            cwd=Path(__file__).parent.parent, capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"})
        gaps = json.loads(Path(folder, "out").read_text())["gap"]
    return float(f"{max(g for k, v in gaps.items() if k.startswith('sync') for g in v):.0e}")


def resumed() -> np.ndarray:
    """All weights after 4 steps, of which the last two are resumed."""
    import shutil

    import test_checkpoint
    with tempfile.TemporaryDirectory() as folder:
        learning.make_models(None, folder)
        for first, last in ((0, 2), (2, 4)):
            (_, found), *_ = ranks.results(
                2, test_checkpoint.a_run, f"{folder}/tied", f"{folder}/checkpoints", first, last,
                (2,))
        shutil.rmtree(f"{folder}/checkpoints")
    return torch.cat([torch.from_numpy(v).flatten() for k, v in sorted(found.items())
                      if k.endswith("weight")])


def reward_that_hangs() -> str:
    """What a completion gets within 20 s whose reward never returns, with a limit of 2 s."""
    import rewards
    scored = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own.py").write_text(
            "import time\ndef f(completion, answer):\n    time.sleep(1000)\n")
        scorer = rewards.Pool([f"{folder}/own.py:f"], rewards.RewardArgs(1, 2.0))
        item = rewards.Item("", "x", "", {}, 1, False)
        thread = threading.Thread(target=lambda: scored.extend(scorer.ask([item])), daemon=True)
        thread.start()
        thread.join(20)
        scorer.close()
    return "no score" if scored else "no end within 20 s"


def value_of(expression: str):
    """Or how it fails: on ranks by what a rank raised."""
    try:
        return eval(expression)
    except Exception as error:
        return re.findall(r"(\w*Error)\b", f"{type(error).__name__}: {error}")[-1]


def main(out: str, tests: str, *expressions: str) -> int:
    Path(out).write_bytes(pickle.dumps([value_of(each) for each in expressions]))
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests.split("\n")])


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
