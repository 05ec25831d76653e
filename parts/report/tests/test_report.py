"""tools/report.py: the page of a run, also in a real browser. (test_page.py has a real run.)"""
import base64
import gzip
import json
import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import fakes
from errors import SettingsError
from fakes import write_run
from parts.report import plug, report
from tracked import ROOT

HOSTILE = ["</script><script>document.title = 'bad'</script>", "<img src=x onerror=alert(1)>",
           "\0\x1b[31m\x7f\x85\u2028\u202eabc\ud83d\ufeff", "y" * 100_000, "<!--<script>", ""]


def unpacked(page: Path) -> tuple[dict, list]:
    """The data of a page: its head, its blocks; None for one that is left out."""
    def data(text: str):
        return json.loads(gzip.decompress(base64.b64decode(text)))

    found = json.loads(re.search('<script id="data"[^>]*>(.*?)</script>', page.read_text())[1])
    return data(found["head"]), [data(x) if x else None for x in found["blocks"]]


def made_up(prompt: int, n: int, rng, text: str | None = None) -> dict:
    """A line of samples/ with n tokens, or with one of this text."""
    texts = [text] if text is not None else [rng.choice("abcdefgh ") * 2 for _ in range(n)]
    n, advantage, whole = len(texts), rng.gauss(0, 1), "".join(texts)
    row = {"position": prompt, "prompt": f"prompt {prompt}", "completion": whole,
           "turns": [{"role": "assistant", "content": whole}], "answer": "a",
           "reward": rng.random(), "rewards": {"exact": 1.0}, "advantage": advantage,
           "tokens": n, "truncated": False, "token_texts": texts, "sampled": [True] * n}
    row["engine_logprobs"] = [round(-rng.expovariate(1), 7) for _ in range(n)]
    row["advantages"] = [round(rng.gauss(0, 1), 7) for _ in range(n)]  # as with a critic
    return row


def run_of(folder: Path, steps: int, rows, samples_every: int = 1, **args) -> Path:
    """A run with rows(step) in samples/, an evaluation, and a large gap in step 2."""
    metrics = [{"step": step, "reward/mean": step / 9, "policy/entropy": 0.5, "time/step": 1.0,
                "rollout/logprob_gap_mean": 9.0 if step == 2 else 1e-6} for step in range(steps)]
    metrics.append({"step": steps - 1, "eval/rows": 9, "eval/pass@1": 0.5,
                    "eval/pass@1_low": 0.25, "eval/pass@1_high": 0.625})
    samples = {f"step_{step:05d}": rows(step) for step in range(0, steps, samples_every)}
    return write_run(folder, metrics, samples, **{"steps": steps, "lr": 1e-6} | args)


def write_page(runs: list[Path], **limits) -> Path:
    path = runs[0] / "report.html"
    path.write_text(report.page(runs, path.parent, **limits))
    return path


# ---- the page

