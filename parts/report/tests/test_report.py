"""The page of a run: its data, what has no room, and that it opens in a real browser."""
import base64
import gzip
import json
import random
import re
import resource
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fakes
import log
from fakes import write_run
from metrics import METRICS
from part import asked
from parts.report import healthy, plug, report

HOSTILE = ["</script><script>document.title = 'bad'</script>", "<img src=x onerror=alert(1)>",
           "\0\x1b[31m\x7f\x85\u2028\u202eabc\ud83d\ufeff", "y" * 100_000, "<!--<script>", ""]


def unpacked(page: Path) -> tuple[dict, list]:
    """The data of a page: its head, its blocks; None for one that is left out."""
    def data(text: str):
        return json.loads(gzip.decompress(base64.b64decode(text)))

    found = json.loads(re.search('<script id="data"[^>]*>(.*?)</script>', page.read_text())[1])
    return data(found["head"]), [data(x) if x else None for x in found["blocks"]]


def made_up(position: int, /, *texts: str, **more) -> dict:
    """A line of samples/ with these tokens, of which the second one was put in."""
    n, rng = len(texts), random.Random(position)
    return {"position": position, "prompt": f"prompt {position}", "completion": "".join(texts),
            "turns": [{"role": "assistant", "content": "".join(texts)}], "answer": "a",
            "reward": rng.random(), "rewards": {"exact": 1.0}, "advantage": rng.gauss(0, 1),
            "tokens": n, "truncated": False, "token_texts": [*texts],
            "sampled": [i != 1 for i in range(n)], "advantages": [rng.gauss(0, 1)] * n,
            "engine_logprobs": [-rng.random() for _ in range(n)]} | more


def run_of(folder: Path, steps: int, rows, **args) -> Path:
    """A run with rows in samples/, an evaluation, and a large gap in step 2. Its rewards are those
    of its seed."""
    first = args.get("seed", 0)
    metrics = [{"step": step, "reward/mean": (first + step) / 9, "rollout/logprob_gap_mean": 9.0 * (
        step == 2)} for step in range(steps)]
    metrics.append({"step": steps - 1, "eval/rows": 9, "eval/pass@1": 0.5})
    samples = {f"step_{step:05d}": rows for step in range(steps)}
    return write_run(folder, metrics, samples, **{"steps": steps, "lr": 1e-6} | args)


def write_page(*runs: Path, **limits) -> Path:
    path = runs[0] / "report.html"
    path.write_text(report.page([*runs], path.parent, **limits))
    return path


def checked(head: dict, blocks: list, folder: Path) -> None:
    """Numbers of the tokens are those of samples/, 0 where a token was not sampled."""
    steps = [(info, block) for info, block in zip(head["blocks"], blocks, strict=True)
             if info["kind"] == "step"]
    for info, block in steps:
        rows = [json.loads(line) for line in open(
            folder / f"samples/step_{info['step']:05d}.jsonl")]
        assert [row["reward"] for row in block["rows"]] == [row["reward"] for row in rows]
        tokens, sampled = block["tokens"], np.concatenate([row["sampled"] for row in rows])
        assert [tokens["vocab"][i] for i in tokens["ids"]] == sum(
            (row["token_texts"] for row in rows), [])
        learns = [row["advantage"] is not None for row in rows for _ in row["sampled"]]
        assert tokens["bears"] == (sampled & learns).tolist()
        for name, theirs in ("logprob", "engine_logprobs"), ("advantage", "advantages"):
            page, right = tokens["numbers"][name], np.concatenate([row[theirs] for row in rows])
            gap = np.array(page["values"]) * page["unit"] - right * sampled
            assert abs(gap).max() <= page["unit"] <= max(1e-9, abs(right).max() / 1e3)
    assert steps and all(info["lacks"] == "" for info, _ in steps)


