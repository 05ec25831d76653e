"""sft.py: supervised training on chats: what the assistant says becomes more likely.

    python parts/sft/sft.py --data chats.jsonl               one rank, the model that tiny.py makes
    torchrun --nproc_per_node 4 parts/sft/sft.py --data ...  four ranks: the same update

It is grpo.py without the rollout and the reward. The completions are in the data, and the loss is
-log π of each token that the assistant says. Nothing is sampled, so there is no engine. With
--eval_data and --reward there is one: it shows what a reward could teach next.

Read `train`, then `learn`. Which tokens the assistant says: parts/sft/targets.py. The trainer's
memory: ModelArgs in model.py.
"""
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the core, for `torchrun parts/sft/sft.py`
import dist
import losses
from batch import Batch, Sample
from dist import World
from flags import CommonArgs, parse
from log import Meter
from model import Policy, learning_rate
from parts.sft import targets
from parts.sft.supervised import Supervised, given
from preflight import show_plan
from run import set_up
from settings import not_default, sections


@dataclass
class Args(CommonArgs):
    """The flags of sft.py: those of CommonArgs, two of them with other defaults."""
    reward: tuple[str, ...] = ()
    group: int = 1

    script: ClassVar[str] = "parts/sft/sft.py"
    needs_rollouts: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    usual_lr: ClassVar[float] = 1e-5

    @property
    def needs_engine(self) -> bool:
        """Whether held-out rows are sampled and scored. Their perplexity needs no engine."""
        return bool(self.eval_data and self.reward)

    def load_rows(self, flag: str, seed: int, inputs) -> list[targets.LearnedRow]:
        """See CommonArgs."""
        rows = super().load_rows(
            flag, seed, inputs, partial(targets.make_row, eos_ids=inputs.ends))
        if rows:
            rows, note = targets.keep(rows, getattr(self, flag), self.max_tokens)
            inputs.notes[-1] += note
        return rows

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.group != 1:
            yield (f"--group must be 1: a row has one completion (got {self.group}). For an "
                   "evaluation there is --eval_samples.")
        if self.temperature != 1:
            yield (f"--temperature must be 1: nothing is sampled (got {self.temperature}). For an "
                   "evaluation there is --eval_temperature.")
        for section in sections(self):
            if type(section).__name__ in ("EngineArgs", "TurnArgs") and not self.needs_engine:
                yield from (f"--{flag} is for an engine. Would work: with --eval_data and --reward."
                            for flag in not_default(section))
        if self.reward and not self.eval_data:
            yield "--reward needs --eval_data: sft.py learns from no reward."
        if self.target_reward:
            yield ("--target_reward grades rollouts, and sft.py has none. For held-out rows there "
                   "is --target_eval.")
        yield from super().rules(plan)


def train(args: Args) -> int:
    """The loop → exit status. Every line is the same on all ranks."""
    run = set_up(args, Supervised)  # join, check, open, build, resume
    for step in range(run.start, run.end):
        run.world.step = step
        if step in run.evaluations and run.evaluate(step):  # it reaches --stop_at
            break

        with run.log.time("step"):
            samples = [given(prompt) for prompt in run.stream.next(args.batch)]
            lr = learning_rate(step, args.steps, args.lr, args)
            metrics = {"data/position": run.stream.position}
            metrics |= learn(args, run.world, run.policy, samples, lr=lr, phase=run.log.time)

        run.log.step(step + 1, metrics)
        run.log.watch(metrics)  # gradients that are not finite
        run.after_step(step + 1)  # a checkpoint; after SIGTERM the end
    return run.finish()  # the last evaluation, the export, the grade


def learn(args: Args, world: World, policy: Policy, samples: list[Sample], *, lr: float,
          phase=nullcontext) -> dict[str, float]:
    """One step of learning from N samples: --epochs x --minibatches optimizer steps → metrics.

    Metrics and new weights are the same on every rank, on any number of ranks, with any budgets.
    """
    batch = Batch(samples)
    metrics = {"batch/prompts": len(samples), "batch/trained": int((batch.tokens > 0).sum()),
               "batch/tokens": sum(p + c for _, p, c in batch.sizes),
               "batch/learned_tokens": int(batch.tokens.sum())}

    # Update:   L = -sum_it weight_it * log π_it        weight_it = 1 / tokens of the minibatch
    # Tokens of the assistant alone. The weights are fixed before `micro_batches` splits rows over
    # ranks, whose gradients FSDP sums: a mean of each rank's mean would be another loss.
    meter = Meter(world)
    for rows in batch.minibatches(args.minibatches, args.epochs):
        weights = torch.zeros(len(samples), dtype=torch.float64)  # (N,)
        weights[rows] = losses.token_weights(
            batch.tokens[rows], "token", max_tokens=args.max_tokens)
        rows = [r for r in rows if batch.tokens[r]]
        if not rows:  # no loss at all, so no step
            meter.skipped += 1
            continue
        with phase("update"):
            for micro in batch.micro_batches(world, rows, args.update_tokens, "update"):
                logp, _ = policy.logprobs(micro, args.temperature)  # (n,)
                loss, w = -logp, micro.per_token(weights)
                policy.backward((w * loss).sum())
                meter.add(w, {"loss/policy": loss})
            meter.norms.append(policy.step(lr))
    metrics |= meter.metrics() | policy.metrics | {"lr": lr}
    metrics["policy/perplexity"] = exp(min(metrics.get("loss/policy", 0.0), 700.0))
    return metrics


def main() -> None:
    """The command line."""
    args = parse(Args, __doc__)
    dist.run(show_plan if args.plan else train, args)


if __name__ == "__main__":
    main()
