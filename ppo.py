"""ppo.py: proximal policy optimization with a critic.            https://arxiv.org/abs/1707.06347

    python ppo.py                                    one rank, the model of examples/tiny.py
    torchrun --nproc_per_node 4 ppo.py --batch 8     four ranks; any number gives the same update

A step differs from grpo.py's in one point: a critic predicts the return from each token on. A
token's advantage is how much better things went than predicted (GAE). So one completion per prompt
is enough, and every token has its own advantage.

Read grpo.py first: it says where the reward, the memory and the other formulas are. Then read
`train` and `learn` here. Shapes: N completions in request order, and M sampled tokens, concatenated
over the completions. Both are the same on every rank. A micro-batch has n of the M tokens.
"""
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

import dist
import losses
from batch import Batch, Sample
from dist import World
from flags import CommonArgs, LossArgs, parse
from log import Meter, sample_metrics
from model import Critic, Policy, learning_rate
from preflight import show_plan
from rewards import score_samples
from run import set_up
from settings import Count, Flags, Positive, Range


@dataclass
class CriticArgs(Flags):
    """The critic."""
    critic_lr: Positive | None = None
    """Peak learning rate of the critic. None: 1e-3 for a model below ten million parameters,
    else 1e-5."""
    critic_warmup_steps: int = 0
    """Number of first steps in which only the critic learns."""
    critic_update_tokens: int = 16384
    """--update_tokens for the critic. Changes only memory."""
    critic_value_tokens: int = 32768
    """--logprob_tokens for the critic: its values before the update."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if 0 < plan.args.steps <= self.critic_warmup_steps:
            yield (f"--critic_warmup_steps must be below --steps {plan.args.steps} (got "
                   f"{self.critic_warmup_steps}): else the policy never learns.")


@dataclass
class Args(LossArgs, CommonArgs, CriticArgs):
    """The flags of ppo.py. Flags shared with grpo.py are in LossArgs and CommonArgs."""
    batch: int = 512
    group: int = 1
    minibatches: int = 2
    gamma: Annotated[float, Range(0, 1)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Range(0, 1)] = 0.95
    """λ of GAE. 1: the advantage is the return minus the value. 0: it is the one-step error."""
    value_clip: float | None = 0.2
    """Clip the critic's new value to this distance from its old one. None: no clipping."""
    kl_target: Positive | None = None
    """Adapt --kl_reward_coef after each rollout towards this KL, in nats per token. None: fixed."""
    kl_horizon: Count = 10000
    """Completions over which --kl_reward_coef changes by at most a fifth."""

    script: ClassVar[str] = "ppo.py"
    needs_critic: ClassVar[bool] = True
    needs_old_logprobs: ClassVar[bool] = True

    @property
    def needs_reference(self) -> bool:
        """Whether the starting model is also loaded, for the KL in the reward."""
        return self.kl_reward_coef > 0

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.kl_target is not None and self.kl_reward_coef == 0:
            yield (f"--kl_target {self.kl_target} adapts --kl_reward_coef, which must not be 0. "
                   "Would work: --kl_reward_coef 0.05.")
        yield from super().rules(plan)


def rate(args: Args, step: int) -> float:
    """Returns the policy's learning rate at a step: 0 during the first --critic_warmup_steps, after
    which its own warm-up begins."""
    wait = args.critic_warmup_steps
    if step < wait:
        return 0.0
    return learning_rate(step - wait, args.steps - wait, args.lr, args)


