"""The settings of test_reference.py, and the completions that they learn from."""
import ast
import itertools
import random
import re

import numpy as np

import data
import flags
import losses
import plan
import reference
import rewards
from batch import Completion, Sample
from fakes import SCRIPTS
from settings import changed

VOCAB, PROMPT, COMPLETION = 24, 5, 16
BUDGETS = (4096, 60, PROMPT + COMPLETION)  # everything, a few rows, one longest row


class Setting:
    """A script, its flags, and what it learns from, of words: "ppo group=1 steps=2 lam=0.5".
    Tests of parts extend it."""
    scripts = SCRIPTS
    before = "start"  # the folder of the reference model, of reference.py
    teaches = False  # whether the reference model is another one's files

    def __init__(self, words: str):
        def value(text: str):
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text

        self.words, (self.script, *more) = words, words.split()
        found = re.findall(r"(\w+)=(.*?)(?= \w+=| binary|$)", words)
        self.flags = {name: value(text) for name, text in found}
        self.group, self.steps = self.flags.pop("group"), self.flags.pop("steps")
        self.binary = "binary" in more

    def folder(self, name: str) -> str:
        """policy or start → its folder."""
        return name

    def samples(self, step: int) -> list[Sample]:
        """What a step learns from."""
        return hostile(self.group, step, self.binary)

    def options(self, **options) -> dict:
        """What `learn` takes of these."""
        return options

    def model(self, lm, args, head=None, adapted: bool = True) -> reference.Model:
        """A model of reference.py. adapted: it is the one that learns."""
        return reference.Model(lm, args, head)

    def learn(self, args, models, samples, completions, lr: float, kl_coef: float) -> dict:
        """A step by reference.py. models: the policy, the critic, the reference model."""
        policy, critic, before = models
        if self.script == "grpo":
            return reference.grpo(args, policy, before, completions, lr)
        return reference.ppo(args, policy, critic, before, completions, lr,
                             args.critic_args.critic_lr, kl_coef)


TWICE = "minibatches=2 epochs=2"
TIGHT = f"clip_low=0.03 clip_high=0.05 {TWICE}"
BOUNDS = "correction_low=0.7 correction_high=1.2"
# binary: rewards of 0 and 1.
NAMED = f"""
grpo group=3 steps=2
grpo group=3 steps=2 kl_loss_coef=0.3 temperature=0.6 aggregation=sequence
grpo group=3 steps=1 kl_reward_coef=0.2 advantage=dr_grpo temperature=0.8 {TWICE}
grpo group=3 steps=3 {TWICE}
grpo group=3 steps=2 advantage=grpo advantage_eps=0.3
grpo group=3 steps=1 advantage=grpo overlong_buffer=8 {TIGHT}
grpo group=3 steps=2 kl_reward_coef=0.2 advantage=rloo overlong_filter=True overlong_buffer=8
grpo group=3 steps=1 advantage=reinforce++ overlong_buffer=8 {TIGHT}
grpo group=3 steps=1 advantage=reinforce++-baseline overlong_buffer=8 {TIGHT}
grpo group=3 steps=1 kl_reward_coef=0.2 advantage=reinforce++ temperature=0.8 {TWICE}
grpo group=3 steps=1 kl_loss_coef=0.3 advantage=reinforce++
grpo group=3 steps=1 kl_loss_coef=0.3 kl_estimator=k1 {TWICE}
grpo group=3 steps=2 engine_correction=truncate kl_loss_coef=0.3 entropy_coef=0.2 {BOUNDS}
grpo group=3 steps=2 entropy_coef=0.3
grpo group=3 steps=2 dual_clip=1.1 epochs=3
grpo group=3 steps=1 loss=variants/ipo.py:ipo clip_low=0.01 clip_high=0.02 {TWICE}
grpo group=3 steps=1 loss=variants/gmpo.py:gmpo aggregation=sequence {TIGHT}
grpo group=3 steps=1 loss=cispo {TIGHT}
grpo group=3 steps=1 loss=reinforce {TWICE}
grpo group=3 steps=1 loss=tests/often.py:geometric entropy_coef=0.2 {TIGHT}
grpo group=3 steps=1 loss=variants/opsm.py:opsm entropy_coef=0.2 {TWICE}
grpo group=3 steps=1 kl_loss_coef=0.3 kl_estimator=k3_ratio {TWICE}
grpo group=3 steps=1 loss=clip aggregation=prompt {TIGHT}
grpo group=3 steps=1 advantage=variants/gdpo.py:gdpo reward=('exact', 'short:0.5') \
overlong_filter=True {TWICE}
grpo group=3 steps=2 advantage=variants/lite_ppo.py:lite_ppo overlong_buffer=8 advantage_eps=0.1
grpo group=5 steps=2 advantage=variants/pass_at_k.py:pass_at_k binary
grpo group=4 steps=1 loss=tests/often.py:clip_cov engine_correction=truncate {TIGHT}
grpo group=3 steps=1 loss=clip aggregation=token {TIGHT}
grpo group=3 steps=1 minibatches=30
grpo group=3 steps=1 loss=variants/sapo.py:sapo aggregation=sequence {TWICE}
grpo group=3 steps=1 loss=variants/gmpo.py:gmpo advantage=reinforce++ {TIGHT}
grpo group=3 steps=1 loss=variants/dppo.py:dppo clip_low=0.01 clip_high=0.02 {TWICE}
grpo group=3 steps=2 advantage=variants/maxrl.py:maxrl
grpo group=3 steps=1 engine_correction=sequence_mask kl_loss_coef=0.3 {BOUNDS} {TWICE}
grpo group=3 steps=2 engine_correction=mask kl_loss_coef=0.3 entropy_coef=0.2 {BOUNDS}
grpo group=3 steps=1 loss=variants/ipo.py:ipo engine_correction=mask {BOUNDS} {TWICE}
grpo group=3 steps=1 loss=gspo aggregation=token {TIGHT}
grpo group=3 steps=3 max_grad_norm=0.01 weight_decay=0.1 betas=(0.8, 0.95)
grpo group=3 steps=1 loss=clip aggregation=sequence {TIGHT}
ppo group=1 steps=2 overlong_buffer=8 temperature=1.4 kl_reward_coef=0.3
ppo group=1 steps=1 aggregation=sequence entropy_coef=0.2 temperature=0.7 {TIGHT}
ppo group=1 steps=2
ppo group=1 steps=3 kl_reward_coef=0.3 kl_target=0.01 kl_horizon=20
ppo group=2 steps=2 gamma=0.9 lam=0.8
ppo group=1 steps=1 gamma=0.95 lam=1.0 kl_reward_coef=0.2 {TWICE}
ppo group=1 steps=2 lam=0.0 value_clip=None
ppo group=1 steps=1 value_clip=0.02 epochs=3 clip_low=0.03 clip_high=0.05
ppo group=1 steps=1 dual_clip=1.1 epochs=3
ppo group=1 steps=1 minibatches=30
ppo group=1 steps=1 aggregation=prompt entropy_coef=0.2 temperature=0.7 {TIGHT}
ppo group=1 steps=2 engine_correction=sequence_truncate entropy_coef=0.2 {BOUNDS}
ppo group=1 steps=2 critic_warmup_steps=1
ppo group=1 steps=2 engine_correction=mask entropy_coef=0.2 {BOUNDS}
ppo group=2 steps=2 engine_correction=sequence_mask {BOUNDS}
grpo group=3 steps=1 engine_correction=sequence_mean correction_high=1.02 {TWICE}
""".strip().splitlines()
SETTINGS = [Setting(words) for words in NAMED]
OFTEN = {"minibatches": (1, 2), "epochs": (1, 2), "temperature": (1.0, 0.7)}
SAMPLED = OFTEN | {
    "aggregation": ("token", "sequence", "constant", "prompt"), "dual_clip": (None, 1.1),
    "clip_high": (0.05, 0.2), "correction_low": (0.7,), "correction_high": (1.2,),
    "engine_correction": ("none", "truncate", "mask", "sequence_truncate", "sequence_mask",
                          "sequence_mean")}
