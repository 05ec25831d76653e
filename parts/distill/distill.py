"""distill.py: on-policy distillation: the student samples, a teacher scores every token.

    torchrun --nproc_per_node 4 parts/distill/distill.py --teacher FOLDER

It is grpo.py with another advantage: A_t = log π_T(t) - log π_old(t). The teacher is loaded like
grpo.py's reference. --divergence compares whole distributions instead. With --teacher_prompt the
teacher sees more in its prompt: without --teacher, the starting model then teaches itself. Shapes:
as in grpo.py. What is minimized: docs/use/recipes.md.
"""
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the core, for `torchrun parts/distill/…`
import dist
import losses
from batch import Batch, MicroBatch, Sample
from data import Row
from dist import World
from flags import ClipArgs, CommonArgs, parse
from log import Meter, sample_metrics
from model import Policy, learning_rate
from parts.distill.divergence import beside
from parts.distill.teacher import (
    TeacherMemory,
    add_teacher_prompts,
    behind_teacher_prompts,
    find_teacher,
)
from preflight import show_plan
from rewards import score_samples
from run import set_up
from settings import not_default


@dataclass
class Args(ClipArgs, CommonArgs):
    """The flags of distill.py. Those of the loss are in ClipArgs."""
    teacher: str | None = None
    """A folder or hub name, with the vocabulary of --model. None: the starting model."""
    teacher_prompt: str | None = None
    """The user message that the teacher sees, with {question}, {answer} or any {column}."""
    divergence: Literal["none", "reverse_kl", "forward_kl", "jsd"] = "none"
    """The loss, over the whole vocabulary at every prefix. none: only of the sampled token."""
    distill_coef: float = 1.0
    """Weight of the teacher."""
    reward_coef: float = 0.0
    """Weight of the reward's advantage, R - mean of its group. 0: rewards are only measured."""
    reward: tuple[str, ...] = ()
    script: ClassVar[str] = "parts/distill/distill.py"
    needs_reward: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True  # the teacher
    memory: ClassVar[type] = TeacherMemory

    def formula(self, reference, micro):
        """Log-probs, or with --divergence how far they are from the teacher's too."""
        return beside(reference, micro, self.temperature, self.divergence)

    def find_reference(self, inputs, weights: bool) -> None:
        """See CommonArgs."""
        if self.teacher:
            find_teacher(self, inputs, weights)

    def load_rows(self, flag: str, seed: int, inputs, **options) -> list[Row]:
        """See CommonArgs. Rows to train on have the prompts of --teacher_prompt."""
        rows = super().load_rows(flag, seed, inputs, **options)
        if flag == "data" and self.teacher_prompt:
            rows = add_teacher_prompts(
                rows, inputs.tokenizer, self, self.teacher_prompt)
        return rows

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if not (self.teacher or self.teacher_prompt):
            yield "--teacher or --teacher_prompt must be given: else nobody teaches."
        if self.eval_data and not self.reward:
            yield ("--eval_data needs --reward: a completion passes by its first reward. Would "
                   "work: --reward exact.")
        if self.target_reward and not self.reward:
            yield "--target_reward needs --reward."
        if self.reward_coef and not self.reward:
            yield "--reward_coef needs --reward."
        if self.reward_coef and self.group == 1:
            yield "--group must be at least 2 (got 1) with --reward_coef."
        if self.divergence != "none" and not self.reward_coef:
            sampled = {"clip_low", "clip_high", "dual_clip", "engine_correction"}
            yield from (f"--{name} is for the loss of sampled tokens, which --divergence without "
                        "--reward_coef has not. Would work: without it."
                        for name in not_default(self) if name in sampled)
        yield from super().rules(plan)


def train(args: Args) -> int:
    """The loop → exit status. Every line is the same on all ranks."""
    run = set_up(args)  # join, check, open, build, resume
    for step in range(run.start, run.end):
        run.world.step = step
        if step in run.evaluations and run.evaluate(step):  # it reaches --stop_at
            break
        with run.log.time("step"):
            with run.engine.generating(run.policy):
                prompts = run.stream.next(args.batch)
                samples = run.engine.sample(prompts, args.group, args.temperature)
                # Without --reward only the texts are filled in.
                score_samples(run.scorer, run.world, run.log, samples, args.group)
            lr = learning_rate(step, args.steps, args.lr, args)
            metrics = sample_metrics(samples, run.log.times["time/rollout"]) | learn(
                args, run.world, run.policy, samples, lr=lr, reference=run.reference,
                phase=run.log.time) | {"data/position": run.stream.position}

        run.log.step(step + 1, metrics)
        run.record(step, samples)  # in samples/
        run.log.watch(metrics)  # gradients that are not finite
        run.after_step(step + 1)  # a checkpoint; after SIGTERM the end
    return run.finish()  # the last evaluation, the export, the grade


