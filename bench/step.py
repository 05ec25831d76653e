"""The phases of a step beside the raw parts they are made of, and how a step grows: one rank, in one process.

    python bench/step.py                       3 million parameters
    python bench/step.py --model 30m           30 million; --only rollout,update,score,rest,batch,group,max_tokens for some of it

rollout   Run's whole phase (split, requests, generate, gather) against a bare LLM.generate of the same seeded, log-prob-returning requests.
update    grpo.learn (batch, advantages, micro-batches, loss, metrics, AdamW) against transformers' forward, a log-softmax over
          every position, backward and AdamW, over the same real tokens; padding is not counted as work done. The bare loop is given our
          own micro-batches ("sorted"), and the same rows as they come ("in order"). Lengths spread 1:20.
score     the pass of old log-probs, likewise, without a gradient.
rest      the loop of grpo.train: what of a step's wall-clock time is not generation, reward, score pass or update.
batch, group, max_tokens: seconds of a whole step (sync, rollout, reward, update) as it doubles, most completions to the limit.

The contestants take turns, --times rounds after one to warm up; figures are medians, with the smallest and the largest.
"""
import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import dist  # first: it sets what torch reads
import numpy as np
import torch

import grpo
import tiny
from batch import Batch, Completion
from rewards import Score
from run import Run, Sample

SIZES = {"3m": dict(hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8),
         "30m": dict(hidden_size=640, intermediate_size=1792, num_hidden_layers=6, num_attention_heads=10, num_key_value_heads=10)}


def random_model(size: str) -> str:
    """A Hugging Face folder with random weights in float32 and tiny.py's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder = ROOT / "runs" / f"bench-{size}"
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    lm = Qwen2ForCausalLM(Qwen2Config(vocab_size=tiny.VOCAB, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
                                      eos_token_id=tokenizer.eos_token_id, dtype="float32", **SIZES[size]))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rounds(contestants: dict, times: int) -> dict[str, list[float]]:
    """Seconds of each, in turns, after one round that is not counted."""
    seconds = {name: [] for name in contestants}
    for turn in range(times + 1):
        for name, function in contestants.items():
            began = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def tell(title: str, seconds: dict[str, list[float]], tokens: int) -> None:
    """One line a contestant; ratios are speeds, of the first to each, round by round."""
    ours = next(iter(seconds))
    for name, took in seconds.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(took, seconds[ours]))
        print(f"| {title} | {name} | {tokens / statistics.median(took):,.0f} ({tokens / max(took):,.0f}–{tokens / min(took):,.0f}) | "
              + (f"{ratio:.2f} |" if name != ours else "|"), flush=True)


# ---- rollout --------------------------------------------------------------------------------------------------------

def rollout(run: Run, times: int) -> None:
    from vllm import SamplingParams, TokensPrompt
    from rollout import hash_seed
    a, prompts = run.args, run.stream.take(run.args.batch)
    made = []

    def ours():
        made[:] = [s.completion for s in run.sample(prompts, 0, a.group, temperature=1.0)]

    def bare():
        asked = [(p, g) for p in prompts for g in range(a.group)]
        params = [SamplingParams(temperature=1.0, max_tokens=a.max_tokens, seed=hash_seed(a.seed, "train", p.position, g), logprobs=0,
                                 stop_token_ids=run.engine.eos_ids, detokenize=False) for p, g in asked]
        outputs = run.engine.llm.generate([TokensPrompt(prompt_token_ids=p.row.prompt_ids) for p, _ in asked], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]

    ours()
    same = sum(list(mine.ids) == list(theirs) for mine, theirs in zip(made, bare()))
    took = {"phase": [], "bare LLM.generate": []}
    for turn in range(times + 1):
        run.log.times.clear()
        ours()
        phase = run.log.times["time/rollout"]          # Run's own clock: the reward is another phase
        began = time.perf_counter()
        bare()
        if turn:
            took["phase"].append(phase)
            took["bare LLM.generate"].append(time.perf_counter() - began)
    tell(f"rollout, {len(made)} completions ({same} the same in both)", took, sum(len(c.ids) for c in made))


# ---- update and score -----------------------------------------------------------------------------------------------

def spread_samples(run: Run, n: int) -> list[Sample]:
    """n completions of random tokens, lengths log-uniform from 16 to 320, rewards 0 or 1."""
    rng, prompts = np.random.default_rng(0), run.stream.take(n // run.args.group)
    samples = []
    for i in range(n):
        length = int(np.exp(rng.uniform(np.log(16), np.log(320))))
        completion = Completion(rng.integers(3, tiny.VOCAB, length).astype(np.int32), np.full(length, -5.7, np.float32), False)
        samples.append(Sample(prompts[i // run.args.group], completion, "", Score(float(rng.integers(2)), {}, None)))
    return samples


def bare_model(folder: str):
    from transformers import AutoModelForCausalLM, logging
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return lm, torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)


def padded(samples: list[Sample], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (b, L) and the attention mask, right-padded: what any loop on transformers would feed."""
    ids = [samples[r].prompt.row.prompt_ids + samples[r].completion.ids.tolist() for r in rows]
    long = max(map(len, ids))
    return (torch.tensor([i + [0] * (long - len(i)) for i in ids]), torch.tensor([[1] * len(i) + [0] * (long - len(i)) for i in ids]))


def logprobs_of(lm, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]


