"""TRL's half of bench/beside_trl.py, run by .venv-trl: GRPOTrainer with grpo.py's settings.

It writes one JSON object a step, with the names of grpo.py's metrics.jsonl. `time/rollout` is
generation alone. `time/step` is from a step's begin to its optimizer step, as in grpo.py: without
loading and logging. Where TRL's default would compute something else, the setting is written below.
"""
import argparse
import json
import sys
import time
from pathlib import Path


def letters(completions, **columns):
    """A cheap reward that differs between completions. grpo.py uses this function too."""
    return [sum(map(str.isalpha, text)) / 100 for text in completions]


def letters_of_chats(completions, **columns):
    """The same, of chats: what TRL gives for a prompt with a picture."""
    return letters([message["content"] for message, in completions])


def exact(completions, answer, **columns):
    """answers.exact: grpo.py's `--reward exact`."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def follows(completions, answer, **columns):
    """The reward of examples/instructions.py. The column holds its rules as JSON."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import instructions
    return [instructions.follows(text, json.loads(rule))
            for text, rule in zip(completions, answer, strict=True)]


def main(a: argparse.Namespace) -> None:
    import torch
    import transformers
    from datasets import Dataset, Image
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    kinds = AutoModelForCausalLM, AutoTokenizer
    if a.pictures:
        kinds = AutoModelForImageTextToText, AutoProcessor
    model = kinds[0].from_pretrained(a.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    # (step + 1) / warmup, as in grpo.py: transformers' own begins at 0 and loses the first update.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, a.warmup)))
    with open(a.prompts) as file:
        rows = Dataset.from_list([json.loads(line) for line in file])
    if a.pictures:
        rows = rows.cast_column("image", Image())
    out, row = open(a.out, "w", buffering=1), {}

    class Write(TrainerCallback):
        def on_step_begin(self, args, state, control, **rest):
            row.clear()
            row["step"], row["began"] = state.global_step, time.perf_counter()

        def on_step_end(self, args, state, control, **rest):
            row["time/step"] = time.perf_counter() - row.pop("began")

        def on_log(self, args, state, control, logs, **rest):
            if "reward" in logs:                       # the last log of a run has only its totals
                names = {"reward": "reward/mean", "completions/mean_length": "rollout/length_mean",
                         "completions/clipped_ratio": "rollout/truncated_frac",
                         "entropy": "policy/entropy", "grad_norm": "grad/norm"}
                metrics = {ours: float(logs[theirs]) for theirs, ours in names.items()}
                out.write(json.dumps(row | metrics) + "\n")

    trainer = GRPOTrainer(
        model=model, processing_class=kinds[1].from_pretrained(a.model), train_dataset=rows,
        reward_funcs=globals()[a.reward],
        optimizers=(optimizer, schedule), callbacks=[Write()],
        args=GRPOConfig(
            output_dir=a.out + ".trl", use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_steps=1, seed=a.seed,
            # One generation of all completions, then one optimizer step on all of them, in
            # micro-batches of a.micro rows.
            per_device_train_batch_size=a.micro,
            gradient_accumulation_steps=a.completions // a.micro, num_generations=a.group,
            num_iterations=1, max_completion_length=a.max_tokens, max_steps=a.steps,
            shuffle_dataset=False, gradient_checkpointing=a.checkpointing,
            temperature=a.temperature, top_p=1.0, top_k=0, use_vllm=False,
            # --advantage dr_grpo, --loss clip, --aggregation token, no KL. Truncated completions
            # are trained on.
            scale_rewards="none", loss_type="dapo", beta=0.0, epsilon=0.2,
            mask_truncated_completions=False, disable_dropout=True, max_grad_norm=1.0))

    generate = trainer._generate_single_turn           # its own timer reports to wandb only

    def timed(*args, **kwargs):
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        row["time/rollout"] = time.perf_counter() - began
        return result

    trainer._generate_single_turn = timed
    transformers.logging.set_verbosity_error()
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "prompts", "out", "reward"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "completions", "group", "micro", "max_tokens", "warmup", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    for name in ("checkpointing", "pictures"):
        parser.add_argument(f"--{name}", action="store_true")
    main(parser.parse_args())
