"""./run.sh gpu: what hangs is killed, and each check sees the fault that it is there for. Its runs
are made up, as they are on two GPUs and on a CPU; the slow test makes the real ones."""
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import torch

import fakes
import rollout
from examples import tiny
from faults import progress
from memory import GIB
from ranks import script
from tools import first_hour, watched
from tools.first_hour import CHECKS, Hour, Ran, Wrong, attempt
from tracked import ROOT

V2 = "vllm.v1.worker.gpu.model_runner"
GPU = {"name": "NVIDIA A GPU", "gib": 80.0, "used": 0.5, "capability": "9.0"}
FACTS = {"gpus": [], "driver": "", "cuda": None, "cores": 2, "gib": 24.0, "compiler": "works",
         "torchvision": False, "hidden": False, "versions": {"torch": ("2.13.0+cpu", "2.13.0")}}
ON_GPUS = FACTS | {"gpus": [GPU, GPU], "driver": "580.95", "cuda": "13.0"}
COMPARED = ("compared this qwen2 before its first step, in nats a token: trainer and transformers "
            "2e-07, engine and trainer 0.005 (limit 0.008)\n")


class Made(Hour):
    """An hour whose scripts write what they write where all is right, with the faults {name of a
    run: {what: a value}}. removed: parts; the others are there."""
    faults: dict = {}
    removed: tuple = ()

    def needs_part(self, name):
        if name in self.removed:
            super().needs_part("none")

    def start(self, name, words, ranks=0, until=None):
        self.last = self.logs / f"{name}.txt"
        self.last.parent.mkdir(parents=True, exist_ok=True)
        self.last.write_text(f"the words of {name}\n")
        found = self.faults.get(name, {})
        if "status" in found:
            raise Wrong(f"{name}: exit status {found['status']}")
        if "--name" not in words:
            return ""
        words = [str(word) for word in words]
        folder = self.logs.with_name(words[words.index("--name") + 1])
        given = [*words, "--steps", "8"] if name == "resumed" else words
        steps = int([b for a, b in zip(given, given[1:], strict=False) if a == "--steps"][-1])
        self.write(folder, 3 if until else steps, found)
        done = "" if until and "over" not in found else (folder / "done.json").write_text("{}")
        return found.get("text", COMPARED + (
            f"resumed from {folder}/checkpoints/step_2\n{done}"
            "  worst case: the largest micro-batch of each phase fits; peaks update 1.49 GiB, "
            "score 0.30 GiB\nreward, first 3 and last 10 of 35 steps: 0.111 -> 0.968\n"))

    def write(self, folder: Path, steps: int, found: dict) -> None:
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, "grad/norm": 0.3, "grad/norm_not_finite": 0, "batch/dropped": 0,
                 first_hour.GAP: 0.004, "rollout/logprob_gap_max": 0.1, "loss/value": 0.1,
                 "batch/groups_equal": 0.5, "data/position": 64 * step, "time/step": 1.0,
                 "time/rollout": 0.5, "time/sync": 0.1, "time/update": 0.2, "lr": 1e-3,
                 "memory/peak_gb": 1.0, "rollout/completions": 10} for step in range(1, steps + 1)]
        for name, value in found.get("row", {}).items():
            rows[-1][name] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in range(1, steps + 1):
            (folder / f"samples/step_{step:05d}.jsonl").write_text("".join(json.dumps(
                {"prompt": found.get("prompt", "a"),
                 "completion": f"other {i}" if i < found.get("other", 0) else f"same {i}"}) + "\n"
                for i in range(10)))
        gib = {"before": 2.0, "awake": 42.0, "asleep": 2.8, "rollout": 43.0} | found.get("gib", {})
        (folder / "watched.json").write_text(json.dumps({
            "runner": V2, "kernels": "FLASH_ATTN", "trainer": ["varlen"], "ranks": 2,
            "gib": gib, "seconds": {"sleep": [0.1, 0.1], "load": [0.1, 0.2]},
            "plan": {"rollout": 45.0, "training": 4.0, "asleep": 1.0, "set aside": 2.0}}
            | found.get("watched", {})))


def hour(tmp_path, facts: dict, faults: dict) -> Made:
    made = Made(5.0, facts=facts, logs=tmp_path / "first-hour")
    made.faults = faults
    return made


def states(made: Hour, *names: str) -> dict[str, str]:
    return {name: attempt(made, name).state for name in names or CHECKS}


def test_where_all_is_right_every_check_is_ok_or_says_what_it_needs(tmp_path):
    assert states(hour(tmp_path / "gpus", ON_GPUS, {})) == dict.fromkeys(CHECKS, "ok")
    assert states(hour(tmp_path / "cpu", FACTS, {})) == dict.fromkeys(CHECKS, "ok") | dict.fromkeys(
        ("sleep", "memory", "offload", "cpu-offload", "float32"), "skipped")
    alone = hour(tmp_path / "one", ON_GPUS | {"gpus": [GPU]}, {})
    assert states(alone, "all-ranks", "tp") == {"all-ranks": "skipped", "tp": "skipped"}


