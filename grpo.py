"""grpo.py: group-relative policy optimization and its family.     https://arxiv.org/abs/2402.03300

    python grpo.py                                   one rank, the model of examples/tiny.py
    torchrun --nproc_per_node 4 grpo.py --batch 8    four ranks; any number gives the same update
    python grpo.py --plan --ranks 64 --batch 512     print the plan for 64 ranks, without training

One step: the engine samples G completions for each of P prompts. Each completion gets a reward. Its
advantage is its reward minus the mean reward of its group, the completions of the same prompt. A
gradient step then makes the better completions more likely. There is no critic: the group's mean is
the baseline. (ppo.py is the same loop with a critic.) The paper's GRPO also divides the
advantage by the group's std and each completion's loss by its length, and adds a KL term:
--advantage grpo --aggregation sequence --kl_loss_coef 0.04. Not implemented: process rewards, and
periodic updates of the reference model.

Read `train`, then `learn`. The formulas are in losses.py and variants/. Shapes: P prompts, G
completions per prompt, N = P·G completions in request order, and M sampled tokens, concatenated
over the completions. All of these are the same on every rank. A micro-batch has n of the M tokens.
In `learn` a row is a completion, not a row of --data.
"""
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import dist
import flags
import losses
from batch import Batch, Sample
from dist import World
from errors import SettingsError
from flags import CommonArgs, parse
from log import Meter, sample_metrics
from model import Policy, learning_rate
from preflight import show_plan
from rewards import parse as parse_rewards
from rewards import score_samples
from run import Run, set_up


