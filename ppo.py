"""ppo.py: proximal policy optimization with a critic, for language models.        https://arxiv.org/abs/1707.06347

    python ppo.py                                          one rank, the tiny model that tiny.py makes
    torchrun --nproc_per_node 4 ppo.py --batch 8           four ranks; the update is the same on any number

The loop of grpo.py with one difference: instead of comparing a completion with the others of its prompt, a critic predicts
the return from every token on, and the advantage of a token is what came out beyond that (GAE). So one completion per
prompt is enough, and every token has an advantage of its own.

Read `train`, then `learn`. The formulas they call, one short function each, are in losses.py; the README says who does what.
Shapes: N completions in request order, T tokens of the longest; a micro-batch is (b, t). Everything (N, ...) is the same on
every rank.
"""
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import dist                    # first: it sets what torch reads when it is imported
import torch
import tyro

import losses
from batch import Batch, Meter
from dist import World
from model import Critic, Policy
from run import Run, Sample


@dataclass
class Args:
    # ---- what to learn, from what
    model: str = "tiny"
    """A folder or hub name of a causal language model in Hugging Face format; 'tiny' or 'tiny:kk' is made here on first use (tiny.py)."""
    data: str = "tiny"
    """Training prompts: a .jsonl/.json/.parquet file, a hub data set name[:config][@split], reasoning_gym:TASK, or 'tiny'."""
    reward: tuple[str, ...] = ("exact",)
    """Rewards to add up, each NAME[:WEIGHT]; or your own function, path/to/file.py:NAME[:WEIGHT]. See the README."""
    prompt_template: str | None = None
    """The user's message, with {question} or any {column} of the row filled in."""
    system: str | None = None
    """A system message, put before the prompt by the model's chat template."""
    # ---- sizes that change the maths
    batch: int = 512
    """Prompts per step, all ranks together; any number ≥ 1 works on any number of ranks."""
    group: int = 1
    """Completions per prompt; the critic is the baseline, so one is enough."""
    minibatches: int = 2
    """Optimizer steps per pass over the batch; which completions are in which is fixed by their order, not by the ranks."""
    epochs: int = 1
    """Passes over the batch of each rollout."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out, and counted."""
    max_tokens: int = 256
    """A completion that reaches this many tokens is cut: 'truncated'."""
    steps: int = 60
    """Rollouts, each followed by its update."""
    # ---- sampling
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_p: float = 1.0
    """Must stay 1 in training: a truncated distribution biases every ratio."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens that spell one are part of it."""
    # ---- advantage
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """λ of generalized advantage estimation: 1 is the plain return minus the value, 0 the one-step error."""
    kl_reward_coef: float = 0.0
    """β of the KL to the starting model in each token's reward (k1, exact gradient); 0: none, and no reference model is loaded."""
    kl_target: float | None = None
    """Adapt β once a rollout towards this KL, in nats a token; none: β is fixed."""
    kl_horizon: int = 10000
    """Completions over which an adaptive β moves by at most a fifth."""
    overlong_buffer: int = 0
    """DAPO's soft overlong penalty: minus up to 1 over the last this many tokens before --max_tokens; 0: none."""
    # ---- loss
    value_clip: float | None = 0.2
    """The critic's new value counts at most this far from its old one, if that makes its error larger; none: no clipping."""
    clip_low: float = 0.2
    """ε below: ratios under 1 - clip_low are clipped."""
    clip_high: float = 0.2
    """ε above (DAPO's clip-higher: 0.28)."""
    dual_clip: float | None = None
    """c > 1 bounds the loss at -c·A where A < 0 (https://arxiv.org/abs/1912.09729); off by default, as in the PPO paper."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses add up. token: mean over all tokens of the minibatch (DAPO). sequence: mean of each completion's mean (GRPO).
    constant: sum / --max_tokens, mean over completions (Dr. GRPO). The denominator counts the global minibatch, before any split."""
    entropy_coef: float = 0.0
    """Bonus on the entropy of the sampling distribution, averaged like the loss."""
    engine_correction: Literal["none", "truncate", "mask"] = "none"
    """Weight each token by π_trainer/π_engine. truncate: at most --correction_high (TIS). mask: 0 outside [low, high] (IcePop)."""
    correction_low: float = 0.5
    """Lower bound of --engine_correction mask."""
    correction_high: float = 2.0
    """Upper bound of --engine_correction."""
    # ---- optimizer (AdamW)
    lr: float | None = None
    """Peak learning rate; when not given 1e-6, and 3e-4 for the tiny model, which is ten thousand times smaller."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: float = 0.0
    """AdamW's, on every parameter."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm, over all parameters and ranks; 0: never."""
    critic_lr: float | None = None
    """The critic's peak learning rate; when not given 1e-5, and 1e-3 for the tiny model."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic learns."""
    warmup_steps: int = 0
    """Steps (rollouts) of linear warm-up to --lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, until --steps."""
    max_bad_steps: int = 3
    """A gradient that is not finite is counted and not applied; this many in a row end the run."""
    # ---- memory: none of these changes the maths
    update_tokens: int = 16384
    """Padded tokens (rows × longest) of one forward+backward, per rank. Memory depends on this, never on --batch or --group."""
    score_tokens: int = 32768
    """The same for one forward without gradient: old and reference log-probs."""
    critic_update_tokens: int = 16384
    """As --update_tokens, for the critic."""
    critic_score_tokens: int = 32768
    """As --score_tokens, for the critic's values."""
    head_chunk: int = 0
    """Tokens whose logits are held at once; 0: as many as make 512 MiB of float32 logits."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Computation; master weights and gradient reduction are at least float32. auto: bfloat16 on GPU, float32 on CPU."""
    checkpointing: bool = False
    """Activation checkpointing: recompute each layer in backward; about a third more time, far less memory."""
    offload: tuple[Literal["params", "optimizer", "reference"], ...] = ()
    """params, optimizer: on the host while the engine generates (gradients are freed by then). reference: that model is always there."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host always (FSDP2's CPU offload); slow, smallest."""
    shard_size: int = 0
    """Ranks that share one copy of the weights (hybrid sharding, usually the GPUs of a node); 0: all."""
    canary: Literal["auto", "on", "off"] = "auto"
    """Before the first rollout, a worst-case micro-batch of each phase, so that a lack of memory ends the run at once. auto: on GPU."""
    # ---- engine
    tp: int = 1
    """Ranks of one engine (tensor parallel)."""
    gpu_memory_utilization: float = 0.5
    """The engine's share of each GPU."""
    kv_cache_gb: float = 0.0
    """The engine's key-value cache in GiB; 0: on GPU what the share leaves, on CPU what a step can use, up to 1."""
    max_num_seqs: int = 256
    """Completions that one engine generates at once."""
    sleep_level: Literal[0, 1, 2] = 2
    """What the engine frees while the trainer works, on GPU. 2: weights and cache. 1: keeps weights on the host. 0: nothing."""
    eager: bool = False
    """No CUDA graphs in the engine: starts sooner, generates slower."""
    engine_log: Literal["ERROR", "WARNING", "INFO", "DEBUG"] = "ERROR"
    """vLLM's own log."""
    # ---- reward workers
    reward_workers: int = 2
    """Processes per rank that score completions; they can be killed."""
    reward_timeout: float = 10.0
    """Seconds for one completion; beyond them it is unscorable, and counted."""
    # ---- evaluation
    eval_data: str | None = None
    """Rows to evaluate on, like --data: before the first step, every --eval_every steps, and at the end."""
    eval_every: int = 0
    """Steps between evaluations; 0: only before and after."""
    eval_samples: int = 1
    """k: completions per row; pass@1 is their mean, pass@k unbiased."""
    eval_temperature: float = 0.0
    """0: greedy."""
    eval_pass: float = 1.0
    """A completion passes when its first --reward is at least this."""
    eval_only: bool = False
    """Evaluate --model on --eval_data, and end."""
    # ---- the run
    name: str | None = None
    """The run is runs/NAME; an unfinished one is resumed. Without a name: a new one, from the time."""
    resume: bool = True
    """--no-resume: refuse if runs/NAME exists."""
    save_every: int = 0
    """Steps between checkpoints (one more at the end); 0: only on SIGTERM."""
    keep: int = 2
    """Newest checkpoints kept."""
    seed: int = 0
    """Of the data's order and of every completion's own random stream."""
    samples_every: int = 10
    """Steps between printing a few completions (all of such a step's are kept in samples/)."""
    wandb: str | None = None
    """A Weights & Biases project; offline where there is no key."""
    target_reward: float | None = None
    """Grade the run: exit status 1 unless the mean reward of the first 3 steps is at most 0.4 and of the last 10 at least this."""
    export: bool = True
    """Write the trained model to runs/NAME/model at the end, and the best by evaluation (mean pass@1) to runs/NAME/best."""
    timeout: float = 600.0
    """Seconds that one rank waits for another before the run ends with a message that names it."""
    stop_seconds: float = 25.0
    """Seconds after SIGTERM in which a step may still end and be saved."""
    # ---- the plan
    plan: bool = False
    """Print the plan for these settings and exit."""
    ranks: int = 1
    """Ranks to plan for, with --plan."""
    gpu_gb: float = 80.0
    """GiB of the GPU to plan for, with --plan; a run plans for the GPU it has."""
    sizes: tuple[str, ...] = ()
    """With --plan: the model's sizes, hidden=… intermediate=… layers=… heads=… kv_heads=… vocab=…, where its config cannot be read."""
    strict: bool = False
    """Any padding row is an error that names the nearest sizes without."""

    algorithm: ClassVar[str] = "ppo"


