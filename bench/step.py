"""The phases of a step beside the raw parts that they are made of.

    python bench/step.py                       3 million parameters, one rank, in one process
    python bench/step.py --model 30m           30 million
    python bench/step.py --only rollout,rest   some of: rollout update score rest

rollout   engine.sample (requests, generate, gather) against a bare LLM.generate of the same
          requests, with the same seeds and log-probs.
update    grpo.learn (batch, advantages, micro-batches, loss, metrics, AdamW) against transformers'
          forward, a log-softmax over every position, backward and AdamW, over the same real tokens.
          Padding does not count as work. The bare loop gets 16 rows at a time, by their length
          ("sorted") and in their order ("in order"). The lengths are spread 1:20.
score     the pass of old log-probs, likewise, without a gradient.
rest      the loop of grpo.train: the share of a step that is not rollout, reward, score or update.

The contestants take turns: --times rounds, after one to warm up. A figure is the median, with the
smallest and the largest.
"""
import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import dist
import grpo
from batch import Batch, Sample
from examples import tiny
from run import Run, set_up

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"3m": dict(hidden_size=256, intermediate_size=640, num_hidden_layers=4,
                    num_attention_heads=8, num_key_value_heads=8),
         "30m": dict(hidden_size=640, intermediate_size=1792, num_hidden_layers=6,
                     num_attention_heads=10, num_key_value_heads=10)}


def random_model(size: str) -> str:
    """A Hugging Face folder with random weights in float32 and tiny.py's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder = ROOT / "runs" / f"bench-{size}"
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tiny.VOCAB, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="float32", **SIZES[size]))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rounds(contestants: dict, times: int) -> dict[str, list[float]]:
    """Seconds of each, in turns, after one round that does not count."""
    seconds = {name: [] for name in contestants}
    for turn in range(times + 1):
        for name, function in contestants.items():
            began = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def show(title: str, seconds: dict[str, list[float]], tokens: int) -> None:
    """One line for each contestant. A ratio is the first one's speed to this one's, by rounds."""
    first = next(iter(seconds))
    for name, took in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(took, seconds[first], strict=True))
        speed = f"{tokens / statistics.median(took):,.0f}"
        between = f"({tokens / max(took):,.0f}–{tokens / min(took):,.0f})"
        print(f"| {title} | {name} | {speed} {between} | "
              + (f"{ratio:.2f} |" if name != first else "|"), flush=True)


# ---- rollout -------------------------------------------------------------------------------------

def rollout(run: Run, times: int) -> None:
    from vllm import SamplingParams, TokensPrompt

    from rollout import hash_seed
    a, prompts = run.args, run.stream.next(run.args.batch)
    made = []

    def ours():
        made[:] = run.engine.sample(prompts, a.group, 1.0)

    def bare():
        asked = [(p, g) for p in prompts for g in range(a.group)]
        params = [SamplingParams(
            temperature=1.0, max_tokens=a.max_tokens, logprobs=0, detokenize=False,
            seed=hash_seed(a.seed, "train", p.position, g), stop_token_ids=run.engine.eos_ids)
            for p, g in asked]
        inputs = [TokensPrompt(prompt_token_ids=p.row.prompt_ids) for p, _ in asked]
        outputs = run.engine.llm.generate(inputs, params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]

    ours()
    same = sum(list(a.ids) == list(b) for a, b in zip(made, bare(), strict=True))
    took = {"phase": [], "bare LLM.generate": []}
    for turn in range(times + 1):
        run.log.times.clear()
        ours()
        phase = run.log.times["time/rollout"]
        began = time.perf_counter()
        bare()
        if turn:
            took["phase"].append(phase)
            took["bare LLM.generate"].append(time.perf_counter() - began)
    show(f"rollout, {len(made)} completions ({same} the same in both)", took,
         sum(len(c.ids) for c in made))


# ---- update and score ----------------------------------------------------------------------------

def spread_samples(run: Run, n: int) -> list[Sample]:
    """n completions of random tokens, lengths log-uniform from 16 to 320, rewards 0 or 1."""
    rng, prompts = np.random.default_rng(0), run.stream.next(n // run.args.group)
    samples = []
    for i in range(n):
        length = int(np.exp(rng.uniform(np.log(16), np.log(320))))
        ids = rng.integers(3, tiny.VOCAB, length).astype(np.int32)
        samples.append(Sample(prompts[i // run.args.group], ids, np.full(length, -5.7, np.float32),
                              reward=float(rng.integers(2))))
    return samples


def bare_model(folder: str):
    from transformers import AutoModelForCausalLM, logging
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa")
    return lm, torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)


def padded(samples: list[Sample], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and attention mask, (b, L) each, right-padded, as a loop on transformers has them."""
    ids = [samples[r].prompt.row.prompt_ids + samples[r].ids.tolist() for r in rows]
    longest = max(map(len, ids))
    return (torch.tensor([i + [0] * (longest - len(i)) for i in ids]),
            torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in ids]))