def test_a_large_run_is_under_the_limit_and_what_has_no_room_is_named(tmp_path, monkeypatch):
    """And where only so many bytes may be read: the first file, the last and the middle."""
    large = run_of(tmp_path, 24, lambda step: [
        made_up(i // 8, 16, random.Random(i)) for i in range(64)])
    monkeypatch.setattr(report, "PAGE", 260_000)
    page = write_page([large])
    head, blocks = unpacked(page)
    assert page.stat().st_size < 260_000 and len(head["blocks"]) == 24
    lacks = [b["lacks"] for b in head["blocks"]]
    assert lacks[0] == lacks[-1] == "" and {*lacks} == {"", "tokens"}
    for info, block in zip(head["blocks"], blocks, strict=True):
        assert len(block["rows"]) == 64 and bool(block["tokens"]) == (not info["lacks"])
    size = (large / "samples/step_00000.jsonl").stat().st_size
    head, blocks = unpacked(write_page([large], most_read=int(3.5 * size)))
    kept = [b["step"] for b, block in zip(head["blocks"], blocks, strict=True) if block]
    assert len(kept) == 3 and kept[0] == 0 and kept[-1] == 23
    assert {b["lacks"] for b in head["blocks"] if b["step"] not in kept} == {"completions"}


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    """As text, eval_99999 is the last one."""
    names = [f"eval_{step}" for step in (*range(99_996, 100_000), 100_000)]
    run = write_run(tmp_path / "a", [], dict.fromkeys(names, []))
    assert [step for *_, step, _ in report.sample_files([run])][:2] == [99_996, 100_000]


def test_a_run_that_goes_on_has_a_page_and_one_that_cannot_be_written_is_one_sentence(
        tmp_path, monkeypatch, capsys):
    folder = run_of(tmp_path / "a", 3, lambda step: [made_up(0, 4, random.Random(step))])
    for file in "metrics.jsonl", "samples/step_00001.jsonl":
        with open(folder / file, "a") as out:
            out.write('{"step": 3, "prom')
    monkeypatch.setattr("sys.argv", ["report.py", str(folder)])
    report.main()
    assert "report.html" in capsys.readouterr().out
    head, blocks = unpacked(folder / "report.html")
    assert not head["runs"][0]["done"] and [len(b["rows"]) for b in blocks] == [1, 1, 1]
    other = tmp_path / "far/away/page.html"
    other.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["report.py", str(folder), "--out", str(other)])
    report.main()
    assert (other.parent / unpacked(other)[0]["docs"].partition("#")[0]).resolve().is_file()
    monkeypatch.setattr("sys.argv", ["report.py", str(folder), "--out", f"{folder}/args.json/x"])
    with pytest.raises(SystemExit, match="^error: .*args.json/x cannot be written"):
        report.main()


def test_a_run_reads_no_more_of_its_samples_at_its_end_than_it_may(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(report, "page", lambda *given, most_read: read.append(most_read) or "")
    log = SimpleNamespace(writing=True, folder=tmp_path, decoration=lambda what: nullcontext())
    plug.end(SimpleNamespace(args=fakes.args(), log=log))
    assert read == [report.AT_THE_END] and (tmp_path / "report.html").exists()


def test_a_token_is_as_old_as_the_step_that_learns_from_it_says(tmp_path):
    """With --carry. A step without a round of its own has no token of age 0."""
    old = made_up(0, 4, random.Random(0)) | {"steps": [0, 1, 1, 2]}
    folder = write_run(tmp_path, [{"step": 5}], {"step_00003": [old], "step_00005": [old]}, steps=5)
    _, blocks = unpacked(write_page([folder]))
    ages = [block["tokens"]["numbers"]["age"] for block in blocks]
    assert [[round(x * one["unit"]) for x in one["values"]] for one in ages] == [
        [2, 1, 1, 0], [4, 3, 3, 2]]


def test_flags_that_differ_and_healthy_ranges_come_from_the_documents():
    assert report.changed({"batch": 8, "group": 8, "export": False, "reward": ["exact"],
                           "advantage_eps": 1e-06, "stop": []}) == [
        ["--batch", "8", "64"], ["--export", "off", "on"]]
    assert report.changed({"script": "ppo.py", "batch": 512, "lam": 0.9}) == [
        ["--lam", "0.9", "0.95"]]
    found, documented = report.healthy(), (ROOT / "docs/reference/metrics_and_files.md").read_text()
    assert len(found) >= 8 and found["rollout/logprob_gap_mean"]["high"] > 0
    for name, one in found.items():
        assert f"`{name}`" in documented and one["means"] and one["try"]
        assert one["low"] is not None or one["high"] is not None


# ---- in a browser

@pytest.fixture(scope="module")
def browser():
    """A page of the system's Chromium. `said`: its console, errors and dialogs; `asked`: what it
    asked for."""
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as play:
        page = play.chromium.launch(executable_path=found, args=["--no-sandbox"]).new_page()
        page.said, page.asked = [], []
        for event in "console", "pageerror":
            page.on(event, lambda it: page.said.append(it))
        page.on("dialog", lambda it: (page.said.append(it), it.dismiss()))
        page.on("request", lambda it: page.asked.append(it.url))
        yield page


def opened(browser, path: Path) -> None:
    browser.said.clear()
    browser.asked.clear()
    browser.goto(path.resolve().as_uri())
    browser.wait_for_selector("body[data-ready]")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Two seeds and another run, of hostile texts too. Their folder's name is long. Most advantages
    of step 4 are 0."""
    place, rng = tmp_path_factory.mktemp("a_name_without_a_place_to_break" * 4), random.Random(0)

    def rows(step):
        found = [made_up(i // 4, 6, rng) for i in range(32)]
        for i, text in enumerate(HOSTILE):
            found[i] = made_up(i // 4, 1, rng, text) | {"prompt": text, "answer": text}
        found[20] |= {"reward": None, "advantage": None, "truncated": True}
        put = [True, True, False, False, True, True]
        talk = [{"role": "assistant", "content": "x"}, {"role": "user", "content": HOSTILE[0]}]
        found[21] |= {"sampled": put, "turns": talk}
        for name in "token_texts", "sampled":  # of an older run, or an evaluation
            del found[22][name]
        found[22] |= {"turns": talk, "completion": HOSTILE[0]}
        for row in found if step == 4 else []:
            row["advantage"] = 0.0
        return found

    runs = [run_of(place / name, 5, rows, 4, **args) for name, args in (
        ("a-0", {}), ("a-1", {"seed": 1}), ("b", {"lr": 0.1}))]
    (runs[2] / "plan.txt").write_text(HOSTILE[0] + "\0")
    return write_page(runs)


def put_in(browser, name: str, value: str) -> int:
    """Sets a field of the filter → how many completions are shown as found."""
    browser.evaluate(f"""(() => {{ const e = document.getElementById('f-{name}');
        e.value = {value!r}; e.dispatchEvent(new Event('input')); }})()""")
    if name == "step":
        browser.evaluate("choose()")  # it is awaited
    return int(browser.text_content("#count").split(" ")[0])


def test_it_opens_without_an_error_asks_for_nothing_and_fits(browser, small):
    for width, scheme in (400, "light"), (1400, "dark"):
        browser.set_viewport_size({"width": width, "height": 900})
        browser.emulate_media(color_scheme=scheme)
        opened(browser, small)
        assert not browser.said and browser.asked == [small.resolve().as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        ink, back = (sum(map(int, re.findall(r"\d+", browser.evaluate(
            f"getComputedStyle(document.body).{name}"))[:3]))
            for name in ("color", "backgroundColor"))
        assert (ink < 230 < 690 < back) if scheme == "light" else (ink > 610 > 150 > back)


def test_it_opens_where_most_completions_have_an_advantage_and_one_step_moves_all(browser, small):
    """With bands over seeds, a healthy range, and a mark where it is left."""
    opened(browser, small)
    head, _ = unpacked(small)
    shown = head["blocks"][int(browser.input_value("#f-step"))]
    assert (shown["kind"], shown["step"]) == ("step", 0)
    assert shown["seen"] == max(b["seen"] for b in head["blocks"]) > 0.5
    run, curves = browser.text_content("#run"), browser.text_content("#curves")
    assert "Outside the healthy range: " in run
    assert "rollout/logprob_gap_mean at 1 steps, first at 2" in run
    legend = browser.text_content("#legend")
    assert "a, 2 seeds" in legend and "healthy range" in legend and "band: several" in legend
    assert "up: nats" in curves and "outside it at 1 steps, first at 2" in curves
    assert browser.locator("polygon").count() and browser.locator("rect").count()
    assert "eval/pass@140.50.25 to 0.625" in "".join(
        browser.locator("#evals tr").all_text_contents())
    # A clip_frac of 0 had an axis from −1 to 1, and two controls had two steps.
    axis = browser.evaluate("""[...charts.find(([f]) => f.textContent.startsWith('eval/pass@1'))[0]
        .querySelectorAll('text')].map(e => e.textContent)""")
    assert axis[:3] == ["0", "0.5", "1"] and "steps done; up: share" in axis
    for value, shown in ("4", "step 4"), ("0", "step 0"):
        browser.evaluate(f"(e => {{ e.value = {value}; e.oninput({{target: e}}); "
                         "e.onchange({target: e}); })(document.getElementById('cursor'))")
        chosen = browser.evaluate(
            "document.getElementById('f-step').selectedOptions[0].textContent")
        assert chosen.startswith(shown) and browser.text_content("#at") == value
    put_in(browser, "step", "1")
    assert browser.text_content("#at") == "4"


def test_the_turns_have_their_rewards(browser, tmp_path):
    talk = [{"role": "assistant", "content": "x", "paid": 0.25},
            {"role": "user", "content": "again"}, {"role": "assistant", "content": "y"}]
    put = [True, True, False, False, True, True]
    rows = [made_up(0, 6, random.Random(0)) | {"turns": talk, "sampled": put} for _ in range(2)]
    del rows[1]["token_texts"]
    opened(browser, write_page([run_of(tmp_path / "a", 2, lambda step: rows)]))
    roles = browser.locator(".role").all_text_contents()
    assert roles == ["model, turn 1, reward 0.25", "put in", "model, turn 2",
                     "model, turn 1, reward 0.25", "user", "model, turn 2"]
    assert "slanted: put in by a reply" in browser.text_content("#notes") and not browser.said


def test_a_run_without_a_step_has_a_page(browser, tmp_path):
    folder = run_of(tmp_path / "a", 1, lambda step: [])
    (folder / "metrics.jsonl").write_text("")
    opened(browser, write_page([folder]))
    assert not browser.said and "0 of 1" in browser.text_content("#run")


def test_hostile_texts_are_shown_and_do_nothing(browser, small):
    opened(browser, small)
    put_in(browser, "step", "all")
    assert put_in(browser, "search", "</script>") > 0
    assert "</script><script>document.title" in browser.text_content("#list")
    assert put_in(browser, "search", "") == 6 * 32
    assert "␀␛[31m⟨7f⟩⟨85⟩⟨2028⟩⟨202e⟩abc" in browser.text_content("#list")
    assert "bad" not in browser.title() and not browser.said
    assert browser.locator("img").count() == 0 and browser.locator("script").count() == 2


def test_it_filters_sorts_searches_and_colors(browser, small):
    opened(browser, small)
    assert put_in(browser, "step", "0") == 32
    assert put_in(browser, "kind", "unscored") == put_in(browser, "kind", "truncated") == 1
    put_in(browser, "kind", "all")
    rewards = [row["reward"] for row in unpacked(small)[1][0]["rows"] if row["reward"] is not None]
    assert put_in(browser, "low", "0.3") == sum(x >= 0.3 for x in rewards) < 31
    assert put_in(browser, "high", "0.7") == sum(0.3 <= x <= 0.7 for x in rewards) > 0
    for bound in "low", "high":
        put_in(browser, bound, "")
    assert put_in(browser, "search", "PROMPT 3") == 4
    put_in(browser, "search", "")
    put_in(browser, "order", "highest reward")
    browser.click("#f-side")
    shown = [float(x) for x in re.findall(r"reward ([-.e0-9]+)", " ".join(
        browser.locator(".top").all_text_contents()))]
    assert len(shown) > 20 and shown == sorted(shown, reverse=True)
    colors = {}
    for mode in "advantage", "logprob", "put":
        put_in(browser, "color", mode)
        colors[mode] = tuple(browser.evaluate(
            "[...document.querySelectorAll('.t')].map(e => getComputedStyle(e).backgroundColor)"))
    assert len({*colors.values()}) == 3 and all(len({*x}) > 5 for k, x in colors.items()
                                                if k != "put")
    assert len({*colors["put"]}) == 2 and not browser.said


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    run = write_run(tmp_path / "a", [], {})
    with pytest.raises(SettingsError, match="x is not a run: it has no"):
        report.page([run, Path("x")], place=tmp_path)