def test_a_run_writes_the_page_of_its_samples_and_metrics(real_run, tmp_path):
    """A real run; and a made-up one with tokens that were put in or bear no loss."""
    rows, _ = real_run("grpo.py", "--batch 4 --group 3 --seed 7 --steps 2 --eval_data tiny@test "
                       "--max_tokens 24 --max_prompt_tokens 64 --no-export")
    folder = tmp_path / "runs/x"
    head, blocks = unpacked(folder / "report.html")
    checked(head, blocks, folder)
    run = head["runs"][0]
    assert run["done"] and ["--batch", "4", "64"] in run["flags"]
    for name in "reward/mean", "eval/pass@1":
        assert [x for x in run["curves"][name] if x is not None] == [
            row[name] for row in rows if name in row] != []
    assert {info["kind"] for info in head["blocks"]} == {"step", "evaluation"}
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    rows = [made_up(0, *"abcd"), made_up(1, *"ef", advantage=None)]
    checked(*unpacked(write_page(folder := run_of(tmp_path / "b", 3, rows))), folder)


def test_a_full_disk_leaves_no_half_of_the_curve(tmp_path, capsys):
    """It costs a line, and the run ends well."""
    folder = run_of(tmp_path / "x", 2, [made_up(0, "a")])
    it = log.Log(folder, fakes.World(), 2)
    it.rows = [{"step": 1, "reward/mean": 0.5}]
    run = SimpleNamespace(log=it, args=fakes.args(report=False))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        plug.end(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert "curve.png is not written: NotWritten: " in capsys.readouterr().out
    assert not (folder / "curve.png").exists()
    plug.end(run)
    assert (folder / "curve.png").exists()


def test_what_has_no_room_is_named(tmp_path, monkeypatch):
    """Bytes of the page, and bytes to read: the first file, the last and the middle stay. The end
    of a run reads no more than it may."""
    rows = [made_up(i, *random.Random(i).choices("abcdefgh", k=16)) for i in range(64)]
    large = run_of(tmp_path / "a", 24, rows)
    monkeypatch.setattr(report, "PAGE", 260_000)
    page = write_page(large)
    head, blocks = unpacked(page)
    lacks = [b["lacks"] for b in head["blocks"]]
    assert page.stat().st_size < 260_000 and len(lacks) == 24
    assert lacks[0] == lacks[-1] == "" and {*lacks} == {"", "tokens"}
    assert [bool(block["tokens"]) for block in blocks] == [not lack for lack in lacks]
    size = (large / "samples/step_00000.jsonl").stat().st_size
    head, blocks = unpacked(write_page(large, most_read=int(3.5 * size)))
    kept = [i for i, block in enumerate(blocks) if block]
    assert len(kept) == 3 and kept[0] == 0 and kept[-1] == 23
    assert [b["lacks"] == "completions" for b in head["blocks"]] == [not b for b in blocks]
    read = []
    monkeypatch.setattr(report, "page", lambda *given, most_read: read.append(most_read) or "")
    log = SimpleNamespace(writing=True, folder=tmp_path, rows=[],
                          decoration=lambda what: nullcontext())
    plug.end(SimpleNamespace(args=fakes.args(), log=log))
    assert read == [report.AT_THE_END] and (tmp_path / "report.html").exists()


def test_a_run_that_goes_on_has_a_page_with_the_ranges_of_defined_metrics(tmp_path, monkeypatch):
    folder = run_of(tmp_path / "a", 3, [made_up(0, "a", "b")])
    for number in "99999", "100000":
        (folder / f"samples/eval_{number}.jsonl").write_text("")
    assert [step for *_, kind, step, _ in report.sample_files([folder])
            if kind == "evaluation"] == [99_999, 100_000]  # by number
    for file in "metrics.jsonl", "samples/step_00001.jsonl":
        with open(folder / file, "a") as out:
            out.write('{"step": 3, "prom')
    other = tmp_path / "far/page.html"
    other.parent.mkdir()
    monkeypatch.setattr("sys.argv", ["report.py", str(folder), "--out", str(other)])
    report.main()
    head, blocks = unpacked(other)
    assert not head["runs"][0]["done"] and sum(len(b["rows"]) for b in blocks) == 3
    assert (other.parent / head["docs"].partition("#")[0]).resolve().is_file()
    defined = {name for table in [*METRICS.values(), *asked("METRICS").values()] for name in table}
    assert head["healthy"]["rollout/logprob_gap_mean"]["high"] > 0 and all(
        name in defined and one["means"] and one["try"] for name, one in head["healthy"].items())


def test_a_run_is_warned_of_although_every_metric_is_in_its_range():
    """A reward that rises without pass@1, and one text for most rows; not of a run that learns, of
    one that was right from the start, or of few possible answers."""
    rewards, stds = [0.1, 0.2, 0.2, 0.5, None, 0.7, 0.7], [0.3] * 6 + [None]

    def warned(passed, high, rows=(), reward=rewards):
        return healthy.warnings({"reward/mean": reward, "reward/std": stds, "eval/pass@1": passed,
                                 "eval/pass@1_high": high}, [*rows])

    flat, = warned([0.0, None, 0.01], [0.02, None, 0.05])
    assert flat.startswith("The reward rose from 0.167 to 0.633, but pass@1 did not: 0.000 before")
    assert not warned([0.0, None, 0.4], [0.02, None, 0.5])
    assert not warned([0.97, None, 0.97], [0.99, None, 0.99])
    assert not warned([0.0, 0.0], [0.02, 0.02], reward=[0.2, 0.1, 0.2, 0.1, 0.2])
    assert not warned([0.0], [0.02]) and not healthy.warnings({}, [])

    def rows(texts, answers):
        return [{"completion": text, "answer": answer}
                for text, answer in zip(texts, answers, strict=True)]

    alike, other = ["010101"] * 10 + [*"abcdefghij"], [*"klmnopqrstuvwxyzabcd"]
    same, = healthy.warnings({}, rows(alike, other))
    assert same.startswith("10 of 20 completions are the same text, '010101'")
    assert healthy.warnings({}, rows(alike, [None] * 20)) == [same]
    assert not healthy.warnings({}, rows(["yes"] * 14 + ["no"] * 6, ["yes", "no"] * 10))
    assert not healthy.warnings({}, rows(other, alike))


def test_it_opens_in_a_browser_and_texts_do_nothing(tmp_path):
    """No error, nothing asked for, hostile texts as they are, bands over seeds, filters."""
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    path = next(filter(None, map(shutil.which, names)), None)
    if not path:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    driver = pytest.importorskip("playwright.sync_api")
    rows = [made_up(i, text, prompt=text, answer=text) for i, text in enumerate(HOSTILE)]
    rows += [made_up(9, *"abcdef", truncated=True, turns=[
        {"role": "assistant", "content": "x", "paid": 0.25}, {"role": "user", "content": "again"}])]
    rows += [made_up(i, *"ab", answer=f"{i}") for i in range(10, 20)]
    page = write_page(*(run_of(tmp_path / name, 5, rows, **args) for name, args in (
        ("a-0", {}), ("a-1", {"seed": 1}), ("b", {"lr": 0.1}))))
    with driver.sync_playwright() as play:
        it = play.chromium.launch(executable_path=path, args=["--no-sandbox"]).new_page()
        said, asked = [], []
        for event in "console", "pageerror", "dialog":
            it.on(event, lambda what: said.append(what))
        it.on("request", lambda request: asked.append(request.url))
        it.goto(page.resolve().as_uri())
        it.wait_for_selector("body[data-ready]")
        assert "rollout/logprob_gap_mean at 1 steps, first at 2" in it.text_content("#run")
        assert it.text_content("#at") == "4"  # the last step: its numbers are the result
        assert "completions are the same text, 'ab'" in it.text_content("#run")
        assert "a, 2 seeds" in it.text_content("#legend") and it.locator("polygon").count()
        assert "model, turn 1, reward 0.25" in it.locator(".role").all_text_contents()
        for value, count in ("</script>", 1), ("", 17):
            it.evaluate(f"""(() => {{ const e = document.getElementById('f-search');
                e.value = {value!r}; e.dispatchEvent(new Event('input')); }})()""")
            assert int(it.text_content("#count").split(" ")[0]) == count
        assert not said and asked == [page.resolve().as_uri()] and "bad" not in it.title()
        assert it.locator("img").count() == 0 and it.locator("script").count() == 2
