"""distill.py: what is minimized, by enumeration; a teacher's prompt; its memory; a killed run."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import data
import fakes
import faults
import inputs
import losses
import model
import plan
import ranks
import texts
from data import DataArgs
from errors import SettingsError
from examples import tiny
from live import Live
from parts.distill import distill
from parts.distill import divergence as head
from parts.distill.teacher import HEAD, TeacherMemory, add_teacher_prompts, find_teacher
from settings import changed
from shapes import shape_of
from test_seams import models_loaded
from tools import float64

V, KINDS = 3, ("reverse_kl", "forward_kl", "jsd")


def tables(seed: int) -> torch.Tensor:
    return 2 * torch.randn(4, V, generator=torch.Generator().manual_seed(seed),
                           dtype=torch.float64)


def test_the_sampled_token_has_the_expected_gradient_of_the_exact_divergence():
    """The expectation is over all tokens, each with its probability."""
    policy, teacher = tables(0)[:1].requires_grad_(), tables(100)[:1]
    logp, of_teacher = policy.log_softmax(-1)[0], teacher.log_softmax(-1)[0]  # (V,)
    advantages = distill.compute_advantages(
        distill.Args(teacher="x"), None, logp.detach(), of_teacher)
    loss, _ = losses.clip_loss(logp, logp.detach(), advantages, torch.arange(V), clip_low=0.2,
                               clip_high=0.2, dual_clip=None)
    found = [torch.autograd.grad(x.sum(), policy, retain_graph=True)[0] for x in (
        logp.detach().exp() * loss, head.divergence(policy, teacher, "reverse_kl"))]
    assert torch.allclose(*found, rtol=0, atol=1e-14) and found[0].abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_gives_exactly_nothing(kind):
    logits = (10 * tables(3)).float().requires_grad_()
    found = head.divergence(logits, logits.detach().clone(), kind)
    gradient, = torch.autograd.grad(found.sum(), logits)
    assert not found.any() and not gradient.any()
    far = torch.tensor([[0.0, -200.0, -1e4]]).requires_grad_()
    found = head.divergence(far, -far.detach(), kind)
    found.sum().backward()
    assert found.isfinite().all() and far.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergences_memory_is_within_the_plan(kind):
    """It does not grow with the micro-batch: a few matrices (chunk, V) more than without."""
    vocab, hidden, chunk, n = 2000, 8, 16, 64
    weight, theirs = torch.randn(vocab, hidden, requires_grad=True), torch.randn(vocab, hidden)
    h, t = torch.randn(n, hidden, requires_grad=True), torch.zeros(n, dtype=torch.long)
    teacher = head.Teacher(torch.randn(n, hidden), lambda x: x @ theirs.T, 1.0, kind)
    with Live() as live:
        logp, _, divergence = head.token_divergences(
            h, lambda x: x @ weight.T, t, 1.0, chunk, False, teacher)
        (logp + divergence).sum().backward()
    assert live.largest <= chunk * vocab * 4
    copies = (live.peak - 3 * weight.nbytes) / (chunk * vocab * 4)
    assert 0.5 < copies / (plan.UPDATE_HEAD + HEAD) <= 1


def test_the_plan_counts_a_larger_teacher():
    small, large = (shape_of(f"Qwen2.5-{size}") for size in ("0.5B", "1.5B"))

    def total(teacher=None, **flags):
        made = plan.Plan(changed(distill.Args(teacher="x"), **flags), 1, 1000, 0)
        found = TeacherMemory(made, replace(small, reference=teacher), 80 * plan.GIB)
        return found.parts, {phase.name: sum(found.micro_batch(phase)) for phase in made.phases(64)}

    (alone, _), (with_large, passes), (_, exact) = (
        total(), total(large), total(large, divergence="jsd"))
    more = 2 * (large.params - small.params)  # bfloat16
    assert with_large["reference"][0] - alone["reference"][0] == pytest.approx(more)
    assert passes["score"] > total()[1]["score"] and passes["update"] == total()[1]["update"]
    assert exact["update"] - passes["update"] > 2 * large.root
    assert exact["score"] == passes["score"]
    assert total(large, offload=("reference",))[0]["reference"] == (0, 0)


# ---- the shipped update ----

SMALL = dict(update_tokens=256, score_tokens=256, max_tokens=24, max_prompt_tokens=8, head_chunk=16,
             dtype="float32")


def arguments(**flags):
    values = dict(teacher="x", dtype="float64", lr=1e-3, group=4, max_grad_norm=0.0,
                  update_tokens=1 << 20, score_tokens=1 << 20, max_tokens=24)
    return changed(distill.Args(), **values | flags)


def tried(world, folder: str) -> dict[str, tuple]:
    """The worst case of each script: its phases, and calls of the divergence."""
    sft, trial = map(import_module, ("parts.sft.sft", "parts.trial.trial"))
    found, shipped = {}, head.divergence
    for name, args in {"sft": changed(sft.Args(), **SMALL), "none": arguments(**SMALL),
                       "jsd": arguments(divergence="jsd", **SMALL)}.items():
        models = [model.Policy(
            model.build(model.LogprobModel, folder, world, args), world, args)
            for _ in range(2)]
        calls = []

        def counted(logits, theirs, kind, calls=calls):
            calls.append((torch.is_grad_enabled(), logits.shape == theirs.shape, kind))
            return shipped(logits, theirs, kind)

        head.divergence = counted
        reference = models[1] if args.needs_reference else None
        peaks = trial.measure_phases(
            plan.Plan(args, world.size, 64, 0), world, 64, models[0], reference)
        found[name] = sorted(peaks), set(calls)
        assert all(p.grad is None for p in models[0].module.parameters())
    return found


def test_the_worst_case_has_the_divergence_too(tmp_path):
    """Its head is called again in the backward: the teacher's must be whole there."""
    for other in "parts.sft.sft", "parts.trial.trial":
        pytest.importorskip(other)
    float64.make(str(tmp_path), 64)
    for found in ranks.results(2, tried, str(tmp_path)):
        assert found == {"sft": (["update"], set()), "none": (["score", "update"], set()),
                         "jsd": (["score", "update"], {(True, True, "jsd")})}