def train(args: Args) -> None:
    """The loop. `Run` sets up what it needs; every line below is the same on all ranks."""
    run = Run(args, "ppo.py")
    for step in run.steps():
        with run.log.time("step"):
            # 1. Rollout: the engine takes the current weights, then samples completions; each is rewarded.
            run.sync()
            samples = run.sample(run.stream.take(args.batch), step, args.group, temperature=args.temperature)
            run.engine_rests()

            # 2. Values, advantages, and the updates of both models. The first --critic_warmup_steps teach the critic alone.
            lr = run.learning_rate(step, args.lr, args.warmup_steps) if step >= args.critic_warmup_steps else 0.0
            critic_lr = run.learning_rate(step, args.critic_lr, args.warmup_steps)
            metrics = run.rollout_metrics(samples) | learn(args, run.world, run.policy, run.critic, run.reference, samples, step,
                                                           lr, critic_lr, run.kl_coef, run.phase)
            metrics |= {"batch/completions": len(samples), "data/position": run.stream.position}

            # 3. An adaptive KL coefficient moves once a rollout: up by at most a fifth where the KL is above its target, or down.
            if args.kl_target is not None:
                run.kl_coef = losses.adaptive_kl(run.kl_coef, metrics["policy/kl"], target=args.kl_target, horizon=args.kl_horizon, n=len(samples))
        run.end_step(step, samples, metrics)
    run.end()


