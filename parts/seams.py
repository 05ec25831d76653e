"""What stands outside the folder of each part: the table that `./run.sh strip` carries out.

PARTS: files that are of a part alone, and words that mean nothing without it. SEAMS: where the rest
names it, in the order in which a run meets it: (file, what stands there, what stands there without
the part). Jobs of run.sh that use a file that is gone, their results, and what pages say of names
and words that are gone, are found by strip itself.
"""
ROADS = ("results/roads.*", "docs/pictures/roads.svg")
PARTS = {
    "turns": {"files": [
        "examples/again.py", "examples/doors.py", "examples/frozen_lake.py",
        "examples/gem_games.py", "examples/tools.py",
        "variants/turn_credit.py", "results/environments.*", "docs/pictures/game.svg",
        "docs/pictures/turns.svg"],
        "words": ["reply", "replies", "episode", "episodes"]},
    "judges": {"files": ["examples/judge.py", "examples/reward_model.py"], "words": ["async"]},
    "lora": {"words": ["LoRA"]},
    "experts": {"files": ["examples/tiny_experts.py", "results/sort-experts*.json"],
                "words": ["experts", "mixture", "mixtures"]},
    "states": {},
    "pictures": {"files": ["bench/trl_vision.py", "examples/squares.py"]},
    "carry": {"files": ["bench/carry.py"]},
    "sft": {"files": ["sft.py", *ROADS]},
    "distill": {"files": ["distill.py", *ROADS]},
    "report": {"files": ["tools/report.py"]},
    "trial": {},
    "other_systems": {},
    "variants": {"folder": "variants"},
    "parts": {"folder": "parts", "files": ["tests/test_strip.py"]},  # the last to go
}
SEAMS = {
    "turns": [
        ("flags.py", "from parts.turns.turns import TurnArgs\n", ""),
        ("flags.py", "    turn_args: TurnArgs = field(default_factory=TurnArgs)\n", ""),
        ("sft.py", " + not_default(self.turn_args)", ""),
        ("verifiers.py", '    "environment": "parts.turns.replies:paid", "turns": '
                         '"parts.turns.replies:paid",\n', ""),
    ],
    "judges": [
        ("flags.py", "from parts.judges.pool import JudgeArgs, JudgePool\n", ""),
        ("flags.py", "    judge_args: JudgeArgs = field(default_factory=JudgeArgs)\n", ""),
        ("flags.py", "            return JudgePool(list(self.reward), self.reward_args, "
                     "self.judge_args.reward_retries)\n",
                     '            raise SettingsError(f"--reward {waits[0]} must be a plain `def`: '
                     'nothing here awaits.")\n'),
        ("batch.py", "from parts.judges.pool import retries_of\n", ""),
        ("batch.py", ',\n        "rollout/reward_retries": retries_of(scores)}', "}"),
    ],
    "lora": [
        ("flags.py", "from parts.lora.lora import LoraArgs\n", ""),
        ("flags.py", "    lora_args: LoraArgs = field(default_factory=LoraArgs)\n", ""),
        ("run.py", "from parts.lora import lora\n", ""),
        ("run.py", "    if args.lora_args.lora_rank:\n        logprobs, values, kind = "
                   "lora.kinds(args.lora_args, args.model, source)\n", ""),
        ("ppo.py", "; LoRA: ten times as much.", "."),
        ("tools/float64.py", "from parts.lora import lora\n", ""),
        ("tools/float64.py", "    kind = lora.adapted(kind, adapters) if adapters else kind\n", ""),
        ("tools/prove.py", "from parts.lora import lora\n", ""),
        ("tools/prove.py", "    adapters = args.lora_args if args.lora_args.lora_rank else None\n",
                           "    adapters = None\n"),
        ("tools/prove.py", 'made.pop("reference", None) or lora.Base(made["policy"])',
                           'made.pop("reference")'),
        ("tools/export.py", "from parts.lora import lora\n", ""),
        ("tools/export.py", '''\
    if settings["lora_rank"]:
        flags = lora.LoraArgs(*(settings[name] for name in vars(lora.LoraArgs())))
        kind, _, policy = lora.kinds(flags, settings["model"], source)
''', ""),
    ],
    "experts": [
        ("flags.py", "from parts.experts.experts import ExpertArgs\n", ""),
        ("flags.py", "    expert_args: ExpertArgs = field(default_factory=ExpertArgs)\n", ""),
        ("model_files.py", "from parts.experts.experts import Mixture\n", ""),
        ("model_files.py", "    Mixture,\n", ""),
        ("examples/tiny.py", "from examples.tiny_experts import make_mixture\n", ""),
        ("examples/tiny.py", """\
         # A mixture of experts learns the same.
         "experts": Task(sort_digits, batch=128, skill_steps=70, habit_steps=40, clumsy=0.75),
""", ""),
        ("examples/tiny.py", 'make_mixture(tokenizer) if task == "experts" else make_model',
                             "make_model"),
    ],
    "pictures": [
        ("flags.py", "from parts.pictures.flags import PictureArgs\n", ""),
        ("flags.py", "    picture_args: PictureArgs = field(default_factory=PictureArgs)\n", ""),
        ("model_files.py", "from parts.pictures.seeing import Seeing\n", ""),
        ("model_files.py", "    Seeing,\n", ""),
    ],
    "states": [
        ("model_files.py", "from parts.states.states import Stateful\n", ""),
        ("model_files.py", "    Stateful,\n", ""),
    ],
    "carry": [
        ("grpo.py", "from dataclasses import dataclass, field\n",
                    "from dataclasses import dataclass\n"),
        ("grpo.py", "from parts.carry.carry import CarryArgs\n", ""),
        ("grpo.py", "    carry_args: CarryArgs = field(default_factory=CarryArgs)\n", ""),
        ("ppo.py", "from parts.carry.carry import CarryArgs\n", ""),
        ("ppo.py", "\n    carry_args: CarryArgs = field(default_factory=CarryArgs)\n", ""),
    ],
    "sft": [
        ("data.py", 'ends before it, or sft.py, which learns it.")', 'ends before it.")'),
    ],
    "report": [
        ("flags.py", "from parts.report.args import ReportArgs\n", ""),
        ("flags.py", "    report_args: ReportArgs = field(default_factory=ReportArgs)\n", ""),
        ("log.py", "from parts.report.tokens import token_row\n", ""),
        ("log.py", "    return row | token_row(s, decode)\n", "    return row\n"),
        ("run.py", "        self.args.report_args.write(self.log)\n", ""),
        ("tools/__init__.py", "report.py: a page (parts/report/).\n", ""),
        ("results/speedrun.py", " --no-report", ""),
        ("requirements.txt", "# The tests of report.html, with the browser of the system; without "
                             "one they are skipped.\nplaywright==1.65.2\n", ""),
    ],
    "other_systems": [
        ("flags.py", "from parts.other_systems.other_systems import theirs\n", ""),
        ("flags.py", """\
        found, rest = theirs(words)
        if found:
            mistakes = Mistakes(found)
            mistakes.attempt(parse_words, kind, description, rest, **options)
            mistakes.stop()
""", ""),
        ("docs/use/recipes.md", "`python grpo.py --num_generations 3` says so too. ", ""),
    ],
    "trial": [
        ("flags.py", "from parts.trial.trial import TrialArgs\n", ""),
        ("flags.py", "    trial_args: TrialArgs = field(default_factory=TrialArgs)\n", ""),
        ("run.py", "from parts.trial.trial import try_worst_case\n", ""),
        ("run.py", "        try_worst_case(run)\n", ""),
    ],
    "variants": [
        ("flags.py", ", as in\nvariants/. The file is found from the current folder or from the "
                     "project's, and loaded before\nweights are.\n",
                     ". The\nfile is found from the current folder or from the project's, and "
                     "loaded before weights are.\n"),
        ("flags.py", """\
    if (ROOT / "variants" / f"{spec}.py").is_file():
        works = f"--{flag} variants/{spec}.py:{spec}"
""", ""),
        ("losses.py", " Others are in variants/.\n", "\n"),
        ("grpo.py", "in losses.py and variants/. Shapes", "in losses.py. Shapes"),
        ("grpo.py", ", as variants/lite_ppo.py:lite_ppo; maxrl and gdpo are there too.", "."),
        ("grpo.py", ", as variants/sapo.py:sapo; also gmpo, dppo, ipo, opsm, geometric.", "."),
        ("grpo.py", "which variants/__init__.py describes: (M,).", "for each token: (M,)."),
    ],
    "parts": [
        ("plan.py", "from parts import pairs\n", ""),
        ("plan.py", "    return found + pairs.problems(values, shape)\n", "    return found\n"),
        ("run.sh", """\
# ./run.sh strip NAME …   deletes parts: a folder of parts/ and its seams. --all, --list, --yes
""", ""),
        ("run.sh", '  strip) shift; exec python3 parts/strip.py "$@" ;;\n', ""),
        ("tests/conftest.py", '    "what most runs do not use can be deleted": "strip",\n', ""),
        ("pyproject.toml", 'testpaths = ["tests", "parts"]', 'testpaths = ["tests"]'),
        ("pyproject.toml", 'src = [".", "tests", "parts/*/tests"]', 'src = [".", "tests"]'),
    ],
}