def train(args: Args) -> int:
    """Runs the training loop and returns the exit status. Every rank runs every line."""
    run = set_up(args)  # join, check, open, build, resume
    for step in range(run.start, run.end):
        run.world.step = step
        if step in run.evaluations and run.evaluate(step):  # --stop_at is reached
            break

        with run.log.time("step"):
            # The engine takes the GPU and the policy's new weights; then the trainer gets it back.
            with run.engine.generating(run.policy):
                # 1. Rollout: --group completions for each prompt.
                prompts = run.stream.next(args.batch)
                samples = run.engine.sample(prompts, args.group, args.temperature)
                # 2. Reward: a number for each completion, or None if it cannot be scored.
                score_samples(run.scorer, run.world, run.log, samples, args.group)

            # 3. Learn.
            lr = rate(args, step)
            critic_lr = learning_rate(
                step, args.steps, args.critic_lr, args)
            metrics = sample_metrics(samples, run.log.times["time/rollout"]) | run.engine.metrics
            metrics["data/position"] = run.stream.position
            metrics |= learn(args, run.world, (run.policy, run.critic), samples, lr=lr,
                             critic_lr=critic_lr, kl_coef=run.kl_coef, reference=run.reference,
                             phase=run.log.time)
            if args.kl_target is not None:
                run.kl_coef = losses.adaptive_kl(run.kl_coef, metrics["policy/kl"], n=len(samples),
                                                 target=args.kl_target, horizon=args.kl_horizon)

        run.log.step(step + 1, metrics)
        run.record(step, samples)  # in samples/
        run.log.watch(metrics)  # gradients that are not finite
        run.after_step(step + 1)  # a checkpoint; after SIGTERM the end
    return run.finish()  # the last evaluation, the export, the grade