def update_and_score(run: Run, times: int, only: list[str]) -> None:
    a = replace(run.args, update_tokens=8192, score_tokens=8192)
    samples = spread_samples(run, 128 if a.model.endswith("3m") else 32)
    batch = Batch([s.prompt.row.prompt_ids for s in samples], [s.completion for s in samples])
    tokens, lm_opt = sum(batch.totals), bare_model(a.model)
    in_order = [list(range(i, i + 16)) for i in range(0, len(samples), 16)]
    ours_rows = [m.rows for m in batch.micros(run.world, list(range(len(samples))), a.update_tokens, "bench", 0)]

    def bare_update(cut):
        lm, optimizer = lm_opt
        for rows in cut:
            ids, mask = padded(samples, rows)
            (-logprobs_of(lm, ids, mask).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def bare_score(cut):
        return [logprobs_of(lm_opt[0], *padded(samples, rows)) for rows in cut]

    if "update" in only:
        tell("update, lengths 16 to 320", rounds({
            "grpo.learn": lambda: grpo.learn(a, run.world, run.policy, None, samples, 0, 1e-6),
            "bare, sorted": lambda: bare_update(ours_rows), "bare, in order by 16": lambda: bare_update(in_order)}, times), tokens)
    if "score" in only:
        tell("score, lengths 16 to 320", rounds({
            "Batch.score": lambda: batch.score(run.world, a.score_tokens, "bench", 0, lambda m: run.policy.logprobs(m, 1.0)[0]),
            "bare, sorted": lambda: bare_score(ours_rows), "bare, in order by 16": lambda: bare_score(in_order)}, times), tokens)


# ---- the loop -------------------------------------------------------------------------------------------------------

def rest(run: Run) -> None:
    """grpo.train as it is, on a Run that notes when each step begins."""
    began, steps = [], run.steps

    def noted():
        for step in steps():
            began.append(time.perf_counter())
            yield step
        began.append(time.perf_counter())

    run.steps, run.end = noted, lambda: None
    grpo.Run = lambda *_: run
    grpo.train(run.args)
    rows = run.log.rows[-run.args.steps:]
    known = [sum(row.get(f"time/{phase}", 0.0) for phase in ("rollout", "reward", "score", "update")) for row in rows]
    whole = [end - start for start, end in zip(began, began[1:])]
    parts = [(w - k) / w for w, k in zip(whole, known)][1:]
    print(f"| rest of a step | {run.args.batch * run.args.group} completions, {statistics.median(whole):.2f} s a step | "
          f"{statistics.median(parts):.1%} ({min(parts):.1%}–{max(parts):.1%}) | of which sync "
          f"{statistics.median(row['time/sync'] / w for row, w in zip(rows[1:], whole[1:])):.1%} |", flush=True)


def growth(run: Run, times: int, only: list[str]) -> None:
    """Seconds of a whole step in each setting, and the factor to the setting half as large."""
    flops_per_token = lambda length: 6 * sum(p.numel() for p in run.policy.module.parameters()) + 6 * run.config.num_hidden_layers * run.config.hidden_size * length

    def one(a) -> float:
        began = time.perf_counter()
        run.args = a
        run.sync()
        samples = run.sample(run.stream.take(a.batch), 0, a.group, temperature=1.0)
        run.engine_rests()
        grpo.learn(a, run.world, run.policy, None, samples, 0, 1e-9)
        return time.perf_counter() - began

    base = replace(run.args, batch=16, group=4, max_tokens=32)
    for name, values in {"batch": (8, 16, 32, 64, 128, 256, 512), "group": (4, 8, 16, 32, 64), "max_tokens": (32, 64, 128, 256, 512)}.items():
        if name not in only:
            continue
        settings = [replace(base, **{name: v}) for v in values]
        one(settings[0])
        took = [statistics.median([one(a) for _ in range(times)]) for a in settings]
        steps = " ".join(f"{v}: {s:.2f} s" + (f" (×{s / took[i - 1]:.2f})" if i else "") for i, (v, s) in enumerate(zip(values, took)))
        print(f"| growth | {name} | {steps} | largest factor {max(b / a for a, b in zip(took, took[1:])):.2f} |", flush=True)
        if name == "max_tokens":
            prompt = statistics.mean(len(p.row.prompt_ids) for p in run.stream.take(100))
            work = [(prompt + v) * flops_per_token(prompt + v) for v in values]
            print("| growth | the same by FLOPs | " + " ".join(f"×{b / a:.2f}" for a, b in zip(work, work[1:])) + " | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3m")
    parser.add_argument("--only", default="rollout,update,score,rest,batch,group,max_tokens")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    os.chdir(ROOT)
    args = grpo.Args(model=random_model(options.model), batch=16, group=8, max_prompt_tokens=64, max_tokens=128, steps=6, export=False,
                     lr=1e-9, samples_every=10**9, name=f"bench-step-{os.getpid()}")
    run = Run(replace(args, max_tokens=512), "grpo.py")  # the engine's longest, for growth
    run.args = args
    run.sync()
    run.engine_rests()
    print(f"\n{sum(p.numel() for p in run.policy.module.parameters()):,} parameters, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}\n\n"
          "| phase | what | tokens/s, median (range) | ratio |\n|---|---|---|---|")
    only = options.only.split(",")
    if "rollout" in only:
        rollout(run, options.times)
    if {"update", "score"} & set(only):
        update_and_score(run, options.times, only)
    growth(run, 3, only)
    run.args = args
    if "rest" in only:
        rest(run)
    run.close()


if __name__ == "__main__":
    dist.run(main)