def learn(args: Args, world: World, policy: Policy, samples: list[Sample], *, lr: float,
          reference: Policy, phase=nullcontext) -> dict[str, float]:
    """One step of learning from N samples → metrics, the same on every rank."""
    batch, exact = Batch(samples), args.divergence != "none"
    seen = behind_teacher_prompts(batch)
    with phase("logprobs"):  # (M,) each, of the same tokens
        old_logprobs = batch.forward(world, args.logprob_tokens, "old logprobs",
                                   lambda m: policy.logprobs(m, args.temperature)[0])
        teacher_logprobs = seen.forward(world, args.logprob_tokens, "teacher",
                                      lambda m: reference.logprobs(m, args.temperature)[0])
    advantages = compute_advantages(args, batch, old_logprobs, teacher_logprobs)  # (M,)
    batch.note_advantages(advantages, batch.tokens)  # for samples/

    # Update:   L = sum_it weight_it * (-min(r_it A_it, clip(r_it, ...) A_it) + coef * D_it)
    #   D_it = the divergence of π(. | prefix) from π_T(. | prefix), with --divergence
    meter = Meter(world)
    for rows in batch.minibatches(args.minibatches, args.epochs):
        weights = torch.zeros(len(samples), dtype=torch.float64)  # (N,)
        weights[rows] = losses.token_weights(
            batch.tokens[rows], args.aggregation, max_tokens=args.max_tokens,
            prompts=torch.tensor(rows) // args.group)
        with phase("update"):
            for theirs in seen.micro_batches(world, rows, args.update_tokens, "update"):
                micro = MicroBatch(batch, theirs.rows, theirs.device)  # same tokens
                formula = args.formula(reference, theirs)
                logp, _, *divergence = policy.logprobs(
                    micro, args.temperature, formula=formula)  # (n,) each
                old, engine = micro.take(old_logprobs), micro.engine_logprobs
                A, w = micro.take(advantages).to(logp.dtype), micro.per_token(weights)
                loss, details = losses.clip_loss(  # (n,)
                    logp, old, A, micro.row_of_token, **args.bounds)
                if args.engine_correction != "none":
                    factors, found = losses.engine_correction(
                        old, engine, micro.row_of_token, n_rows=len(micro.rows), **args.correction)
                    loss, details = loss * factors, details | found
                details |= {"loss/policy": loss,
                            "rollout/logprob_gap_mean": (old - engine).abs(),
                            "teacher_kl": old - micro.take(teacher_logprobs)}
                if exact:
                    details["loss/divergence"] = divergence[0]
                    loss = loss + args.distill_coef * divergence[0]
                policy.backward((w * loss).sum())
                meter.add(w, details)
            if exact:
                reference.module.reshard()  # `formula` left its head whole
            meter.norms.append(policy.step(lr))
    return {"batch/prompts": len(samples) // args.group, "batch/trained": len(samples),
            "batch/tokens": sum(p + c for _, p, c in batch.sizes), **meter.metrics(),
            **policy.metrics, "lr": lr}


def compute_advantages(args: Args, batch: Batch, old_logprobs, teacher_logprobs):
    """One number a token, (M,): the teacher's log-ratio, and the reward's advantage."""
    advantages = torch.zeros(len(old_logprobs), dtype=torch.float64)
    if args.divergence == "none":
        gains = teacher_logprobs.double() - old_logprobs.double()
        advantages += args.distill_coef * gains
    if args.reward_coef:
        of_group = losses.group_advantages(batch.rewards, args.group, kind="dr_grpo", eps=0.0,
                                           scored=batch.scored)  # (N,)
        advantages += args.reward_coef * batch.per_token(of_group)
    return advantages


def main() -> None:
    """The command line."""
    args = parse(Args, __doc__)
    dist.run(show_plan if args.plan else train, args)


if __name__ == "__main__":
    main()