LEFT = {"row": {first_hour.GAP: 1.2}}  # the engine has the weights of the step before


@pytest.mark.parametrize("name, facts, faults, said", [
    ("machine", {"driver": "570.1"}, {}, "driver 570.1"),
    ("machine", {"gpus": [GPU, GPU | {"used": 9.0}]}, {}, "9.0 GiB of GPU 1"),
    ("machine", {"gpus": []}, {}, "torch sees none"),
    ("machine", {"gpus": [GPU | {"capability": "7.5"}]}, {}, "capability 7.5"),
    ("machine", {"compiler": "no Python.h"}, {}, "no Python.h"),
    ("machine", {"versions": {"vllm": ("0.26.0", "0.32.0")}}, {}, "vllm 0.26.0 is not 0.32.0"),
    ("machine", {"failed": "killed after 5 s"}, {}, "killed after 5 s"),
    ("engine", {}, {"engine": {"watched": {"runner": "vllm.v1.worker.gpu_model_runner"}}},
     "V1 runner"),
    ("engine", {}, {"engine": {"watched": {"trainer": ["blocks", "varlen"]}}}, "blocks varlen"),
    ("engine", {}, {"engine": {"text": ""}}, "did not print the comparison"),
    ("engine", {}, {"engine": {"status": 1}}, "exit status 1"),
    ("engine", {}, {"engine": LEFT}, "1.2 nats a token apart in step 4"),
    ("engine", {}, {"engine": {"row": {"grad/norm": None}}}, "gradient norm None"),
    ("engine", {}, {"engine": {"row": {"batch/dropped": 2}}}, "2 dropped"),
    ("one", {}, {"one": {"status": 1}}, "exit status 1"),
    ("all-ranks", {}, {"all": {"prompt": "b"}}, "other prompts"),
    ("all-ranks", {}, {"all": {"other": 6}}, "40.0% of the completions"),
    ("all-ranks", {"gpus": []}, {"all": {"other": 1}}, "90.0% of the completions"),
    ("seconds", {}, {"one": {"row": {"time/sync": 99.0}}}, None),  # once: the median stays
    ("sleep", {}, {"base": {"gib": {"asleep": 12.0}}}, "keeps 10.00 of 40.0 GiB"),
    ("memory", {}, {"base": {"gib": {"rollout": 47.0}}}, "rollout 47.00 GiB (plan 45.00)"),
    ("memory", {}, {"base": {"row": {"memory/peak_gb": 4.2}}}, "training 4.20 GiB (plan 4.00)"),
    ("resume", {}, {"resumed": {"row": {"data/position": 0}}}, "step 8 has other data/position"),
    ("resume", {"gpus": []}, {"resumed": {"row": {"grad/norm": 0.31}}}, "other grad/norm"),
    ("resume", {}, {"resumed": {"other": 6}}, "40.0% of the completions"),
    ("resume", {}, {"resumed": {"text": COMPARED}}, "did not resume"),
    ("resume", {}, {"killed": {"over": True}}, "over before it was killed"),
    ("offload", {}, {"offload": {"other": 6}}, "40.0%"), ("offload", {}, {"offload": LEFT}, "1.2"),
    ("cpu-offload", {}, {"cpu-offload": {"other": 6}}, "40.0%"),
    ("activations", {}, {"activations": {"other": 6}}, "40.0%"),
    ("activations", {}, {"activations": {"row": {"memory/peak_gb": 1.2}}}, "1.00 -> 1.20 GiB"),
    ("head", {}, {"head-float32": {"row": {first_hour.GAP: 0.006}}}, "gap 0.0040 -> 0.0045"),
    ("float32", {}, {"float32": LEFT}, "1.2"), ("tp", {}, {"tp": LEFT}, "1.2"),
    ("ppo", {}, {"ppo": {"row": {"loss/value": None}}}, "None"),
    ("trial", {}, {"trial": {"text": COMPARED + "worst case: peaks update 4.2 GiB"}},
     "update 4.2 GiB; the plan has 4.00"),
    ("trial", {}, {"trial": {"text": COMPARED}}, "no peaks"),
    ("lora", {}, {"lora-merged": LEFT}, "1.2"),
    ("pictures", {"torchvision": True}, {"qwen2_5_vl-host": {"status": 1}}, "exit status 1"),
    ("experts", {}, {"experts": LEFT}, "1.2")])
def test_a_check_sees_its_fault(tmp_path, name, facts, faults, said):
    line = attempt(hour(tmp_path, ON_GPUS | facts, faults), name)
    assert (line.state, said or "") == ("WRONG" if said else "ok", said or "") and (
        (said or "") in line.said), line


def test_gradients_of_equal_completions_must_be_equal(tmp_path):
    made = hour(tmp_path, ON_GPUS, {})
    runs = [made.run(name, "--steps 3") for name in ("a", "b")]
    runs[1].steps[0]["grad/norm"] = 0.31
    with pytest.raises(Wrong, match="norms 0.3 and 0.31"):
        first_hour.alike(*runs, bfloat16=True)