def learn(args: Args, world: World, models: tuple[Policy, Critic], samples: list[Sample], *,
          lr: float, critic_lr: float, kl_coef: float, reference: Policy | None = None,
          phase=nullcontext) -> dict[str, float]:
    """Updates both models on N samples, --epochs x --minibatches times each; returns the metrics.

    Up to rounding, metrics and weights do not depend on the number of ranks or on the budgets. With
    lr 0 the policy does not change.
    """
    policy, critic = models
    batch = Batch(samples)
    loss_tokens = batch.tokens * batch.scored  # (N,): tokens of each completion in the loss
    dropped = int((~batch.scored).sum())
    metrics = {"batch/prompts": len(samples) // args.group,
               "batch/tokens": sum(p + c for _, p, c in batch.sizes),
               "batch/trained": len(samples) - dropped,
               "batch/dropped": dropped, "batch/dropped_unscored": dropped}

    # Log-probs and values before the update: (M,). A value is V of the state before its token.
    ref_logprobs = None
    scored = loss_tokens > 0  # (N,) bool: the other completions are skipped and have NaN
    with phase("logprobs"):
        old_logprobs = batch.forward(world, args.logprob_tokens, "old logprobs",
                                   lambda m: policy.logprobs(m, args.temperature)[0], scored)
        if args.needs_reference:
            ref_logprobs = batch.forward(world, args.logprob_tokens, "reference",
                                       lambda m: reference.logprobs(m, args.temperature)[0], scored)
        values = batch.forward(
            world, args.critic_value_tokens, "values", critic.values, scored)

    # Reward of a token: -beta (log π - log ref); the last one also gets the completion's reward.
    # A_t = sum_l (gamma lam)^l delta_(t+l),  delta_t = r_t + gamma V_(t+1) - V_t
    # return_t = A_t + V_t, the critic's target, before whitening
    rewards = batch.rewards  # (N,)
    if args.overlong_buffer:  # DAPO: long completions lose up to 1
        rewards = rewards + losses.overlong_penalty(
            batch.all_tokens, args.max_tokens, args.overlong_buffer)

    token_rewards = losses.token_rewards(
        rewards, old_logprobs, ref_logprobs, batch.tokens, kl_coef=kl_coef)  # (M,)
    advantages, returns = losses.gae(
        token_rewards, values, batch.tokens, gamma=args.gamma, lam=args.lam)  # (M,)
    in_loss = batch.per_token(scored)  # (M,) bool
    advantages = losses.whiten(advantages, in_loss)  # once, over the tokens of the global batch
    batch.note_advantages(advantages, loss_tokens)  # for samples/

    # Update:   L = sum_it weight_it * loss_it
    #   weight_it = 1 / tokens of the global minibatch; --aggregation has others
    #   policy: loss_it = -min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)    r_it = π / π_old
    #   critic: loss_it = 1/2 max((V - R)^2, (V_clip - R)^2)
    # These weights are computed before `micro_batches` splits the rows over ranks. FSDP sums
    # gradients.
    policy_meter, critic_meter = Meter(world), Meter(world)
    prompts = torch.arange(len(samples)) // args.group  # (N,): each one's prompt number
    for rows in batch.minibatches(args.minibatches, args.epochs):
        weights = torch.zeros(len(samples), dtype=torch.float64)  # (N,)
        weights[rows] = losses.token_weights(
            loss_tokens[rows], args.aggregation, max_tokens=args.max_tokens,
            prompts=prompts[rows])
        rows = [r for r in rows if loss_tokens[r]]  # the others have weight 0
        if not rows:  # no loss at all, so no step
            policy_meter.skipped += 1
            continue
        with phase("update_critic"):
            budget = args.critic_update_tokens
            for micro in batch.micro_batches(world, rows, budget, "update critic"):
                V, w = critic.values(micro), micro.per_token(weights)  # (n,)
                R = micro.take(returns).to(V.dtype)
                loss, clip_frac = losses.value_loss(
                    V, micro.take(values), R, clip=args.value_clip)  # (n,)
                critic.backward((w * loss).sum())
                critic_meter.add(w, {"loss/value": loss, "clip_frac": clip_frac})
            critic_meter.norms.append(critic.step(critic_lr))
        if lr == 0:
            continue
        with phase("update"):
            for micro in batch.micro_batches(world, rows, args.update_tokens, "update"):
                logp, entropy = policy.logprobs(
                    micro, args.temperature, args.entropy_coef != 0)  # (n,)
                old, engine = micro.take(old_logprobs), micro.engine_logprobs
                A, w = micro.take(advantages).to(logp.dtype), micro.per_token(weights)
                loss, details = losses.clip_loss(  # (n,)
                    logp, old, A, micro.row_of_token, **args.bounds)
                if args.engine_correction != "none":
                    factors, found = losses.engine_correction(
                        old, engine, micro.row_of_token, n_rows=len(micro.rows), **args.correction)
                    loss, details = loss * factors, details | found
                details |= {"loss/policy": loss, "rollout/logprob_gap_mean": (old - engine).abs()}
                if args.entropy_coef:
                    details["loss/entropy"] = entropy
                    loss = loss - args.entropy_coef * entropy
                policy.backward((w * loss).sum())
                policy_meter.add(w, details)
            policy_meter.norms.append(policy.step(lr))

    if args.needs_reference:
        kl = losses.kl_estimate(old_logprobs, ref_logprobs, kind="k1")[in_loss]
        metrics |= {"policy/kl": mean(kl), "policy/kl_coef": kl_coef}
    return (metrics | critic_meter.metrics("critic/", "critic/grad_norm") | policy_meter.metrics()
            | policy.metrics | critic_quality(values[in_loss], returns[in_loss])
            | {"lr": lr, "critic/lr": critic_lr})


def critic_quality(values, returns) -> dict[str, float]:
    """Returns the mean value, and the fraction of the returns' variance that the values explain."""
    error, variance = mean((returns - values).square()), mean((returns - mean(returns)).square())
    return {"critic/value_mean": mean(values),
            "critic/explained_var": 1 - error / variance if variance > 0 else 0.0}


def mean(x) -> float:
    """Returns the mean of a vector, or 0 if it is empty."""
    return float(x.double().mean()) if len(x) else 0.0


def main() -> None:
    """The command line."""
    args = parse(Args, __doc__)
    dist.run(show_plan if args.plan else train, args)


if __name__ == "__main__":
    main()
