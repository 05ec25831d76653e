"""distill.py learns as its formulas say; a teacher's prompt, its memory, its files."""
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import chat_template
import data
import fakes
import families
import identity
import memory
import model
import plan
import preflight
import ranks
from data import DataArgs
from errors import SettingsError
from examples import tiny
from model_files import shape_from
from parts.distill import distill, divergence
from parts.distill.teacher import TaughtRow, TeacherMemory, add_teacher_prompts, find_teacher
from reference import (
    Completion,
    Model,
    before_update,
    mean,
    minibatches,
    policy_metrics,
    update_policy,
)
from reference_settings import PROMPT, SAMPLED, VOCAB, Setting, choices, drawn
from shapes import shape_of
from tables import table
from updates import every_pair, folder, right  # noqa: F401

# ---- the update


def exact(kind: str, logp, logq):
    """Of π from π_T at each token: log-probs (n, V) of the whole vocabulary → (n,).

        reverse_kl  Σ_v π log (π / π_T)        forward_kl  Σ_v π_T log (π_T / π)
        jsd         half of KL(π ‖ m) + KL(π_T ‖ m), m = (π + π_T) / 2
    """
    p, q = logp.exp(), logq.exp()
    logm = ((p + q) / 2).log()
    return {"reverse_kl": p * (logp - logq), "forward_kl": q * (logq - logp),
            "jsd": (p * (logp - logm) + q * (logq - logm)) / 2}[kind].sum(-1)


def learned(args, policy: Model, teacher: Model, completions: list[Completion],
            seen: list[Completion], lr: float) -> dict[str, float]:
    """One step of distill.py → metrics. seen: the completions behind the teacher's prompts.

    A = c (log π_T - log π_old) of each token without --divergence, plus w (R - mean of the group).
    """
    step = before_update(policy, teacher, completions, ["trained"] * len(completions))
    with torch.no_grad():
        step.ref = [teacher.logprobs(c)[0].tolist() for c in seen]
        theirs = [teacher.distributions(c) for c in seen]  # (n, V) each
    for i, c in enumerate(completions):
        first = i - i % args.group
        group = [it.reward for it in completions[first:first + args.group] if it.reward is not None]
        more = args.reward_coef * (c.reward - mean(group)) if c.reward is not None else 0.0
        step.advantages[i] = [more - (args.distill_coef * kl if args.divergence == "none" else 0.0)
                              for kl in step.kl(i)]

    def beside(i: int) -> list[tuple[dict, float]]:
        """c times the divergence at each token."""
        found = [{"policy/teacher_kl": kl} for kl in step.kl(i)]
        if args.divergence == "none":
            return [(one, 0.0) for one in found]
        apart = exact(args.divergence, policy.distributions(completions[i]), theirs[i])
        return [(one | {"loss/divergence": x}, args.distill_coef * x)
                for one, x in zip(found, apart, strict=True)]

    terms = []
    norms = [update_policy(args, policy, step, rows, lr, terms, beside=beside)
             for rows in minibatches(args, step)]
    metrics = policy_metrics(args, step, terms, norms)
    return {name: value for name, value in metrics.items() if "dropped" not in name} | {"lr": lr}


class Taught(Setting):
    """With --teacher_prompt the teacher has another prompt: also where two rows have the same one.
    """
    scripts = {"distill": distill}

    @property
    def teaches(self):
        return self.flags["teacher"] is not None

    def samples(self, step):
        found, rng = super().samples(step), np.random.default_rng(step)
        for i, sample in enumerate(found if self.flags["teacher_prompt"] else ()):
            if i % self.group == 0:
                row = TaughtRow(**vars(sample.prompt.row),
                                teacher_ids=rng.integers(0, VOCAB, PROMPT).tolist())
            sample.prompt = sample.prompt._replace(row=row)
        return found

    def learn(self, args, models, samples, completions, lr, kl_coef):
        seen = [replace(c, prompt=getattr(s.prompt.row, "teacher_ids", c.prompt))
                for s, c in zip(samples, completions, strict=True)]
        return learned(args, models[0], models[2], completions, seen, lr)