def logprobs_of(lm, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logprobs * mask[:, 1:]


def update_and_score(run: Run, times: int, only: list[str]) -> None:
    a = replace(run.args, update_tokens=8192, logprob_tokens=8192)
    samples = spread_samples(run, 128 if a.model.endswith("3m") else 32)
    batch, (lm, optimizer) = Batch(samples), bare_model(a.model)
    tokens, rows = sum(p + c for _, p, c in batch.sizes), list(range(len(samples)))
    by_length = sorted(rows, key=lambda row: len(samples[row].ids))
    in_order, by_length = (
        [some[i:i + 16] for i in range(0, len(rows), 16)] for some in (rows, by_length))

    def learn():
        grpo.learn(a, run.world, run.policy, samples, lr=1e-6)

    def score():
        batch.forward(run.world, a.logprob_tokens, "bench",
                      lambda m: run.policy.logprobs(m, 1.0)[0])

    def bare_update(cut):
        for part in cut:
            (-logprobs_of(lm, *padded(samples, part)).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def bare_score(cut):
        return [logprobs_of(lm, *padded(samples, part)) for part in cut]

    for name, phase, function, bare in (("update", "grpo.learn", learn, bare_update),
                                        ("score", "Batch.forward", score, bare_score)):
        if name in only:
            show(f"{name}, lengths 16 to 320", rounds({
                phase: function, "bare, sorted": lambda bare=bare: bare(by_length),
                "bare, in order": lambda bare=bare: bare(in_order)}, times), tokens)


# ---- the loop ------------------------------------------------------------------------------------

def rest(run: Run) -> None:
    """grpo.train as it is, on this Run. The loop asks `stop.agreed` once, at the end of a step."""
    ends, agreed = [], run.stop.agreed

    def noted() -> bool:
        ends.append(time.perf_counter())
        return agreed()

    run.stop.agreed, run.finish, grpo.set_up = noted, lambda: 0, lambda _: run
    grpo.train(run.args)
    rows, phases = run.log.rows[-len(ends) + 1:], ("rollout", "reward", "logprobs", "update")
    known = [sum(row.get(f"time/{phase}", 0.0) for phase in phases) for row in rows]
    whole = [end - start for start, end in pairwise(ends)]         # of all steps but the first
    parts = [(w - k) / w for w, k in zip(whole, known, strict=True)]
    sync = statistics.median(row["time/sync"] / w for row, w in zip(rows, whole, strict=True))
    print(f"| rest of a step | {run.args.batch * run.args.group} completions, "
          f"{statistics.median(whole):.2f} s a step | {statistics.median(parts):.1%} "
          f"({min(parts):.1%}–{max(parts):.1%}) | of which sync {sync:.1%} |", flush=True)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3m")
    parser.add_argument("--only", default="rollout,update,score,rest")
    parser.add_argument("--times", type=int, default=5)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    only = options.only.split(",")
    os.chdir(ROOT)
    args = grpo.Args(
        model=random_model(options.model), batch=16, group=8, max_tokens=128, steps=6, lr=1e-9,
        name=f"bench-step-{os.getpid()}", max_prompt_tokens=64,
        export=False, samples_every=10**9, save_every=0, reward=("examples/coin.py:coin",))
    run = set_up(args)
    parameters = sum(p.numel() for p in run.policy.module.parameters())
    print(f"\n{parameters:,} parameters, {torch.get_num_threads()} threads, load average "
          f"{os.getloadavg()[0]:.1f}\n\n| phase | what | tokens/s, median (range) | ratio |\n"
          "|---|---|---|---|")
    if "rollout" in only:
        with run.engine.generating(run.policy):
            rollout(run, options.times)
    if {"update", "score"} & set(only):
        update_and_score(run, options.times, only)
    if "rest" in only:
        rest(run)
    run.close()


if __name__ == "__main__":
    dist.run(main, options_of())  # which ends the process
