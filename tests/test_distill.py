"""distill.py: what is minimized, by enumeration of all completions; the update; its memory.

A vocabulary of 3 and completions of 2 tokens: 9 outcomes, each with its probability. The policy and
the teacher are tables of logits, one row for each prefix.
"""
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import data
import distill
import faults
import losses
import ranks
import sft
from data import DataArgs
from dist import SettingsError
from examples import tiny
from live import Live
from preflight import memory, plan, rules, worst_case
from tools.hostile import fabricate, make_models
from tools.trial import Trial, run_trials
from trainer import logprobs as head
from trainer import model
from trainer import teacher as beside
from trainer.teacher import add_teacher_prompts

V, KINDS = 3, ("reverse_kl", "forward_kl", "jsd")
PAIRS = list(product(range(V), repeat=2))


def tables(seed: int) -> torch.Tensor:
    """Logits (4, V): of the first token, and of the second one after each first one."""
    return 2 * torch.randn(1 + V, V, generator=torch.Generator().manual_seed(seed),
                           dtype=torch.float64)


def logprobs_of(logits, pair):
    first, second = pair
    return torch.stack([logits[0].log_softmax(-1)[first],
                        logits[1 + first].log_softmax(-1)[second]])


def expected_gradient(policy, teacher, coef: float = 1.0, turned: bool = False):
    """The mean over all completions of the gradient of distill.py's sampled-token loss."""
    policy = policy.clone().requires_grad_()
    total = 0
    for pair in PAIRS:
        logp, of_teacher = logprobs_of(policy, pair), logprobs_of(teacher, pair)
        probability = logp.sum().exp().detach()
        batch = SimpleNamespace(sampled=torch.ones(2, dtype=torch.bool))
        args = distill.Args(teacher="x", distill_coef=coef)
        signs = (of_teacher, logp.detach()) if turned else (logp.detach(), of_teacher)
        advantages = distill.compute_advantages(args, batch, *signs)
        loss, _ = losses.clip_loss(
            logp[None], logp[None].detach(), advantages[None], torch.ones(1, 2, dtype=torch.bool),
            clip_low=0.2, clip_high=0.2, dual_clip=None)
        total = total + probability * loss.sum()
    return torch.autograd.grad(total, policy)[0]


def exact_gradient(policy, teacher, kind: str = "reverse_kl"):
    """Of the shipped divergence at every prefix, weighted by how often the policy visits it."""
    visits = torch.cat([torch.ones(1, dtype=torch.float64), policy[0].softmax(-1)])
    policy = policy.clone().requires_grad_()
    return torch.autograd.grad((visits * beside.divergence(policy, teacher, kind)).sum(), policy)[0]


