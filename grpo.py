"""grpo.py: group-relative policy optimization and its family, for language models.       https://arxiv.org/abs/2402.03300

    python grpo.py                                         one rank, the tiny model that tiny.py makes
    torchrun --nproc_per_node 4 grpo.py --batch 8          four ranks; the update is the same on any number
    python grpo.py --plan --ranks 64 --batch 512           what would run on 64 ranks, without running it

One step: the engine samples G completions for each of P prompts; each is rewarded; a completion's advantage is how much
better it did than the other completions of its prompt; the policy takes one gradient step (or several) towards more of
what was better. There is no critic: the group is the baseline (ppo.py is the same loop with one).

Read `train`, then `learn`. The formulas they call, one short function each, are in losses.py; the README says who does what.
Shapes: P prompts, G completions each, N = P·G completions in request order, T tokens of the longest; a
micro-batch is (b, t). Everything (N, …) is the same on every rank.
"""
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import dist                    # first: it sets what torch reads when it is imported
import torch
import tyro

import losses
from batch import Batch, Meter
from dist import World
from model import Policy
from plan import needs_old_logprobs
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
    batch: int = 64
    """Prompts per step, all ranks together; any number ≥ 1 works on any number of ranks."""
    group: int = 8
    """G: completions per prompt."""
    minibatches: int = 1
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
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"] = "dr_grpo"
    """grpo: (R - mean)/(std + eps), ddof 1. dr_grpo: R - mean. rloo: R - mean of the others. reinforce++: R, whitened over all
    tokens. reinforce++-baseline: R - mean, whitened. Equal rewards give exactly 0. Sources: losses.group_advantages."""
    advantage_eps: float = 1e-6
    """eps of grpo's division (verl 1e-6, TRL 1e-4)."""
    dynamic_sampling: bool = False
    """DAPO: train only on groups whose raw rewards differ; take more prompts, at most --refills times, until there are --batch."""
    refills: int = 3
    """Most extra rollouts per step with --dynamic_sampling; then the step goes on with the groups it has."""
    overlong_buffer: int = 0
    """DAPO's soft overlong penalty: minus up to 1 over the last this many tokens before --max_tokens; 0: none."""
    overlong_filter: bool = False
    """Truncated completions bear no loss (they stay in their group's baseline); otherwise they are trained on as they were rewarded."""
    # ---- loss
    loss: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """clip: PPO's. gspo: one ratio per sequence, clips near 3e-4; exact under --aggregation sequence, others weigh it by length.
    cispo: clipped weight on log π, bounds [1 - low, 1 + high]. reinforce: no ratio, one update per rollout only."""
    clip_low: float = 0.2
    """ε below: ratios under 1 - clip_low are clipped."""
    clip_high: float = 0.2
    """ε above (DAPO's clip-higher: 0.28)."""
    dual_clip: float | None = None
    """c > 1 bounds the loss at -c·A where A < 0 (https://arxiv.org/abs/1912.09729); off by default, as in the PPO paper."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses add up. token: mean over all tokens of the minibatch (DAPO). sequence: mean of each completion's mean (GRPO).
    constant: sum / --max_tokens, mean over completions (Dr. GRPO). The denominator counts the global minibatch, before any split."""
    kl_loss_coef: float = 0.0
    """β of a KL term to the starting model in the loss; 0: none, and no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """In the loss: k1's expected gradient is 0; k2's is that of KL(π‖ref); k3's (GRPO's choice) is that of KL(ref‖π)."""
    kl_reward_coef: float = 0.0
    """β of the KL in the reward, before the advantage: k1 from old log-probs at the sampling temperature. Its gradient is exact."""
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

    algorithm: ClassVar[str] = "grpo"


LOSSES = {"clip": losses.clip_loss, "gspo": losses.gspo_loss, "cispo": losses.cispo_loss, "reinforce": losses.reinforce_loss}


def train(args: Args) -> None:
    """The loop. `Run` sets up what it needs; every line below is the same on all ranks."""
    run = Run(args, "grpo.py")
    for step in run.steps():
        with run.log.time("step"):
            # 1. Rollout: the engine takes the current weights, then samples G completions of each of P prompts; each is rewarded.
            #    With --dynamic_sampling, groups without a difference are left out, and more prompts are taken in their place.
            run.sync()
            everything = samples = run.sample(run.stream.take(args.batch), step, args.group, temperature=args.temperature)
            dropped = Counter()
            if args.dynamic_sampling:
                everything, samples, dropped = refill(run, samples, step)
            run.engine_rests()

            # 2. Advantages, and the update.
            lr = run.learning_rate(step, args.lr, args.warmup_steps)
            metrics = run.rollout_metrics(everything) | learn(args, run.world, run.policy, run.reference, samples, step, lr, dropped, run.phase)
            metrics |= {"batch/completions": len(everything), "data/position": run.stream.position}
        run.end_step(step, everything, metrics)
    run.end()


def learn(args: Args, world: World, policy: Policy, reference: Policy | None, samples: list[Sample], step: int, lr: float,
          dropped: Counter | None = None, time=nullcontext) -> dict[str, float]:
    """One step of learning from N samples in request order: advantages, then --epochs × --minibatches optimizer steps → metrics.

    The samples are the same list on every rank; so are the result and the weights, whatever the number of ranks and the budgets.
    """
    batch = Batch([s.prompt.row.prompt_ids for s in samples], [s.completion for s in samples])
    raw = torch.tensor([s.score.total if s.score.total is not None else 0.0 for s in samples], dtype=torch.float64)          # (N,)
    scored = torch.tensor([s.score.total is not None for s in samples], dtype=torch.bool)                                    # (N,)

    # Which completions bear loss; the others are counted once, with the reason. A lone scored one has no baseline.
    least = 1 if args.advantage == "reinforce++" else 2
    paired = (scored.view(-1, args.group).sum(1) >= least).repeat_interleave(args.group)                                     # (N,)
    cut = batch.truncated & args.overlong_filter
    dropped = Counter(dropped or {})
    dropped.update(unscored=int((~scored).sum()), no_baseline=int((scored & ~paired).sum()), overlong=int((scored & paired & cut).sum()))
    mask = batch.present & (scored & paired & ~cut).view(-1, 1)                                                              # (N, T)

    # Log-probs from before the update, where something needs them; else the update's own serve, and the ratio is exactly 1.
    old_logprobs = ref_logprobs = None
    with time("score"):
        if needs_old_logprobs(args):
            old_logprobs = batch.score(world, args.score_tokens, "old log-probs", step, lambda m: policy.logprobs(m, args.temperature)[0])
        if reference is not None:
            ref_logprobs = batch.score(world, args.score_tokens, "reference", step, lambda m: reference.logprobs(m, args.temperature)[0])

    # Advantage: A_i = R_i - mean(R of its group), for GRPO divided by their std, for RLOO without R_i in the mean.
    rewards = raw
    if args.overlong_buffer:
        rewards = rewards + losses.overlong_penalty(torch.tensor(batch.lengths), args.max_tokens, args.overlong_buffer)
    if args.advantage == "reinforce++":                    # A_t = sum over i >= t of (R at the last token - beta * k1_i), no group
        token_rewards = losses.token_rewards(rewards, old_logprobs, ref_logprobs, mask, kl_coef=args.kl_reward_coef)
        advantages = losses.rewards_to_go(token_rewards, mask)                                                               # (N, T)
    else:
        if args.kl_reward_coef:                            # R_i - beta * sum_t k1_t
            rewards = rewards - args.kl_reward_coef * losses.kl_estimate(old_logprobs, ref_logprobs, batch.present, kind="k1").sum(1)
        per_completion = losses.group_advantages(rewards, args.group, kind=args.advantage, eps=args.advantage_eps, scored=scored)
        advantages = per_completion.view(-1, 1).expand(mask.shape)                                                           # (N, T)
    if args.advantage.startswith("reinforce++"):
        advantages = losses.whiten(advantages, mask)
    correction = None                                      # pi_trainer / pi_engine, bounded, a constant of the loss
    if args.engine_correction != "none":
        correction, engine_metrics = losses.engine_correction(
            old_logprobs, batch.engine_logprobs, mask, kind=args.engine_correction, low=args.correction_low, high=args.correction_high)

    # Update. Membership of a minibatch and its weights (1 / global denominator) are fixed before anything is split, so that
    #     L = sum_it weight_it * (-min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it) + beta * KL_it - c * H_it)
    # is the same sum on any number of ranks and micro-batches.
    meter = Meter(world)
    for rows in batch.minibatches(args.minibatches) * args.epochs:
        if not mask[rows].any():                           # nothing to learn from: momentum alone must not move the weights
            meter.skipped += 1
            continue
        weights = torch.zeros(mask.shape, dtype=torch.float64)                                                               # (N, T)
        weights[rows] = losses.token_weights(mask[rows], args.aggregation, max_tokens=args.max_tokens)
        with time("update"):
            for micro in batch.micros(world, rows, args.update_tokens, "update", step):
                m, w = micro.take(mask), micro.take(weights)                                                                 # (b, t)
                logprobs, entropy = policy.logprobs(micro, args.temperature, entropy="grad" if args.entropy_coef else "value")
                old = logprobs.detach() if old_logprobs is None else micro.take(old_logprobs)
                token_loss, metrics = LOSSES[args.loss](logprobs, old, micro.take(advantages), m, clip_low=args.clip_low,
                                                        clip_high=args.clip_high, dual_clip=args.dual_clip)                  # (b, t)
                if correction is not None:
                    token_loss = token_loss * micro.take(correction)
                metrics |= {"loss": token_loss, "entropy": entropy}
                if args.kl_loss_coef:
                    metrics["kl"] = losses.kl_estimate(logprobs, micro.take(ref_logprobs), m, kind=args.kl_estimator)
                    token_loss = token_loss + args.kl_loss_coef * metrics["kl"]
                if args.entropy_coef:
                    token_loss = token_loss - args.entropy_coef * entropy
                policy.backward((w * torch.where(m, token_loss, 0)).sum())
                meter.add(micro, m, w, metrics, old)
            meter.step(policy.step(lr))

    metrics = meter.metrics(names={"loss": "loss/policy", "kl": "loss/kl", "entropy": "policy/entropy"})
    if correction is not None:
        metrics |= {f"policy/{name}": float(losses.masked_mean(value, mask)) for name, value in engine_metrics.items()}
    return metrics | {"lr": lr, "batch/prompts": len(samples) // args.group, "batch/tokens": sum(batch.totals),
                      "batch/trained": int(mask.any(1).sum()), "batch/dropped": sum(dropped.values()),
                      **{f"batch/dropped_{reason}": n for reason, n in dropped.items()}}


def refill(run: Run, samples: list[Sample], step: int) -> tuple[list[Sample], list[Sample], Counter]:
    """DAPO's dynamic sampling: (all sampled, those kept, why the others were not). https://arxiv.org/abs/2503.14476, section 3.2

    Keeps groups whose scored rewards differ, and takes more prompts until there are --batch of them or --refills are used up.
    A pure function of the global list, so every rank stops alike; accepted groups beyond --batch are counted and discarded.
    """
    args = run.args
    everything, kept = [], []
    for refill in range(args.refills + 1):
        everything += samples
        raw = torch.tensor([s.score.total if s.score.total is not None else 0.0 for s in samples], dtype=torch.float64)
        scored = torch.tensor([s.score.total is not None for s in samples])
        differs = losses.keep_groups(raw, args.group, scored)                                                                # (P,)
        kept += [samples[g * args.group:(g + 1) * args.group] for g in range(len(differs)) if differs[g]]
        if len(kept) >= args.batch or refill == args.refills:
            break
        samples = run.sample(run.stream.take(args.batch), step, args.group, temperature=args.temperature)
    surplus = max(0, len(kept) - args.batch) * args.group
    same = len(everything) - len(kept) * args.group
    return everything, [s for group in kept[:args.batch] for s in group], Counter(equal=same, surplus=surplus)


if __name__ == "__main__":
    dist.run(train, tyro.cli(Args, description=__doc__, config=(tyro.conf.OmitSubcommandPrefixes,), use_underscores=True))
