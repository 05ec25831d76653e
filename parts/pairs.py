"""pairs.py: which parts do not go together, and why: they know nothing of each other."""

TEXT = "is for models that read text alone, and --model sees pictures."
PAIRS = {  # of flags, and of kinds of models (family.Shape)
    ("train_vision", "lora_rank"):
        "--train_vision trains all weights of the tower, and --lora_rank trains adapters alone: "
        "give one of them.",
    ("freeze_router", "lora_rank"):
        "--freeze_router is for routers that are trained, and with --lora_rank they are not: give "
        "one of them.",
    ("replay_routing", "reply"):
        "--replay_routing is for one turn: of a reply's tokens no experts are known.",
    ("replay_routing", "carry"):
        "--replay_routing is for completions of one round, and --carry goes on with them: give one "
        "of them.",
    ("replay_routing", "teacher_prompt"):
        "--replay_routing has no experts for the prompts of --teacher_prompt.",
    ("pictures", "carry"): f"--carry {TEXT}",
    ("pictures", "reply"): f"--reply {TEXT}",
    ("pictures", "teacher_prompt"): f"--teacher_prompt {TEXT}"}


def broken(flags: dict[str, object], kind: str) -> list[str]:
    """A sentence for each pair. flags: their values by name. kind: of the model; "": not known."""
    there = {kind, *(name for name, value in flags.items() if value)}
    return [why for pair, why in PAIRS.items() if {*pair} <= there]
