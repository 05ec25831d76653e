"""pairs.py: which parts do not go together: the one place where two parts know of each other."""

TEXT = "is for models that read text alone, and --model sees pictures."
WHOLE = "needs whole completions, and --carry stops them between rounds: give one of them."
PAIRS = {  # (flag, flag): why not both
    ("carry", "sees"): TEXT,
    ("reply", "sees"): "is for models that read text alone: --model sees pictures, and answers in "
                       "one turn.",
    ("teacher_prompt", "sees"): TEXT,
    ("reply", "carry"): WHOLE,
    ("stop", "carry"): WHOLE,
    ("replay_routing", "reply"): "is for one turn: of a reply's tokens no experts are known.",
    ("replay_routing", "carry"): "is for completions of one round, and --carry goes on with them: "
                                 "give one of them.",
    ("replay_routing", "teacher_prompt"): "has no experts for the prompts of --teacher_prompt.",
    ("freeze_router", "lora_rank"): "is for routers that are trained, and with --lora_rank they "
                                    "are not: give one of them.",
    ("train_vision", "lora_rank"): "trains all weights of the tower, and --lora_rank trains "
                                   "adapters alone: give one of them.",
}


def problems(flags: dict, shape) -> list[str]:
    """A sentence for each pair that is on. flags: by name. shape: plan.Shape, if known."""
    on = {name for name, value in flags.items() if value}
    if shape and shape.kind == "pictures":
        on.add("sees")
    return [f"--{flag} {why}" for (flag, other), why in PAIRS.items() if {flag, other} <= on]