REWARDED = SAMPLED | {"kl_reward_coef": (0.0, 0.2), "entropy_coef": (0.0, 0.2),
                      "overlong_buffer": (0, 8), "max_grad_norm": (1.0, 0.0)}
FILES = {kind: [f"variants/{name}.py:{name}" for name in names.split()] for kind, names in {
    "loss": "sapo gmpo dppo ipo opsm clip_cov", "advantage": "lite_ppo maxrl gdpo"}.items()}
CHOICES = {
    "grpo": REWARDED | {
        "loss": (*losses.LOSSES, *FILES["loss"]),
        "advantage": (*flags.NAMES["advantage"], *FILES["advantage"]),
        "kl_loss_coef": (0.0, 0.3), "kl_estimator": ("k1", "k2", "k3", "k3_ratio"),
        "overlong_filter": (False, True), "reward": (("exact", "short:0.5"),)},
    "ppo": REWARDED | {"gamma": (1.0, 0.9), "lam": (0.95, 0.0), "value_clip": (0.2, None)}}


def arguments(setting: Setting, number: int):
    """Args of the setting's script, whose budgets depend on the setting's number."""
    budget, other = BUDGETS[number % 2], BUDGETS[number // 2 % 3]
    options = dict(group=setting.group, max_tokens=COMPLETION, max_prompt_tokens=PROMPT,
                   minibatches=1, lr=0.01, update_tokens=budget, score_tokens=other,
                   dtype="float64")
    if setting.script == "ppo":
        options |= dict(critic_lr=0.02, critic_update_tokens=other, critic_score_tokens=budget)
    return changed(setting.scripts[setting.script].Args(), **options | setting.flags)


def drawn(script: str, choices: dict, kind=Setting, group: int = 2) -> list[Setting]:
    """Settings of a kind at random, until 300 draws in a row have no new pair of values."""
    rng, seen, found, in_vain = random.Random(0), set(), [], 0
    while in_vain < 300:
        flags = {name: rng.choice(values) for name, values in choices.items()}
        pairs = set(itertools.combinations(flags.items(), 2))
        words = " ".join(f"{name}={value}" for name, value in flags.items())
        setting = kind(f"{script} group={group} steps=1 {words}")
        in_vain += 1
        if pairs - seen and not plan.problems(arguments(setting, 0), 1):
            seen, found, in_vain = seen | pairs, [*found, setting], 0
    return found


# ---- what is learnt from ----


def hostile(group: int, seed: int, binary: bool = False) -> list[Sample]:
    """Groups that a mistake may confuse; the rows are in request order.

    0 and 5 have one prompt, 3 and 4 too. 1 has equal rewards, 2 one scored completion, 5 none in
    its first half. Some completions have one token, some are truncated, some have replies.
    binary: rewards are 0 and 1.
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
            if binary:
                reward = float(reward > 0.6)
            if (p == 2 and g > 0) or (p == 5 and g < group // 2) or (group == 1 and p % 5 == 4):
                reward = None
            short = None if reward is None else round(length * reward, 2) % 1  # of GDPO alone
            logprobs = np.log(1 / VOCAB) + 0.7 * rng.standard_normal(length)
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            done = Completion(ids, (logprobs * sampled).astype(np.float32), truncated, sampled)
            samples.append(Sample(
                data.Prompt(p, row), done, "text",
                rewards.Score(reward, {"exact": reward, "short": short}, None)))
    return samples