CHOICES = SAMPLED | choices("""
teacher x None
teacher_prompt None {question}
steps 1 2
divergence none reverse_kl forward_kl jsd
distill_coef 1.0 0.3
reward ('exact',)
reward_coef 0.0 2.0
head_chunk 2048 5""")


@pytest.mark.parametrize("count", [8, pytest.param(10**6, marks=pytest.mark.slow)])
def test_it_learns_as_its_formulas_say_on_two_ranks(count, folder, right):  # noqa: F811
    every_pair(drawn("distill", CHOICES, Taught, group=3, count=count), 2, folder, right)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_divergence_is_exactly_nothing_from_itself_and_finite(kind):
    logits = (20 * torch.randn(4, 3)).requires_grad_()
    found = divergence.divergence(logits, logits.detach().clone(), kind)
    assert not found.any() and not torch.autograd.grad(found.sum(), logits)[0].any()
    far = torch.tensor([[0.0, -200.0, -1e4]]).requires_grad_()
    found = divergence.divergence(far, -far.detach(), kind)
    assert found.isfinite().all() and torch.autograd.grad(found.sum(), far)[0].isfinite().all()


# ---- the teacher

def test_the_plan_counts_a_larger_teacher():
    small, large = (shape_of(f"Qwen2.5-{size}") for size in ("0.5B", "1.5B"))

    def total(teacher=None, **flags):
        made = plan.Plan(fakes.args(distill, teacher="x", **flags), 1, 1000, 0)
        found = TeacherMemory(made, replace(small, reference=teacher), 80 * memory.GIB)
        return found.parts["reference"][0], {
            phase.name: sum(found.micro_batch(phase)) for phase in made.phases(64)}

    (alone, _), (both, sampled), (_, whole) = (
        total(), total(large), total(large, divergence="jsd"))
    assert both - alone == pytest.approx(2 * (large.params - small.params))  # bfloat16
    assert whole["update"] - sampled["update"] > 2 * large.root
    assert total(large, offload=("reference",))[0] == 0


def student_of(home, flags: dict):
    """The flags of a run with a teacher, and the files of its student."""
    student = f"{home}/student"
    lm = model.skeleton(student)
    files = preflight.Inputs(
        student, preflight.load_tokenizer("it", student), lm, shape_from(lm), None)
    return fakes.args(distill, model="it", teacher=f"{home}/teacher", **flags), files


def graded(world, student: str, teacher: str, kind: str, ids: list[int]) -> bool:
    """Whether what distill.py computes of these sampled ids is finite."""
    batch, good = families.batch_of(([1], [ids]), ([5], [ids[:3]])), []
    policy, beside = (families.trainer_of(it, world) for it in (student, teacher))
    for micro in batch.micro_batches(world, [0, 1], 400, "update"):
        good += beside.logprobs(micro, 1.0)
        formula = divergence.beside(beside, micro, 1.0, kind)
        good += policy.logprobs(micro, 1.0, formula=formula)
    return all(bool(values.isfinite().all()) for values in good)


@pytest.mark.parametrize("seed", range(24))
def test_a_teacher_of_any_size_is_refused_or_grades_what_the_student_may_say(seed, tmp_path):
    """The last id of the student's head, up to the last position that the flags allow."""
    rng = random.Random(f"teachers {seed}")
    for name, positions in ("student", 64), ("teacher", rng.choice([24, 32, 64])):
        families.make(rng.choice(["qwen2", "gpt2", "olmo2"]), f"{tmp_path}/{name}", {
            "vocab_size": rng.choice([320, 321, 328, 384]), "max_position_embeddings": positions})
    args, files = student_of(tmp_path, dict(
        divergence=rng.choice(["none", "none", "jsd", "reverse_kl"]), max_tokens=16,
        max_prompt_tokens=rng.choice([8, 16])))
    longest, rows = args.max_prompt_tokens + 16, files.shape.vocab
    theirs = model.skeleton(args.teacher).config
    fits = theirs.max_position_embeddings >= longest and (
        theirs.vocab_size == rows or args.divergence == "none" and theirs.vocab_size > rows)
    try:
        find_teacher(args, files)
        assert files.reference == args.teacher
        assert ranks.results(1, graded, files.source, args.teacher, args.divergence,
                             [rows - 1] * (longest - 1)) == [True]
    except SettingsError as error:
        assert not fits and "Would work: " in str(error) and len(str(error)) < 300
    else:
        assert fits


