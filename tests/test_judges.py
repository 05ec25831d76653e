"""Rewards that wait: coroutines run together, a bad one costs its completion, failures are retried.
The judge and the reward model of examples/, with a server and a model of the test's own."""
import asyncio
import importlib
import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import rewards
from dist import SettingsError
from examples import tiny
from rewards import Item, RewardArgs, Scorer
from scoring import signatures, worker

ROOT = Path(__file__).resolve().parent.parent


def items(texts, prompt="What is 6 x 7?", **row):
    return [Item(prompt, text, "", row, 1, False) for text in texts]


def score(specs, texts, size=1, **args):
    with closing(Scorer(specs, RewardArgs(**args))) as scorer:
        scorer.wait()
        return scorer.score(items(texts), size if scorer.groups else 1)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(code):
        (tmp_path / "own.py").write_text("import asyncio, os, sys, time\n" + code)
        return "own.py:f"
    return write


MEETING = """
open = most = 0
async def f(completion):
    global open, most
    open += 1
    most = max(most, open)
    while most < int(completion):
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    open -= 1
    return most
"""


@pytest.mark.parametrize("n, workers, together", [(70, 1, 64), (70, 2, 6), (5, 1, 5), (1, 2, 1)])
def test_the_coroutines_of_a_worker_run_together(own, n, workers, together):
    """Each waits until as many run at once as may, or as are left: fewer would wait for ever."""
    texts = [str(min(together, n - i // 64 * 64)) for i in range(n)]
    scores = score([own(MEETING)], texts, reward_workers=workers, reward_timeout=60.0,
                   reward_retries=0)
    assert all(int(text) <= s.total <= 64 for text, s in zip(texts, scores, strict=True))


BAD = {"await asyncio.sleep(1e9)": "no answer within", "time.sleep(1e9)": "no answer within",
       "while True: pass": "no answer within", "os._exit(3)": "the worker ended with code 3",
       "sys.exit(4)": "the worker ended with code 4", "raise KeyError('gone')": "KeyError: 'gone'",
       "return float('nan')": "finite number", "return 'x'": "finite number",
       "await refuse()": "no answer within"}


def test_a_coroutine_that_hangs_or_dies_costs_its_completion_only(own):
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in BAD)
    spec = own("async def refuse():  # to be cancelled\n    while True:\n        try:\n"
               "            await asyncio.sleep(1e9)\n        except asyncio.CancelledError:\n"
               "            pass\nasync def f(completion):\n    await asyncio.sleep(0)\n" + faults
               + "    return float(completion)")
    texts = [text for i, code in enumerate(BAD) for text in (str(i), code)] + ["99"]
    scores = score([spec, "short"], texts, reward_timeout=3.0, reward_retries=0)
    assert [s.total for s in scores[::2]] == [i - 0.001 for i in [*range(len(BAD)), 99]]
    for code, s in zip(BAD, scores[1::2], strict=True):
        assert s.total is None and BAD[code] in s.error, (code, s)


def test_what_raises_or_is_late_is_tried_again_after_pauses_that_double(monkeypatch):
    pauses, tries = [], []

    async def sleep(seconds):
        pauses.append(seconds)

    async def f(completion):
        tries.append(completion)
        if len(tries) == 2:
            await asyncio.get_running_loop().create_future()  # it never comes
        if len(tries) <= int(completion):
            raise ConnectionError("the server is away")
        return len(tries)

    monkeypatch.setattr(worker.asyncio, "sleep", sleep)
    reward = signatures.Reward("ours", f, ["completion"], [], True)
    for needed, value, waited in ("0", 1, []), ("3", 4, [1, 2, 4]), ("9", None, [1, 2, 4]):
        pauses.clear(), tries.clear()
        call = worker.Call(items([needed]), [reward])
        asyncio.run(worker.score_waiting([reward], [call], 0.2, 3))
        assert (call.values, pauses, call.retries) == ([[value]], waited, len(waited))
        assert bool(call.error) == (value is None)
    assert "the server is away" in call.error


def test_the_metrics_have_the_retries(own):
    spec = own("tries = []\nasync def f(completion):\n    tries.append(completion)\n"
               "    if len(tries) == 1: raise ConnectionError('away')\n    return 1")
    scores = score([spec], ["x", "y"], reward_workers=1)
    assert [(s.total, s.retries) for s in scores] == [(1, 1), (1, 0)]


def test_groups_and_plain_rewards_beside_coroutines(own):
    own("async def f(completions, **columns): return [len(completions)] * len(completions)\n"
        "def g(completion): return int(completion)\n"
        "async def h(completion):\n    if completion == '3': raise ValueError\n    return 5")
    scores = score(["own.py:f", "own.py:g", "own.py:h:2"], ["1", "2", "3", "4"], 2,
                   reward_retries=0)
    assert [tuple(s.parts.values()) for s in scores] == [
        (2, 1, 5), (2, 2, 5), (2, 3, None), (2, 4, 5)]
    assert [s.total for s in scores] == [13, 14, None, 16]


# ---- examples/judge.py

GRADES = json.dumps({"correct": 10, "complete": 5, "brief": 0})


class Server(BaseHTTPRequestHandler):
    """Grades as a completion says: away (once 503), silent, odd, or the grades."""
    away, asked = True, []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][0]["content"]
        Server.asked.append((self.path, self.headers["Authorization"], body["model"], said))
        if "away" in said.partition("<answer>")[2] and Server.away:
            Server.away = False
            return self.send_error(503)
        text = "I would say: good" if "odd" in said.partition("<answer>")[2] else GRADES
        answer = json.dumps({"choices": [{"message": {"content": text}}], "usage": {
            "prompt_tokens": 100, "completion_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge(monkeypatch):
    for name in "JUDGE_URL", "JUDGE_MODEL":
        monkeypatch.setenv(name, "x")
    return importlib.import_module("examples.judge")


def test_the_judge_behind_a_server(judge, monkeypatch, capfd):
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        for name, value in dict(JUDGE_URL=url, JUDGE_MODEL="m", JUDGE_KEY="k",
                                NO_PROXY="127.0.0.1").items():
            monkeypatch.setenv(name, value)
        scores = score([f"{ROOT}/examples/judge.py:judge"], ["42", "away", "odd"],
                       reward_workers=1, reward_retries=1, reward_timeout=60.0)
        server.shutdown()
    assert [(s.total, s.retries) for s in scores] == [(0.5, 0), (0.5, 1), (None, 1)]
    assert "no grade from 0 to 10 for correct, complete, brief" in scores[2].error
    assert "4 calls, 400 tokens read, 36 written" in capfd.readouterr().out
    assert {asked[:3] for asked in Server.asked} == {("/v1/chat/completions", "Bearer k", "m")}
    said = Server.asked[0][3]
    assert "What is 6 x 7?" in said and all(text in said for text in judge.RUBRIC.values())


@pytest.mark.parametrize("text, value", [
    (GRADES, 0.5), (f"So {{x}}:\n```json\n{GRADES}\n```", 0.5), ("", None), ("{}", None),
    (GRADES.replace("10", "11"), None), (GRADES.replace("10", "9.5"), None),
    (GRADES.replace("10", '"10"'), None), (GRADES.replace("10", "null"), None)])
def test_a_grade(judge, text, value):
    if value is not None:
        assert judge.grade(text) == value
        return
    with pytest.raises(ValueError, match="the judge gave no grade"):
        judge.grade(text)


# ---- examples/reward_model.py

@pytest.mark.parametrize("reward, missing", [
    ("judge.py:judge", "JUDGE_URL and JUDGE_MODEL"), ("reward_model.py:score", "REWARD_MODEL")])
def test_what_an_example_needs_is_said_before_the_run(monkeypatch, reward, missing):
    for name in "JUDGE_URL", "JUDGE_MODEL", "REWARD_MODEL":
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError) as error:
        rewards.check([f"{ROOT}/examples/{reward}"])
    assert missing in str(error.value) and "Traceback" not in str(error.value)


def classifier(folder, labels):
    """A random one of few numbers, and what it says of a text."""
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    config = LlamaConfig(vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                         num_labels=labels, pad_token_id=0)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def logit(question, completion):
        text = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                f"{completion}<|im_end|>\n")
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            return float(model(input_ids=ids).logits)
    return logit


def test_the_reward_model_is_the_classifiers_logit(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    logit = classifier(tmp_path, 1)
    spec = [f"{ROOT}/examples/reward_model.py:score"]
    with closing(Scorer(spec, RewardArgs(1, 60.0))) as scorer:
        scorer.wait()
        scores = scorer.score([*items(["42", ""], question="6 x 7"), *items(["42"], "7 x 6")])
    expected = [logit("6 x 7", "42"), logit("6 x 7", ""), logit("7 x 6", "42")]
    assert [s.total for s in scores] == pytest.approx(expected, abs=1e-5), scores[0].error
    assert len(set(expected)) == 3
