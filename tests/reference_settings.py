"""The settings of test_reference.py, and the completions that they learn from."""
import ast
import itertools
import random
import re

import numpy as np

import data
import distill
import grpo
import losses
import ppo
import rewards
import sft
from preflight import plan
from running import loss_flags
from trainer.batch import Completion, Sample
from wirings import DEFAULT, TRUNCATE, WIRINGS

VOCAB, PROMPT, COMPLETION = 24, 5, 16
BUDGETS = (4096, 60, PROMPT + COMPLETION)  # everything, a few rows, one longest row
SCRIPTS = {"grpo": grpo, "ppo": ppo, "sft": sft, "distill": distill}


class Setting:
    """A script, its flags, and what it learns from, of words: "ppo group=1 steps=2 lam=0.5"."""

    def __init__(self, words: str):
        def value(text: str):
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text

        self.words, (self.script, *more) = words, words.split()
        found = re.findall(r"(\w+)=(.*?)(?= \w+=| carried| experts|$)", words)
        self.flags = {name: value(text) for name, text in found}
        self.group, self.steps = self.flags.pop("group"), self.flags.pop("steps")
        self.experts, self.carried = "experts" in more, "carried" in more

    def folder(self, name: str) -> str:
        """policy or start → its folder."""
        return f"experts-{name}" if self.experts else name


CARRIED = TRUNCATE + " carried"  # --carry: older policies sampled the first tokens
NAMED = [DEFAULT, CARRIED, *(test for *_, test in WIRINGS if "::" not in test)]
SETTINGS = [Setting(words) for words in dict.fromkeys(NAMED)]
OFTEN = {"minibatches": (1, 2), "epochs": (1, 2), "temperature": (1.0, 0.7), "lora_rank": (0, 2)}
SAMPLED = OFTEN | {
    "aggregation": ("token", "sequence", "constant", "prompt"), "dual_clip": (None, 1.1),
    "clip_high": (0.05, 0.2), "correction_low": (0.7,), "correction_high": (1.2,),
    "engine_correction": ("none", "truncate", "mask", "sequence_truncate", "sequence_mask")}
REWARDED = SAMPLED | {"kl_reward_coef": (0.0, 0.2), "entropy_coef": (0.0, 0.2),
                      "overlong_buffer": (0, 8), "max_grad_norm": (1.0, 0.0)}
FILES = {kind: [f"variants/{name}.py:{name}" for name in names.split()] for kind, names in {
    "loss": "sapo gmpo dppo ipo opsm", "advantage": "lite_ppo maxrl gdpo"}.items()}
CHOICES = {
    "grpo": REWARDED | {
        "loss": (*losses.LOSSES, *FILES["loss"]),
        "advantage": (*loss_flags.NAMES["advantage"], *FILES["advantage"]),
        "kl_loss_coef": (0.0, 0.3), "kl_estimator": ("k1", "k2", "k3", "k3_ratio"),
        "overlong_filter": (False, True), "reward": (("exact", "short:0.5"),)},
    "ppo": REWARDED | {"gamma": (1.0, 0.9), "lam": (0.95, 0.0), "value_clip": (0.2, None)},
    "sft": OFTEN,
    "distill": SAMPLED | {
        "teacher": ("x",), "divergence": ("none", "reverse_kl", "forward_kl", "jsd"),
        "distill_coef": (1.0, 0.3), "reward": (("exact",),), "reward_coef": (0.0, 2.0),
        "head_chunk": (2048, 5)}}


def arguments(setting: Setting, number: int):
    """Args of the setting's script, whose budgets depend on the setting's number."""
    budget, other = BUDGETS[number % 2], BUDGETS[number // 2 % 3]
    options = dict(group=setting.group, max_tokens=COMPLETION, max_prompt_tokens=PROMPT,
                   minibatches=1, lr=0.01, update_tokens=budget, score_tokens=other,
                   dtype="float64")
    if setting.script == "ppo":
        options |= dict(critic_lr=0.02, critic_update_tokens=other, critic_score_tokens=budget)
    return plan.changed(SCRIPTS[setting.script].Args(), **options | setting.flags)


def drawn(script: str) -> list[Setting]:
    """At random, until 300 draws in a row have no new pair of values."""
    rng, seen, found, in_vain = random.Random(0), set(), [], 0
    while in_vain < 300:
        flags = {name: rng.choice(values) for name, values in CHOICES[script].items()}
        pairs = set(itertools.combinations(flags.items(), 2))
        words = " ".join(f"{name}={value}" for name, value in flags.items())
        setting = Setting(f"{script} group={1 if script == 'sft' else 2} steps=1 {words}")
        in_vain += 1
        if pairs - seen and not plan.problems(arguments(setting, 0), 1):
            seen, found, in_vain = seen | pairs, [*found, setting], 0
    return found


# ---- what is learnt from ----


def hostile(group: int, seed: int) -> list[Sample]:
    """Groups that a mistake may confuse; the rows are in request order.

    0 and 5 have one prompt, 3 and 4 too. 1 has equal rewards, 2 one scored completion, 5 none in
    its first half. Some completions have one token, some are truncated, some have replies.
    """
    rng, samples = np.random.default_rng(seed), []
    groups = 6 if group > 1 else 14
    prompts = [rng.integers(0, VOCAB, rng.integers(1, PROMPT + 1)).tolist() for _ in range(groups)]
    prompts[5], prompts[4] = prompts[0], prompts[3]
    for p, prompt in enumerate(prompts):
        row = data.Row(p, "q", prompt, "a", {}, "made up")
        for g in range(group):
            truncated = rng.random() < 0.2
            length = COMPLETION if truncated else int(rng.choice([1, 2, 3, 5, 8, 12]))
            sampled = np.ones(length, bool)
            if rng.random() < 0.6:  # replies, never at the start
                sampled[1:-1] = rng.random(max(0, length - 2)) < 0.6
            reward = float(rng.integers(0, 9)) / 8
            if p == 1:
                reward = 0.25
            if (p == 2 and g > 0) or (p == 5 and g < group // 2) or (group == 1 and p % 5 == 4):
                reward = None
            short = None if reward is None else round(length * reward, 2) % 1  # of GDPO alone
            logprobs = np.log(1 / VOCAB) + 0.7 * rng.standard_normal(length)
            samples.append(Sample(
                data.Prompt(p, row),
                Completion(rng.integers(0, VOCAB, length).astype(np.int32),
                           (logprobs * sampled).astype(np.float32), truncated, sampled),
                "text", rewards.Score(reward, {"exact": reward, "short": short}, None)))
    return samples


def samples_of(setting: Setting, step: int) -> list[Sample]:
    """What a step learns from. For sft.py two rows teach nothing. With a hint the teacher has
    another prompt: also where two rows have the same one."""
    samples = hostile(setting.group, step)
    rng = np.random.default_rng(step)
    if setting.script == "sft":
        for sample in samples[4:6]:
            sample.completion.sampled[:] = False
    if "teacher_prompt" in setting.flags:
        for sample in samples[::setting.group]:
            sample.prompt.row.teacher_ids = rng.integers(0, VOCAB, PROMPT).tolist()
    for sample in samples if setting.carried else ():
        c = sample.completion
        c.steps = np.sort(rng.integers(step - 3, step + 1, len(c.ids))).astype(np.int32)
        c.logprobs += c.sampled * 0.3 * (c.steps - step).astype(np.float32)  # of its policy
    return samples