def test_the_teacher_is_loaded_and_not_trained(tmp_path, monkeypatch):
    given = fakes.args(distill, seed=3, teacher="x")
    assert models_loaded(tmp_path, monkeypatch, given, "teacher") == [
        (model.LogprobModel, "start", 3, True), (model.LogprobModel, "teacher", 3, False)]


# ---- settings and rows ----

def test_what_teaches_nothing_is_refused():
    def broken(**flags):
        return "\n".join(plan.problems(arguments(**flags), 1))

    assert not broken() and not broken(teacher=None, teacher_prompt="{question} {answer}")
    assert "--teacher or --teacher_prompt" in broken(teacher=None)
    prompt = dict(teacher=None, teacher_prompt="{question} {answer}")
    for flag in ["replay_routing"]:
        assert "no experts for the prompts of --teacher_prompt" in broken(**{flag: True}, **prompt)
    assert "--reward_coef needs --reward" in broken(reward_coef=0.5)
    assert "--eval_data needs --reward" in broken(eval_data="tiny")
    assert "--target_reward needs --reward." in broken(target_reward=(0.1, 0.9))
    unused = dict(divergence="jsd", engine_correction="mask")
    assert "--engine_correction is for the loss of sampled tokens" in broken(**unused)
    bounds = dict(divergence="jsd", clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    assert broken(**bounds).count("is for the loss of sampled tokens") == 3
    assert not broken(**unused, reward_coef=0.5, reward=("exact",), eval_data="tiny")


def test_a_teacher_has_the_tokenizer_of_the_model_and_a_divergence_its_rows(tmp_path):
    def saved(name: str, rows: int, *tokens: str) -> str:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(
            "qwen2", vocab_size=rows, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1)).save_pretrained(tmp_path / name)
        made = tiny.make_tokenizer()
        made.add_tokens([*tokens])
        made.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    def found(teacher: str, divergence: str):
        args, lm = distill.Args(model="it", teacher=teacher, divergence=divergence), model.skeleton(
            student)
        tokenizer = inputs.load_tokenizer("it", student)
        files = inputs.ModelFiles(shape_of("tiny"), tokenizer, student, lm)
        return find_teacher(args, files).reference

    student, wide = saved("student", 320), saved("wide", 328)
    assert found(student, "jsd") == student and found(wide, "none") == wide
    with pytest.raises(SettingsError, match="--teacher has 328 rows and --model 320.*none"):
        found(wide, "jsd")
    with pytest.raises(SettingsError, match="must share the vocabulary of --model it"):
        found(saved("other", 328, "another"), "none")


def test_the_teachers_prompt_has_more_in_it():
    tokenizer, columns = tiny.make_tokenizer(), {"question": "Sort 31", "answer": "13"}
    row = data.make_row(0, columns, "made up", tokenizer, texts.marks_of(tokenizer), DataArgs())
    made, = add_teacher_prompts([row], tokenizer, DataArgs(), "{question} hint: {answer}")
    assert tokenizer.decode(made.teacher_ids) == row.prompt.replace("31", "31 hint: 13")
    row.columns |= {"note": " \n", "half": "\ud800"}
    for template, limit in ("{note}", 512), ("{question} {question} {answer}", 15):
        with pytest.raises(SettingsError, match="--teacher_prompt gives row 1"):
            add_teacher_prompts([row], tokenizer, DataArgs(limit), template)
    with pytest.raises(SettingsError, match="--teacher_prompt, row 1: .*surrogates"):
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
        attempt = faults.Attempt(tmp_path, *flags, "--name", name, faults=faulty,
                                 script="parts/distill/distill")
        try:
            status, text = attempt.end()
        finally:
            attempt.kill()
        assert bool(status) == bool(faulty), text
        assert not faulty or "exitcode  : -9" in text, text
    assert "resumed from runs/killed/checkpoints/step_4" in text
    assert faults.progress(tmp_path / "runs/whole") == 6
    assert faults.differences(tmp_path / "runs/whole", tmp_path / "runs/killed") == []