def test_a_teacher_has_the_tokenizer_of_the_model(tmp_path):
    for name in "student", "teacher":
        families.make("qwen2", f"{tmp_path}/{name}")
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(SettingsError, match="must share the vocabulary of --model it"):
        find_teacher(*student_of(tmp_path, {}))


def test_the_teachers_prompt_has_more_in_it():
    """It is not shorter than the row's own, and a row with another one is another row."""
    tokenizer, columns = tiny.make_tokenizer(), {"question": "Sort 31", "answer": "13"}
    marks = chat_template.marks_of(tokenizer)
    row = data.make_row(0, columns, "made up", tokenizer, marks, DataArgs())
    made, = add_teacher_prompts([row], tokenizer, DataArgs(), "{question} hint: {answer}")
    assert tokenizer.decode(made.teacher_ids) == row.prompt.replace("31", "31 hint: 13")
    other, = add_teacher_prompts([row], tokenizer, DataArgs(), "{question} hint: {question}")
    assert identity.row_digests([made]) != identity.row_digests([other])
    row.columns |= {"note": " \n", "half": "\ud800"}
    for template, limit, words in (
            ("{note}", 512, "gives row 1 no text"), ("{answer}", 512, "gives row 1 .* tokens"),
            ("{question} {question} {answer}", 15, "up to --max_prompt_tokens 15"),
            ("{question} {half}", 512, "row 1: .*surrogates"),
            ("{subject}", 512, "must name one or more columns of the row"),
            ("Solve it.", 512, "must name one or more columns of the row")):
        with pytest.raises(SettingsError, match=f"--teacher_prompt,? .*{words}"):
            add_teacher_prompts([row], tokenizer, DataArgs(limit), template)


@pytest.mark.parametrize("flags, sentences", table("""
group=1 | fine
teacher=None teacher_prompt={question} | fine
divergence=jsd engine_correction=mask reward_coef=0.5 reward=('exact',) eval_data=tiny | fine
teacher=None | --teacher or --teacher_prompt must be given
reward_coef=0.5 | --reward_coef needs --reward
reward_coef=0.5 reward=('exact',) group=1 | --group must be at least 2 (got 1)
eval_data=tiny | --eval_data needs --reward
target_reward=(0.1,0.9) | --target_reward needs --reward.
divergence=jsd engine_correction=mask clip_low=0.1 clip_high=0.3 dual_clip=2.0
    | --clip_low is for the loss of sampled tokens & --clip_high is for the loss of sampled tokens
    & --dual_clip is for the loss of sampled tokens
    & --engine_correction is for the loss of sampled tokens"""))
def test_what_teaches_nothing_is_refused(refused, flags, sentences):
    assert refused(distill, f"teacher=x group=4 {flags}", sentences)


def test_a_real_run_has_its_own_model_for_a_teacher_with_a_hint(real_run):
    """On two ranks. At first the gap from the teacher is that of the prompts; it gets smaller. An
    evaluation comes before and after."""
    found, _ = real_run(
        "parts/distill/distill.py", "--teacher_prompt '{question} {answer}' --divergence jsd "
        "--batch 4 --group 3 --seed 7 --lr 3e-3 --max_tokens 12 --max_prompt_tokens 40 --steps 4 "
        "--eval_data tiny@test --reward exact")
    steps = [row for row in found if "loss/divergence" in row]
    assert len(steps) == 4 and len([row for row in found if "eval/pass@1" in row]) == 2
    assert steps[-1]["loss/divergence"] < steps[0]["loss/divergence"]
    assert all(row["rollout/logprob_gap_mean"] < 1e-4 for row in steps)
