"""The settings of test_update.py.

A setting is a line of words: a script, what it learns from, and flags. Most settings are drawn, so
that few of them hold each pair of values.
"""
import ast
import itertools
import random
import re

import learning
import plan
import reference
from batch import Sample
from fakes import SCRIPTS
from learning import LONGEST, PROMPT, VOCAB  # noqa: F401


def literal(text: str):
    """A number, a tuple, None, a bool, or else the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class Setting:
    """A script, its flags, and what it learns from, of words: "ppo group=1 steps=2 lam=0.5".

    These words are no flags: group, completions of a prompt; steps, calls of `learn`; prompts, how
    many; rewards, a kind of
    learning.fabricate; lm, a folder of models; ranks. Tests of parts extend it.
    """
    scripts = SCRIPTS
    before = "start"  # the folder of the reference model, of reference.py
    teaches = False  # whether the reference model is another one's files

    def __init__(self, words: str):
        self.group, self.steps, self.ranks = 2, 1, 1
        self.prompts, self.rewards, self.lm = None, "mixed", ""
        self.words, self.script, self.flags = words, words.split()[0], {}
        for name, text in re.findall(r"(\w+)=(.*?)(?= \w+=|$)", words):
            (vars(self) if name in vars(self) else self.flags)[name] = literal(text)

    def folder(self, name: str) -> str:
        """policy or start → its folder."""
        return self.lm + name

    def samples(self, step: int) -> list[Sample]:
        """What a step learns from."""
        prompts = (6 if self.group > 1 else 14) if self.prompts is None else self.prompts
        return learning.fabricate(self.rewards, prompts, self.group, step)

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
                             args.critic_lr, kl_coef)


TWICE = "minibatches=2 epochs=2"
TIGHT = f"clip_low=0.03 clip_high=0.05 {TWICE}"
BOUNDS = "correction_low=0.7 correction_high=1.2"
# Five settings in which popular frameworks crash, floor, drop or mis-scale: test_reference.py.
REPORTED = """
grpo prompts=2 group=4 ranks=4 batch=2
grpo prompts=1 group=8 ranks=3 batch=1
grpo prompts=1 group=8 ranks=3 batch=1 minibatches=3
grpo prompts=16 group=4 ranks=2 minibatches=2 kl_loss_coef=0.1 update_tokens=50 logprob_tokens=170
grpo prompts=16 group=4 ranks=2 minibatches=2 kl_loss_coef=0.1 update_tokens=170 logprob_tokens=50
grpo prompts=7 group=4 ranks=6 batch=7 minibatches=2 epochs=2
""".strip().splitlines()
# What a draw of flags does not reach: rows that do not learn on all ranks or in a whole minibatch
# (momentum and decay go on), no row at all; copies of the weights.
NAMED = f"""
grpo group=3 ranks=3 rewards=equal minibatches=2 weight_decay=0.5
grpo group=2 ranks=3 rewards=unscored minibatches=3
grpo prompts=0 ranks=2 minibatches=2
grpo group=3 ranks=5 steps=2 minibatches=6 epochs=2 weight_decay=0.5
grpo group=3 ranks=4 shard_size=2 lm=untied/ kl_loss_coef=0.2 {TWICE}
grpo group=5 ranks=2 steps=2 rewards=binary advantage=variants/pass_at_k.py:pass_at_k
grpo group=4 loss=tests/often.py:clip_cov engine_correction=truncate {TIGHT}
grpo group=3 loss=tests/often.py:geometric entropy_coef=0.2 {TIGHT}
grpo group=3 minibatches=30
grpo group=1 ranks=2 advantage=reinforce++ kl_reward_coef=0.2
ppo group=1 ranks=2 minibatches=30
ppo group=1 ranks=3 steps=2 critic_warmup_steps=1
ppo group=1 ranks=4 shard_size=2 lm=untied/ value_clip=0.02 epochs=3 {TIGHT}
""".strip().splitlines()



def choices(text: str) -> dict[str, tuple]:
    """A line for each flag: its name, and the values that are drawn."""
    lines = map(str.split, text.strip().splitlines())
    return {name: tuple(map(literal, values)) for name, *values in lines}


OFTEN = choices("""
minibatches 1 2
epochs 1 2
temperature 1.0 0.7""")
SAMPLED = OFTEN | choices("""
aggregation token sequence constant prompt
clip_low 0.01 0.2
clip_high 0.02 0.2
dual_clip None 1.1
engine_correction none truncate mask sequence_truncate sequence_mask sequence_mean
correction_low 0.7
correction_high 1.02 1.2""")
REWARDED = SAMPLED | choices("""
steps 1 2
kl_reward_coef 0.0 0.2
entropy_coef 0.0 0.2
overlong_buffer 0 8
max_grad_norm 1.0 0.0 0.01
weight_decay 0.0 0.1
betas (0.9,0.999) (0.8,0.95)""")
CHOICES = {"grpo": REWARDED | choices("""
group 2 3
kl_loss_coef 0.0 0.3
kl_estimator k1 k2 k3 k3_ratio
advantage_eps 1e-6 0.3
overlong_filter False True
reward ('exact','short:0.5')
loss clip gspo cispo reinforce variants/sapo.py:sapo variants/gmpo.py:gmpo variants/dppo.py:dppo \
variants/ipo.py:ipo variants/opsm.py:opsm tests/often.py:clip_cov
advantage dr_grpo grpo rloo reinforce++ reinforce++-baseline variants/lite_ppo.py:lite_ppo \
variants/maxrl.py:maxrl variants/gdpo.py:gdpo"""),
    "ppo": REWARDED | choices("""
group 1 2
gamma 1.0 0.9
lam 0.95 0.0 1.0
value_clip 0.2 None 0.02""")}
BUDGETS = 4096, 100, LONGEST  # everything, a few rows, one longest row
KNOBS = ({}, {"shard_size": 1}, {"checkpointing": True, "cpu_offload": True, "head_chunk": 3,
                                 "offload": ("params", "optimizer", "reference")})


def arguments(setting: Setting, number: int):
    """Args of the setting's script. What changes memory only is drawn by the number, unless the
    setting names it."""
    script, rng = setting.scripts[setting.script], random.Random(number)
    knobs = {name: rng.choice(BUDGETS) for name in plan.budgets(script.Args())} | rng.choice(KNOBS)
    rates = {"lr": 0.01} | ({"critic_lr": 0.02} if setting.script == "ppo" else {})
    return learning.arguments(script, **{
        "group": setting.group, "minibatches": 1, "dtype": "float64"} | rates | knobs
        | setting.flags)


def drawn(script: str, choices: dict, kind=Setting, group: int = 2, count: int = 10**6
          ) -> list[Setting]:
    """At most `count` settings of a kind, each the one with most new pairs of values of 40 drawn
    ones, until eight times no draw has a new pair."""
    rng, seen, found, in_vain = random.Random(0), set(), [], 0
    while len(found) < count and in_vain < 8:
        draws = [{"group": group} | {name: rng.choice(values) for name, values in choices.items()}
                 for _ in range(40)]
        pairs = [set(itertools.combinations(sorted(one.items()), 2)) - seen for one in draws]
        in_vain += 1
        for number in sorted(range(40), key=lambda k: -len(pairs[k])):
            setting = kind(script + "".join(f" {k}={v}" for k, v in draws[number].items()))
            if pairs[number] and not plan.problems(arguments(setting, 0), 1):
                seen, found, in_vain = seen | pairs[number], [*found, setting], 0
                break
    return found
