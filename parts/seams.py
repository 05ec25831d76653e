"""What stands outside the folder of each part: the table that `./run.sh strip` carries out.

PARTS: files that are of a part alone. SEAMS: where the rest names it, in the order in which a run
meets it: (file, what stands there, what stands there without the part). Jobs of run.sh that use a
file that is gone, and what pages say of names that are gone, are found by strip itself.
"""
ROADS = ("results/roads.py", "results/roads.json", "results/roads.md", "docs/pictures/roads.svg")
PARTS = {
    "turns": {"files": [
        "examples/again.py", "examples/doors.py", "examples/frozen_lake.py",
        "examples/gem_games.py", "examples/guess.py", "examples/tools.py",
        "variants/turn_credit.py", "results/environments.py", "results/environments.json",
        "results/environments.md", "results/doors.json", "results/doors-coin.json",
        "results/doors-grpo.json", "results/doors-sharpen.json", "results/game.json",
        "results/game-coin.json", "results/game-coin-slow.json", "results/game-sharpen.json",
        "results/game-sharpen-slow.json", "docs/pictures/game.svg", "docs/pictures/turns.svg"]},
    "judges": {"files": ["examples/judge.py", "examples/reward_model.py"]},
    "lora": {"files": ["results/instructions-lora.json"]},
    "experts": {"files": ["results/sort-experts.json", "results/sort-experts-coin.json",
                          "results/sort-experts-sharpen.json"]},
    "pictures": {"files": ["examples/squares.py", "results/vision.json",
                           "results/vision-qwen2_5_vl.json"]},
    "carry": {"files": ["bench/carry.py"]},
    "sft": {"files": ["sft.py", *ROADS]},
    "distill": {"files": ["distill.py", *ROADS]},
    "report": {"files": ["tools/report.py", "tools/report.html"]},
    "variants": {"folder": "variants"},
    "parts": {"folder": "parts", "files": ["tests/test_strip.py"]},  # the last to go
}
SEAMS = {
    "turns": [],
    "parts": [],
}