def learn(args: Args, world: World, policy: Policy, critic: Critic, reference: Policy | None, samples: list[Sample], step: int,
          lr: float, critic_lr: float, kl_coef: float, time=nullcontext) -> dict[str, float]:
    """One step of learning from N samples in request order: --epochs x --minibatches updates of the policy and of the critic.

    lr 0 leaves the policy alone. The samples are the same list on every rank; so are the metrics and the weights, whatever the
    number of ranks and the budgets.
    """
    batch = Batch([s.prompt.row.prompt_ids for s in samples], [s.completion for s in samples])
    raw = torch.tensor([s.score.total if s.score.total is not None else 0.0 for s in samples], dtype=torch.float64)          # (N,)
    scored = torch.tensor([s.score.total is not None for s in samples], dtype=torch.bool)                                    # (N,)
    mask = batch.present & scored.view(-1, 1)                                                                                # (N, T)

    # Log-probs and values from before the update: (N, T) each. values[t] is V of the state in which token t was chosen.
    ref_logprobs = None
    with time("score"):
        old_logprobs = batch.score(world, args.score_tokens, "old log-probs", step, lambda m: policy.logprobs(m, args.temperature)[0])
        if reference is not None:
            ref_logprobs = batch.score(world, args.score_tokens, "reference", step, lambda m: reference.logprobs(m, args.temperature)[0])
        values = batch.score(world, args.critic_score_tokens, "values", step, critic.values)

    # Reward of each token: the score at the last one, and -beta * (log pi - log ref) at each.
    # Advantage: A_t = sum over l of (gamma lam)^l delta_(t+l),  delta_t = r_t + gamma V_(t+1) - V_t.    return_t = A_t + V_t
    scores = raw
    if args.overlong_buffer:
        scores = scores + losses.overlong_penalty(torch.tensor(batch.lengths), args.max_tokens, args.overlong_buffer)
    token_rewards = losses.token_rewards(scores, old_logprobs, ref_logprobs, mask, kl_coef=kl_coef)
    advantages, returns = losses.gae(token_rewards, values, mask, gamma=args.gamma, lam=args.lam)
    advantages = losses.whiten(advantages, mask)           # once, over the tokens of the global batch
    correction = None                                      # pi_trainer / pi_engine, bounded, a constant of the loss
    if args.engine_correction != "none":
        correction, engine_metrics = losses.engine_correction(
            old_logprobs, batch.engine_logprobs, mask, kind=args.engine_correction, low=args.correction_low, high=args.correction_high)

    # Update. Membership of a minibatch and its weights (1 / global denominator) are fixed before anything is split, so that
    #     L_policy = sum_it weight_it * (-min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it) - c * H_it)
    #     L_critic = sum_it weight_it * 1/2 max((V - R)^2, (V_clip - R)^2)
    # are the same sums on any number of ranks and micro-batches.
    policy_meter, critic_meter = Meter(world), Meter(world)
    for rows in batch.minibatches(args.minibatches) * args.epochs:
        if not mask[rows].any():                           # nothing to learn from: momentum alone must not move the weights
            policy_meter.skipped += 1
            continue
        weights = torch.zeros(mask.shape, dtype=torch.float64)                                                               # (N, T)
        weights[rows] = losses.token_weights(mask[rows], args.aggregation, max_tokens=args.max_tokens)
        with time("update_critic"):
            for micro in batch.micros(world, rows, args.critic_update_tokens, "update critic", step):
                m, w = micro.take(mask), micro.take(weights)                                                                 # (b, t)
                token_loss, clip_frac = losses.value_loss(critic.values(micro), micro.take(values), micro.take(returns), m, clip=args.value_clip)
                critic.backward((w * torch.where(m, token_loss, 0)).sum())
                critic_meter.add(micro, m, w, {"loss": token_loss, "clip_frac": clip_frac})
            critic_meter.step(critic.step(critic_lr))
        if lr == 0:
            continue
        with time("update"):
            for micro in batch.micros(world, rows, args.update_tokens, "update", step):
                m, w = micro.take(mask), micro.take(weights)                                                                 # (b, t)
                logprobs, entropy = policy.logprobs(micro, args.temperature, entropy="grad" if args.entropy_coef else "value")
                old = micro.take(old_logprobs)
                token_loss, metrics = losses.clip_loss(logprobs, old, micro.take(advantages), m, clip_low=args.clip_low,
                                                       clip_high=args.clip_high, dual_clip=args.dual_clip)                   # (b, t)
                if correction is not None:
                    token_loss = token_loss * micro.take(correction)
                metrics |= {"loss": token_loss, "entropy": entropy}
                if args.entropy_coef:
                    token_loss = token_loss - args.entropy_coef * entropy
                policy.backward((w * torch.where(m, token_loss, 0)).sum())
                policy_meter.add(micro, m, w, metrics, old)
            policy_meter.step(policy.step(lr))

    metrics = policy_meter.metrics(names={"loss": "loss/policy"})
    metrics |= critic_meter.metrics(names={"loss": "loss/value"}, prefix="critic/", norm="critic/grad_norm", layout=False)
    if correction is not None:
        metrics |= {f"policy/{name}": float(losses.masked_mean(value, mask)) for name, value in engine_metrics.items()}
    if reference is not None:
        metrics |= {"policy/kl": float(losses.masked_mean(losses.kl_estimate(old_logprobs, ref_logprobs, mask, kind="k1"), mask)), "kl_coef": kl_coef}
    error = losses.masked_mean((returns - values).square(), mask)
    spread = losses.masked_mean((returns - losses.masked_mean(returns, mask)).square(), mask)
    return metrics | {"lr": lr, "critic/lr": critic_lr, "critic/value_mean": float(losses.masked_mean(values.double(), mask)),
                      "critic/explained_var": float(1 - error / spread) if spread > 0 else 0.0,
                      "batch/prompts": len(samples) // args.group, "batch/tokens": sum(batch.totals), "batch/trained": int(mask.any(1).sum()),
                      "batch/dropped": int((~scored).sum()), "batch/dropped_unscored": int((~scored).sum())}


if __name__ == "__main__":
    dist.run(train, tyro.cli(Args, description=__doc__, config=(tyro.conf.OmitSubcommandPrefixes,), use_underscores=True))