def true_gradient(policy, teacher, whole: bool):
    """autograd of KL(π‖π_T). whole: of sequences. Else at each prefix, visits held fixed."""
    policy = policy.clone().requires_grad_()
    p = policy.log_softmax(-1)
    at = (p.exp() * (p - teacher.log_softmax(-1))).sum(-1)
    visits = p[0].exp() if whole else p[0].exp().detach()
    return torch.autograd.grad(at[0] + (visits * at[1:]).sum(), policy)[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_sampled_token_has_the_expected_gradient_of_the_exact_divergence(seed):
    policy, teacher = tables(seed), tables(seed + 100)
    sampled, exact = expected_gradient(policy, teacher), exact_gradient(policy, teacher)
    true = true_gradient(policy, teacher, whole=False)
    assert torch.allclose(sampled, exact, rtol=0, atol=1e-14)
    assert torch.allclose(exact, true, rtol=0, atol=1e-14)
    turned = expected_gradient(policy, teacher, turned=True)
    assert torch.allclose(turned, -true, rtol=0, atol=1e-14) and true.abs().max() > 0.01
    other = exact_gradient(policy, teacher, "forward_kl")
    assert (other - true).abs().max() > 0.01


def test_the_kl_of_whole_sequences_counts_what_a_token_leads_to():
    """Then the advantage of a token is the sum of its own and all later log-ratios."""
    policy, teacher = tables(0), tables(100)
    fixed, whole = (true_gradient(policy, teacher, w) for w in (False, True))
    assert (fixed - whole).abs().max() > 0.01
    logits, total = policy.clone().requires_grad_(), 0
    for pair in PAIRS:
        logp = logprobs_of(logits, pair)
        gains = (logprobs_of(teacher, pair) - logp).detach()[None]
        to_go = losses.rewards_to_go(gains, torch.ones(1, 2, dtype=torch.bool))[0]
        total = total - (logp.sum().exp().detach() * to_go * logp).sum()
    found, = torch.autograd.grad(total, logits)
    assert torch.allclose(found, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_its_definition_and_its_gradient_autograds(kind):
    policy, teacher = 3 * tables(1), 3 * tables(2)
    logits = policy.clone().requires_grad_()
    p, q = logits.softmax(-1), teacher.softmax(-1)
    m = (p + q) / 2
    theirs = {"reverse_kl": (p * (p / q).log()).sum(-1), "forward_kl": (q * (q / p).log()).sum(-1),
              "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2}[kind]
    ours = beside.divergence(logits, teacher, kind)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    pairs = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
    assert torch.allclose(*pairs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_teacher_that_is_the_student_gives_exactly_nothing(kind, dtype):
    logits = (10 * tables(3)).to(dtype).requires_grad_()
    found = beside.divergence(logits, logits.detach().clone(), kind)
    gradient, = torch.autograd.grad(found.sum(), logits)
    assert not found.any() and not gradient.any()
    far = torch.tensor([[0.0, -200.0, -1e4]], dtype=dtype).requires_grad_()
    found = beside.divergence(far, -far.detach(), kind)
    found.sum().backward()
    assert found.isfinite().all() and far.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_the_same(kind):
    torch.manual_seed(0)
    weight, theirs = torch.randn(2, 11, 8, dtype=torch.float64)
    hidden, other = torch.randn(2, 7, 8, dtype=torch.float64)
    targets, found = torch.randint(11, (7,)), []
    for chunk in (2, 7):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        teacher = beside.Teacher(other, lambda x: x @ theirs.T, 1.5, kind)
        out = beside.token_divergences(h, lambda x, w=w: x @ w.T, targets, 1.5, chunk, "value",
                                       teacher)
        plain = head.token_logprobs(h, lambda x, w=w: x @ w.T, targets, 1.5, 7, "value")
        assert torch.allclose(out[0], plain[0]) and torch.allclose(out[1], plain[1])
        found.append([*out, *torch.autograd.grad(sum(x.sum() for x in (out[0], out[2])), (h, w))])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergences_memory_is_within_the_plan(kind):
    """It does not grow with the micro-batch: a few matrices (chunk, V) more than without."""
    vocab, hidden, chunk, peaks = 2000, 8, 16, {}
    weight, theirs = torch.randn(vocab, hidden, requires_grad=True), torch.randn(vocab, hidden)
    for n in (64, 1024):
        h, t = torch.randn(n, hidden, requires_grad=True), torch.zeros(n, dtype=torch.long)
        teacher = beside.Teacher(torch.randn(n, hidden), lambda x: x @ theirs.T, 1.0, kind)
        with Live() as live:
            logp, _, divergence = beside.token_divergences(
                h, lambda x: x @ weight.T, t, 1.0, chunk, "value", teacher)
            (logp + divergence).sum().backward()
        weight.grad = None
        peaks[n] = live.peak
        assert live.largest <= chunk * vocab * 4
    copies = (peaks[64] - 3 * weight.nbytes) / (chunk * vocab * 4)
    print(f"{kind}: {copies:.1f} matrices")
    assert 0.5 < copies / (memory.UPDATE_HEAD + memory.TEACHER_HEAD) <= 1
    assert peaks[1024] - peaks[64] <= (1024 - 64) * (4 * hidden + 12) * 4


def test_the_plan_counts_a_larger_teacher():
    small, large = (memory.shape_of(f"Qwen2.5-{size}") for size in ("0.5B", "1.5B"))

    def total(teacher=None, **flags):
        found = plan.Plan(plan.changed(distill.Args(teacher="x"), **flags), 1, 1000, 0)
        shape = replace(small, teacher=teacher)
        return {load.phase: load.total for load in memory.loads(found, shape, 80 * memory.GIB)}

    alone, with_large, exact = total(), total(large), total(large, divergence="jsd")
    more = 2 * (large.params - small.params)  # bfloat16
    for phase in ("rollout", "update"):
        assert with_large[phase] - alone[phase] == pytest.approx(more)
    assert with_large["score"] - alone["score"] > more
    assert exact["update"] - with_large["update"] > 2 * large.root
    assert {**exact, "update": 0} == {**with_large, "update": 0}
    kept = total(large, offload=("reference",))
    assert with_large["rollout"] - kept["rollout"] == 2 * large.params


# ---- the shipped update ----

SMALL = dict(update_tokens=256, score_tokens=256, max_tokens=24, max_prompt_tokens=8, head_chunk=16,
             dtype="float32")


def arguments(**flags):
    values = dict(teacher="x", dtype="float64", lr=1e-3, group=4, max_grad_norm=0.0,
                  update_tokens=1 << 20, score_tokens=1 << 20, max_tokens=24)
    return plan.changed(distill.Args(), **values | flags)


def test_a_grade_of_the_reward_needs_a_reward():
    flags = dict(teacher="x", target_reward=(0.1, 0.9))
    problem, = rules.problems(plan.changed(distill.Args(), **flags), 1)
    assert str(problem) == "--target_reward needs --reward. Would work: no --target_reward."
    assert not rules.problems(plan.changed(distill.Args(), reward=("exact",), **flags), 1)


def test_learn_with_the_students_own_weights_moves_nothing(tmp_path):
    """And with other weights it does. One process: the reference's files are the model's."""
    args = arguments()
    make_models("tiny", str(tmp_path))
    samples = fabricate(args, seed=0)
    different = run_trials({"other": Trial(args, [samples])}, distill, str(tmp_path))["other"]
    assert any(g.any() for g in different.gradients.values())
    for file in (tmp_path / "model").iterdir():
        (tmp_path / "reference" / file.name).write_bytes(file.read_bytes())
    wanted = {kind: Trial(arguments(divergence=kind), [samples]) for kind in ("none", *KINDS)}
    for kind, outcome in run_trials(wanted, distill, str(tmp_path)).items():
        assert not any(g.any() for g in outcome.gradients.values()), kind
        assert not any(moved.any() for moved in outcome.moved.values()), kind
        assert outcome.metrics["policy/teacher_kl"] == 0


def test_the_teacher_sees_its_own_prompt(tmp_path):
    """The same completions; in (b) the teacher's hidden states are of the same tokens."""
    args = arguments()
    make_models("tiny", str(tmp_path))

    def samples(more):
        found = fabricate(args, seed=0)
        for sample in found:
            row = sample.prompt.row
            row.teacher_ids = None if more is None else more + row.prompt_ids
        return [found]

    wanted = {}
    for kind in ("none", "jsd"):
        args, small = arguments(divergence=kind), arguments(divergence=kind, update_tokens=50)
        wanted |= {f"{kind}, without": Trial(args, samples(None)),
                   f"{kind}, same": Trial(args, samples([])),
                   f"{kind}, other": Trial(args, samples([7, 3])),
                   f"{kind}, small": Trial(small, samples([7, 3]))}
    found = run_trials(wanted, distill, str(tmp_path))
    for kind in ("none", "jsd"):
        one, two, three, four = (found[f"{kind}, {name}"].gradients["policy, update 1"]
                                 for name in ("without", "same", "other", "small"))
        assert torch.allclose(one, two, rtol=0, atol=1e-14), kind
        assert (three - one).norm() > 1e-3 * one.norm(), kind
        assert (four - three).norm() <= 1e-12 * three.norm(), kind


def tried(world, folder: str) -> dict[str, tuple]:
    """The worst case of each script: its phases, and calls of the divergence."""
    found, shipped = {}, beside.divergence
    for name, args in {"sft": plan.changed(sft.Args(), **SMALL), "none": arguments(**SMALL),
                       "jsd": arguments(divergence="jsd", **SMALL)}.items():
        models = [model.Policy(
            model.build(model.LogprobModel, f"{folder}/{part}", world, args.model_args),
            world, args.model_args, args.optimizer_args) for part in ("model", "reference")]
        calls = []

        def counted(logits, theirs, kind, calls=calls):
            calls.append((torch.is_grad_enabled(), logits.shape == theirs.shape, kind))
            return shipped(logits, theirs, kind)

        beside.divergence = counted
        reference = models[1] if args.needs_reference else None
        peaks = worst_case.measure_phases(
            plan.Plan(args, world.size, 64, 0), world, 64, models[0], reference)
        found[name] = sorted(peaks), set(calls)
        assert all(p.grad is None for p in models[0].module.parameters())
    return found


def test_the_worst_case_has_the_divergence_too(tmp_path):
    """Its head is called again in the backward: the teacher's must be whole there."""
    make_models("tiny", str(tmp_path))
    for found in ranks.results(2, tried, str(tmp_path)):
        assert found == {"sft": (["update"], set()), "none": (["score", "update"], set()),
                         "jsd": (["score", "update"], {(True, True, "jsd")})}


# ---- settings and rows ----

def test_what_teaches_nothing_is_refused():
    def broken(**flags):
        return "\n".join(map(str, rules.problems(arguments(**flags), 1)))

    assert not broken() and not broken(teacher=None, teacher_prompt="{question} {answer}")
    assert "--teacher or --teacher_prompt" in broken(teacher=None)
    assert "--reward_coef needs --reward" in broken(reward_coef=0.5)
    assert not broken(reward_coef=0.5, reward=("exact",))
    assert "--eval_data needs --reward" in broken(eval_data="tiny")
    assert not broken(eval_data="tiny", reward=("exact",))
    unused = dict(divergence="jsd", engine_correction="mask")
    assert "--engine_correction weighs the loss of sampled tokens" in broken(**unused)
    assert not broken(**unused, reward_coef=0.5, reward=("exact",))


def test_the_teachers_prompt_has_more_in_it():
    tokenizer, columns = tiny.make_tokenizer(), {"question": "Sort 31", "answer": "13"}
    row = data.make_row(0, columns, "made up", tokenizer, [], DataArgs())
    add_teacher_prompts([row], tokenizer, DataArgs(), "{question} hint: {answer}")
    assert tokenizer.decode(row.teacher_ids) == row.prompt.replace("31", "31 hint: 13")
    row.columns["note"], row.columns["half"] = " \n", "\ud800"
    for template, limit in (("{note}", 512), ("{answer}", 512),
                            ("{question} {question} {answer}", 15)):
        with pytest.raises(SettingsError, match="--teacher_prompt gives row 0"):
            add_teacher_prompts([row], tokenizer, DataArgs(limit), template)
    with pytest.raises(SettingsError, match="--teacher_prompt, row 0: .*surrogates"):
        add_teacher_prompts([row], tokenizer, DataArgs(), "{question} {half}")


# ---- the run ----

@pytest.mark.slow
def test_three_kills_of_three(tmp_path):
    """The teacher is the run's own model, with the answer in its prompt. Rank 1 of 2 is killed in
    a save, both in an update, rank 0 in a rollout: metrics, samples, weights and AdamW's state are
    those of the run that was not killed, bit for bit."""
    flags = ["--model", faults.model(), "--steps", "6", "--teacher_prompt", "{question} {answer}",
             "--divergence", "jsd", "--max_prompt_tokens", "40", "--reward", "exact",
             "--reward_coef", "0.5"]
    kills = ("saved:1:1:kill", "backward:*:3:kill", "rollout:0:4:kill")
    for name, faulty in (("whole", ""), *(("killed", kill) for kill in kills), ("killed", "")):
        attempt = faults.Attempt(tmp_path, *flags, "--name", name, script="distill", faults=faulty)
        try:
            status, text = attempt.end()
        finally:
            attempt.kill()
        assert bool(status) == bool(faulty), text
        assert not faulty or "exitcode  : -9" in text, text
    assert "resumed from runs/killed/checkpoints/step_4" in text
    assert faults.progress(tmp_path / "runs/whole") == 6
    assert faults.differences(tmp_path / "runs/whole", tmp_path / "runs/killed") == []