def test_a_removed_part_is_skipped_and_so_is_what_needs_a_run_that_failed(tmp_path):
    made = hour(tmp_path, ON_GPUS, {"base": {"status": 1}})
    assert states(made, "sleep", "memory", "cpu-offload") == {
        "sleep": "WRONG", "memory": "skipped", "cpu-offload": "skipped"}
    made.removed = of_parts = "trial", "lora", "pictures", "experts"
    assert [attempt(made, name).said for name in of_parts] == ["parts/none is removed"] * 4


HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("still here", flush=True)
time.sleep(600)
"""


def test_what_hangs_is_killed_with_all_that_it_started_and_the_others_go_on(
        tmp_path, monkeypatch, capsys):
    """The job itself, of planted checks: exit status 1, and a page with the last lines."""
    def hangs(hour):
        hour.start("hangs", ["-c", HANGS])

    def fails(hour):
        hour.start("fails", ["-c", "raise SystemExit('error: the rule. Would work: this.')"])

    def prints(hour):
        hour.start("prints", ["-c", "print('CUDA Error: invalid argument at cumem_allocator')"])

    def fine(hour):
        return hour.start("fine", ["-c", "print(6 * 7)"])

    planted = {f.__name__: (f, "42") for f in (hangs, fails, prints, fine)}
    monkeypatch.setattr(first_hour, "CHECKS", planted)
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    monkeypatch.setattr(Hour, "logs", tmp_path / "runs/first-hour")
    monkeypatch.setattr(first_hour, "examine", lambda hour: FACTS)
    monkeypatch.setattr(sys, "argv", ["first_hour.py"])
    monkeypatch.setattr(Hour, "__init__", lambda self, limit, dtype: vars(self).update(
        limit=2.0, dtype=dtype, runs={}, last=None))
    assert first_hour.main([]) == 1
    said, page = capsys.readouterr().out, (tmp_path / "runs/gpu-report.txt").read_text()
    assert "1 ok, 3 WRONG, 0 skipped" in said and "# First hour: 1 ok, 3 WRONG" in page
    assert "killed after 2 s (--limit); its last line: still here" in said
    assert "error: the rule. Would work: this." in said and "CUDA Error: invalid" in said
    assert "fine         ok" in said and "## hangs: the end of hangs.txt" in page
    assert not [p for p in psutil.process_iter(["cmdline"])
                if "time.sleep(600)" in " ".join(p.info["cmdline"] or [])]


def test_what_a_watched_run_writes_is_what_the_checks_read(tmp_path):
    (tmp_path / "runs").mkdir()
    model = Path(tiny.ensure(str(ROOT / "runs")))
    (tmp_path / "runs" / model.name).symlink_to(model)
    done = script(ROOT / "tools/watched.py", "grpo.py", "--name", "x", "--batch", 4,
                  *first_hour.SHORT.split(), cwd=tmp_path)
    run = Ran(tmp_path / "runs/x", done.stdout)
    assert run.watched["runner"].endswith("cpu_model_runner")
    assert run.watched["kernels"] == "CPU_ATTN" and run.watched["trainer"] == ["blocks"]
    assert len(run.watched["seconds"]["load"]) == 5 and progress(run.folder) == len(run.steps) == 4
    assert run.watched["plan"].keys() == {"rollout", "training", "asleep", "set aside"}
    assert run.compared[1] == 0.001 and first_hour.steady(run).startswith("gap ")
    assert first_hour.alike(run, run, bfloat16=False).startswith("100.0%")


def test_a_watched_engine_on_a_gpu_notes_what_it_takes_keeps_and_needs_at_its_peak(monkeypatch):
    """Of 80 GiB 2 are in use before there is an engine, which takes 40 and keeps 1 asleep. After
    the first step the trainer has 3 for its moments; a rollout needs 4 more at its peak."""
    card = {"before": 2.0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: card.pop("cache", None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (
        int((80 - sum(card.values())) * GIB), 80 * GIB))
    monkeypatch.setattr(rollout.Engine, "load", lambda self, policy: card.update(engine=40))
    monkeypatch.setattr(rollout.Engine, "make_room", lambda self: torch.cuda.empty_cache())
    monkeypatch.setattr(rollout.Engine, "sleep", lambda self: card.update(engine=1))
    engine = object.__new__(watched.Watched)
    vars(engine).update(vars(fakes.engine_of()), on_gpu=True, world=fakes.World(device="cuda"),
                        gib={"before": watched.in_use(torch.device("cuda"))},
                        seconds=defaultdict(list))
    engine.load(None)
    engine.sleep()
    for cached in 1, 4, 2:
        with engine.generating(None):
            card["cache"] = cached
        card["moments"] = 3
    assert engine.gib == {"before": 2, "awake": 42, "asleep": 3, "rollout": 49}
    assert {name: len(times) for name, times in engine.seconds.items()} == {"load": 4, "sleep": 4}


@pytest.mark.slow
def test_the_job_is_right_on_a_cpu():
    """Seven minutes on two cores, with the real interpreter."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_EXEC"}
    done = subprocess.run([sys.executable, ROOT / "tools/first_hour.py"], capture_output=True,
                          text=True, env=environ)
    assert done.returncode == 0, done.stdout