@dataclass
class Args(flags.LossArgs, CommonArgs):
    """The flags of grpo.py. Flags shared with ppo.py are in LossArgs and CommonArgs."""
    advantage: str = "dr_grpo"
    """dr_grpo: R - group mean. grpo: (R - mean)/(std + eps). rloo: R - mean of the others.
    reinforce++: R, whitened over the tokens in the loss. reinforce++-baseline: R - mean, whitened.
    Your own: FILE.py:NAME, such as variants/lite_ppo.py:lite_ppo. variants/ also has maxrl, gdpo.
    """
    advantage_eps: float = 1e-6
    """eps added to the std in --advantage (verl uses 1e-6, TRL 1e-4)."""
    loss: str = "clip"
    """clip: PPO's. gspo: one ratio per completion; needs bounds near 3e-4. cispo: a clipped ratio
    without gradient, times log π. reinforce: no ratio; one update per rollout. Your own:
    FILE.py:NAME, such as variants/sapo.py:sapo. variants/ also has gmpo, dppo, ipo, opsm and
    geometric."""
    kl_loss_coef: float = 0.0
    """β, the coefficient of the loss term for the KL to the starting model. 0: no KL term."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_ratio"] = "k3"
    """Expected gradients: k1: 0. k2: that of KL(π‖ref). k3 (GRPO): that of KL(ref‖π). k3_ratio
    (k3 times π/π_old): that of KL(π‖ref), even off-policy."""
    overlong_filter: bool = False
    """Exclude truncated completions from the loss. They still count in their group's mean."""
    dynamic_sampling: bool = False
    """DAPO: train only on groups whose rewards differ; sample more prompts to replace the rest.
    """
    refills: int = 3
    """Maximum number of extra rollouts per step with --dynamic_sampling."""
    script: ClassVar[str] = "grpo.py"

    @property
    def advantage_uses_old(self) -> bool:
        """Whether the advantage depends on log π_old."""
        return self.kl_reward_coef > 0 or flags.chosen("advantage", self.advantage).uses_old

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether log π_old needs its own forward pass, because several updates share a rollout
        or the advantage depends on it. Otherwise the update's own log-probs are log π_old."""
        return self.minibatches * self.epochs > 1 or self.advantage_uses_old

    @property
    def needs_reference(self) -> bool:
        """Whether the starting model is also loaded, for a KL term."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.group == 1 and self.dynamic_sampling:
            yield ("--dynamic_sampling keeps groups whose rewards differ, so --group must be at "
                   "least 2 (got 1).")
        if self.dynamic_sampling and self.strict:
            yield ("--strict cannot be combined with --dynamic_sampling, whose number of "
                   "completions is not known in advance: remove one of them.")
        if self.kl_loss_coef and self.kl_reward_coef:
            yield "--kl_loss_coef and --kl_reward_coef cannot be combined: set one of them to 0."
        yield from flags.rules(self)
        yield from super().rules(plan)


def train(args: Args) -> int:
    """Runs the training loop and returns the exit status. Every rank runs every line."""
    run = set_up(args)  # join, check, render and tokenize the rows, open, build, resume
    for step in range(run.start, run.end):
        run.world.step = step
        if step in run.evaluations and run.evaluate(step):  # --stop_at is reached
            break

        with run.log.time("step"):
            # The engine gets the GPU and the new weights; afterwards the trainer gets the GPU back.
            with run.engine.generating(run.policy):
                # 1. Rollout: G completions for each of P prompts.
                prompts = run.stream.next(args.batch)
                samples = run.engine.sample(prompts, args.group, args.temperature)
                # 2. Reward: a number for each completion, or None if it cannot be scored. The
                # engine stays awake, because a refill may sample again.
                score_samples(run.scorer, run.world, run.log, samples, args.group)
                kept, refused = samples, {}
                if args.dynamic_sampling:  # sample until the rewards of enough groups differ
                    kept, refused = refill(run, args, samples)

            # 3. Learn.
            lr = learning_rate(step, args.steps, args.lr, args)  # preflight.py chose an absent --lr
            metrics = sample_metrics(samples, run.log.times["time/rollout"]) | run.engine.metrics
            metrics["data/position"] = run.stream.position
            metrics |= refused | learn(args, run.world, run.policy, kept, lr=lr,
                                       reference=run.reference, phase=run.log.time)
            metrics["batch/dropped"] += sum(refused.values())  # by --dynamic_sampling

        run.log.step(step + 1, metrics)
        run.record(step, samples)  # in samples/
        run.log.watch(metrics)  # raises after repeated non-finite gradients
        run.after_step(step + 1)  # save a checkpoint if due; exit after SIGTERM
    return run.finish()  # the last evaluation, the export, --target_reward


def learn(args: Args, world: World, policy: Policy, samples: list[Sample], *, lr: float,
          reference: Policy | None = None, phase=nullcontext) -> dict[str, float]:
    """Updates the policy on N samples in --epochs x --minibatches optimizer steps, and returns the
    metrics.

    Metrics and new weights are the same on every rank. Up to rounding, they do not depend on the
    number of ranks or on the budgets --update_tokens and --logprob_tokens. phase: a function that
    takes a name and returns a context manager that times it (Log.time).
    """
    batch = Batch(samples)
    loss_tokens, metrics = tokens_in_loss(args, batch)  # (N,): tokens of each completion

    # Advantage: A_i = R_i - mean(R of its group), the same for all tokens of a completion: (M,).
    # This is the default; `compute_advantages` has the others, some of which vary by token.
    # If they depend on old log-probs, those are computed here, for all completions.
    old_logprobs = ref_logprobs = None  # (M,) once computed
    if args.advantage_uses_old:
        with phase("logprobs"):
            old_logprobs, ref_logprobs = logprobs_before(args, world, batch, policy, reference)
    advantages = compute_advantages(args, batch, loss_tokens, old_logprobs, ref_logprobs)
    batch.note_advantages(advantages, loss_tokens)  # for samples/

    # If all advantages of a completion are 0, its loss is 0 for any policy, so it is skipped from
    # here on: its `learns` is False. It still counts in the denominators of the weights below. But
    # a KL or entropy term acts on every token in the loss, and so may a loss from --loss
    # FILE.py:NAME. If you add such a term, include it here.
    others_act = bool(args.kl_loss_coef or args.entropy_coef) or args.loss not in losses.LOSSES
    total = batch.sum_tokens(advantages.abs())  # (M,) → (N,): summed over each completion's tokens
    learns = ((total > 0) | others_act) & (loss_tokens > 0)  # (N,) bool
    if not args.advantage_uses_old:
        with phase("logprobs"):  # by default neither is needed: (None, None), without a pass
            old_logprobs, ref_logprobs = logprobs_before(
                args, world, batch, policy, reference, learns)

    # Update:   L = sum_it weight_it * loss_it
    #   weight_it = 1 / tokens of the global minibatch; --aggregation has others
    #   loss_it = -min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)       r_it = π / π_old
    # The weights are computed before `micro_batches` splits the rows over ranks. FSDP is
    # configured to sum gradients over ranks (by default it averages), so no correction factor is
    # needed.
    meter = Meter(world)
    policy_loss = flags.chosen("loss", args.loss).function  # from losses.py or a file
    prompts = torch.arange(len(samples)) // args.group  # (N,): the prompt of each completion
    for rows in batch.minibatches(args.minibatches, args.epochs):  # indices of completions
        weights = torch.zeros(len(samples), dtype=torch.float64)  # (N,)
        weights[rows] = losses.token_weights(
            loss_tokens[rows], args.aggregation, max_tokens=args.max_tokens,
            prompts=prompts[rows])
        if not weights.any():  # no token in the loss, so no optimizer step
            meter.skipped += 1
            continue
        # loss/… metrics are means over all tokens in the loss, others over those computed here.
        meter.in_loss += float(weights @ loss_tokens.double())
        # If no rows are left, still take the step: the gradient is 0, but momentum is not.
        rows = [r for r in rows if learns[r]]
        with phase("update"):
            for micro in batch.micro_batches(world, rows, args.update_tokens, "update"):
                logp, entropy = policy.logprobs(
                    micro, args.temperature, args.entropy_coef != 0)  # (n,)
                old = micro.take(old_logprobs) if args.needs_old_logprobs else logp.detach()
                A = micro.take(advantages).to(logp.dtype)  # (M,) → (n,)
                w = micro.per_token(weights)  # (N,) → (n,)
                engine = micro.engine_logprobs
                loss, details = policy_loss(logp, old, A, micro.row_of_token,
                                            n_rows=len(micro.rows), engine_logprobs=engine,
                                            draws=micro.draws, **args.bounds)
                if args.engine_correction != "none":  # the KL and entropy terms are left alone
                    factors, found = losses.engine_correction(
                        old, engine, micro.row_of_token, n_rows=len(micro.rows), **args.correction)
                    loss, details = loss * factors, details | found
                details |= {"loss/policy": loss, "rollout/logprob_gap_mean": (old - engine).abs()}
                if args.kl_loss_coef:
                    details["loss/kl"] = kl = losses.kl_estimate(
                        logp, micro.take(ref_logprobs), kind=args.kl_estimator, old=old)
                    loss = loss + args.kl_loss_coef * kl
                if args.entropy_coef:
                    details["loss/entropy"] = entropy
                    loss = loss - args.entropy_coef * entropy
                policy.backward((w * loss).sum())  # FSDP sums the gradients over ranks
                meter.add(w, details)
            meter.norms.append(policy.step(lr))
    return metrics | meter.metrics() | policy.metrics | {"lr": lr}


def logprobs_before(args: Args, world: World, batch: Batch, policy: Policy, reference, among=None):
    """Returns the log-probs of the sampled tokens before the update, under the policy and under the
    reference model: (M,) each, in nats, or None if not needed.

    With one update per rollout, the update's own forward pass gives log π_old, so the ratio is
    exactly 1 (unless the advantage needs log π_old earlier). among: (N,) bool, the completions
    to compute; tokens of the others get NaN. All ranks must call this function (a collective).
    """
    def logprobs(model, name: str):
        return batch.forward(world, args.logprob_tokens, name, lambda micro: model.logprobs(
            micro, args.temperature)[0], among)

    return (logprobs(policy, "old logprobs") if args.needs_old_logprobs else None,
            logprobs(reference, "reference") if args.needs_reference else None)


def tokens_in_loss(args: Args, batch: Batch) -> tuple[torch.Tensor, dict[str, int]]:
    """Returns how many tokens of each completion are in the loss, (N,), and the metrics batch/…:
    batch sizes and the number of completions dropped, by reason."""
    scored = batch.scored  # (N,) bool
    least = flags.chosen("advantage", args.advantage).least  # scored completions a group must have
    has_baseline = (scored.view(-1, args.group).sum(1) >= least).repeat_interleave(args.group)
    cut = batch.truncated & args.overlong_filter
    keep = scored & has_baseline & ~cut  # (N,)
    masks = {"trained": keep, "dropped": ~keep, "dropped_unscored": ~scored,
             "dropped_no_baseline": scored & ~has_baseline,
             "dropped_overlong": scored & has_baseline & cut}
    prompts = len(scored) // args.group
    differ = losses.keep_groups(batch.rewards, args.group, scored)  # (P,) bool
    return batch.tokens * keep, {
        "batch/prompts": prompts,
        "batch/groups_equal": int((~differ).sum()) / max(1, prompts) if args.group > 1 else 0.0,
        "batch/tokens": sum(p + c for _, p, c in batch.sizes),
        **{f"batch/{name}": int(mask.sum()) for name, mask in masks.items()}}


def compute_advantages(args: Args, batch: Batch, loss_tokens, old_logprobs, ref_logprobs):
    """Returns the advantage of each token, (M,): by default R - group mean, the same for all tokens
    of a completion."""
    rewards = batch.rewards  # (N,)
    if args.overlong_buffer:
        rewards = rewards + losses.overlong_penalty(
            batch.all_tokens, args.max_tokens, args.overlong_buffer)
    in_loss = batch.per_token(loss_tokens > 0)  # (M,)
    if args.advantage == "reinforce++":  # A_t = sum over u >= t of ([u is last] R - beta k1_u)
        rewards = losses.token_rewards(
            rewards, old_logprobs, ref_logprobs if args.kl_reward_coef else None, batch.tokens,
            kl_coef=args.kl_reward_coef)  # (M,)
        return losses.whiten(losses.rewards_to_go(rewards, batch.tokens), in_loss)
    if args.kl_reward_coef:  # R_i - beta * sum_t k1_it
        kl = losses.kl_estimate(old_logprobs, ref_logprobs, kind="k1")  # (M,)
        rewards = rewards - args.kl_reward_coef * batch.sum_tokens(kl)
    if args.advantage not in flags.NAMES["advantage"]:
        return advantages_of_a_file(args, batch, rewards, loss_tokens, old_logprobs)
    advantages = losses.group_advantages(rewards, args.group, kind=args.advantage,
                                         eps=args.advantage_eps, scored=batch.scored)  # (N,)
    advantages = batch.per_token(advantages)  # (M,)
    if args.advantage == "reinforce++-baseline":
        return losses.whiten(advantages, in_loss)
    return advantages


def advantages_of_a_file(args: Args, batch: Batch, rewards, loss_tokens, old_logprobs):
    """Calls the function of --advantage FILE.py:NAME and returns the advantages, (M,).
    variants/__init__.py describes its arguments. Raises SettingsError if it does not return one
    finite number per completion (or per token, if the file says PER = "token")."""
    parts = {spec.name: (spec.weight, batch.reward_values(spec.name))
             for spec in parse_rewards(list(args.reward))}
    chosen = flags.chosen("advantage", args.advantage)
    row = batch.per_token(torch.arange(len(rewards)))  # (M,)
    own, given = deepcopy((rewards, dict(  # copies, because the function may modify them
        scored=batch.scored, eps=args.advantage_eps, parts=parts, trained=loss_tokens > 0, row=row,
        lengths=batch.tokens, old_logprobs=old_logprobs, engine_logprobs=batch.engine_logprobs,
        batch=batch)))
    A = chosen.function(own, args.group, **given)
    wanted = len(row) if chosen.per == "token" else len(rewards)
    if getattr(A, "shape", None) != (wanted,) or not torch.as_tensor(A).isfinite().all():
        raise SettingsError(f"--advantage {args.advantage} must return a tensor of {wanted:,} "
                            f"finite numbers: its PER is {chosen.per}.")
    A = torch.as_tensor(A).double()
    return A if chosen.per == "token" else batch.per_token(A)


def refill(run: Run, args: Args, samples: list[Sample]) -> tuple[list[Sample], dict[str, int]]:
    """Applies DAPO's dynamic sampling. Returns the samples to train on, and the number left
    out, by reason.

    Keeps the groups whose rewards differ. While fewer than --batch are kept, appends a rollout of
    new prompts to `samples`, at most --refills times. https://arxiv.org/abs/2503.14476, section 3.2
    """
    kept, looked_at = [], 0
    for more in range(args.refills + 1):
        batch = Batch(samples[looked_at:])
        differs = losses.keep_groups(batch.rewards, args.group, batch.scored)  # (P,)
        for g in differs.nonzero().flatten().tolist():
            start = looked_at + g * args.group
            kept.append(samples[start:start + args.group])
        if len(kept) >= args.batch or more == args.refills:
            break
        looked_at = len(samples)
        new = run.engine.sample(run.stream.next(args.batch), args.group, args.temperature)
        score_samples(run.scorer, run.world, run.log, new, args.group)
        samples += new
    refused = {"batch/dropped_equal": len(samples) - len(kept) * args.group,
               "batch/dropped_surplus": max(0, len(kept) - args.batch) * args.group}
    return [sample for group in kept[:args.batch] for sample in group], refused


def main() -> None:
    """Command-line entry point."""
    args = parse(Args, __doc__)
    dist.run(show_plan if args.plan else train, args)


if __name__ == "__main__":
    main()
