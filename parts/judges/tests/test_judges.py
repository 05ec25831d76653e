"""What scores a completion: verifiers by hand, rewards that wait, the judge and the reward model of
examples/ with a server and a model of the test's own."""
import asyncio
import importlib
import json
import re
import threading
from fractions import Fraction
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForSequenceClassification

import fakes
import rewards
import worker
from examples import countdown, formats, gsm8k, kk, mathematics, tiny
from parts.judges import waiting
from parts.judges.pool import JudgePool
from settings import changed
from test_rewards import (  # noqa: F401
    KK,
    ROOT,
    group_of,
    item,
    own,
    parts,
    totals,
)
from test_rewards import score as scored

# ---- the verifiers, by hand

def tagged(said):
    return f"<think>x</think><answer>{said}</answer>"


@pytest.mark.parametrize("function, cases", [
    (gsm8k.gsm8k, [
        ("first 18, then 20", "18", 0), ("#### 17\n\nNext question: 18", "#### 18", 0),
        ("#### none, but 18", "18", 1), ("", "18", 0)]),
    (mathematics.math_reward, [
        ("It is $14/3$.", r"\frac{14}{3}", 1), (r"\boxed{72}", "48+24=72\n#### 72", 1),
        ("?", "72", 0)]),
    (kk.kk, [
        (tagged(KK), {"solution_text_format": KK}, 3),
        (tagged("ben IS a Knave. Zoey is a knight").replace("<a", " <a") + " bye", KK, 3),
        (tagged("Zoey is a knave, Ben is a knave"), KK, -0.5),
        *((tagged(said), KK, -1) for said in (
            "", "Zoey is a knight, Zoey is a knave")),
        *((wrong, KK, -3) for wrong in (
            "<think>" + tagged(KK), tagged(KK) + f"<answer>{KK}</answer>",
            f"<answer>{KK}</answer><think>x</think>"))])])
def test_verifiers(function, cases):
    for completion, answer, expected in cases:
        assert function(completion, answer) == expected, completion
        if function is kk.kk:
            assert kk.kk01(completion, answer) == (expected == 3)
            assert formats.format_tags(completion) == (expected != -3)
            if expected == 3:  # the prompt may have opened the thinking
                opened = completion.removeprefix("<think>")
                assert kk.kk(opened, answer, prompt="...<think>\n") == 3 > kk.kk(opened, answer)


def test_countdown():
    right = ["(25 - 5) * 4 / 2", "-(5 - 25) * 4 / 2"]
    wrong = ["25 + 5 + 4 + 2", "40", "(25 - 5) * 4 / 2 + 5 - 5", "(25 - 5) * 4 / 2 = 40", "",
             "(25-5)*4//2", "5/(4-4)*25*2", "((25-5)*4/2", "²", "25-5*4**2", "(٢5-5)*4/2"]
    for text in right + wrong:
        for completion in (f"I try\n{text}", f"<answer>1</answer> no: <answer>{text}</answer> ok"):
            for row in ({"nums": [25, 5, 4, 2]}, {"numbers": [2, 4, 5, 25]}):
                assert countdown.countdown(completion, target=40, **row) == (text in right), text
    # Exact: floats would give 23.99999999999999.
    assert countdown.countdown("(8 / (3 - 8 / 3))", nums=[3, 3, 8, 8], target=24) == 1


def pairs_of(e):
    pair = st.tuples(e, st.sampled_from("+-*/"), e)
    return pair.map("({0[0]}{0[1]}{0[2]})".format) | pair.map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), pairs_of, max_leaves=12))
def test_arithmetic_agrees_with_python(text):
    """The oracle is Python's own grammar over Fractions."""
    if len(text) > 300:
        return
    try:
        expected = eval(re.sub(r"(\d+)", r"F(\1)", text), {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            countdown.arithmetic(text)
        return
    value, numbers = countdown.arithmetic(text)
    assert value == expected and numbers == [int(n) for n in re.findall(r"\d+", text)]


# ---- rewards that wait

def pool(specs, args, retries=0):
    return JudgePool(specs, changed(args, reward_retries=retries))


def score(specs, items, group=1, retries=0, **more):
    return scored(specs, items, group, make=partial(pool, retries=retries), **more)


def test_a_coroutine_of_a_group_is_one_call(own):  # noqa: F811
    group_of(own, "async def", pool)


def test_coroutines_and_others_are_added_up(own):  # noqa: F811
    own("async def trl(completions, level, **columns):\n    await asyncio.sleep(0)\n"
        "    assert columns['trainer_state'].global_step == 7 and level == [2, 2]\n"
        "    return [len(text) for text in completions]\n"
        "def g(completion): return 3\nclient = []\n"
        "async def alone(completion):   # a client that lives longer than one call\n"
        "    client.append(asyncio.get_running_loop())\n"
        "    return client[0] is client[-1] and not client[0].is_closed()")
    specs = [f"own.py:{name}" for name in ("trl", "g", "alone")]
    assert rewards.check(specs, fakes.args()) == ([["trl", "level"]], ["trl", "alone"])
    items = [item(text, level=2) for text in ("a", "b", "bb", "b")]
    assert parts(score(specs, items, 2, workers=1)) == [
        (1, 3, 1, 0), (1, 3, 1, 0), (2, 3, 1, 0), (1, 3, 1, 0)]  # the last: retries

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


def test_the_coroutines_of_a_worker_run_together(own):  # noqa: F811
    """Each waits until as many run at once as may, or as are left: fewer would wait for ever."""
    texts = [str(min(64, 70 - i // 64 * 64)) for i in range(70)]
    scores = score([own(MEETING)], texts, workers=1, timeout=60.0)
    assert all(int(text) <= s.total <= 64 for text, s in zip(texts, scores, strict=True))


BAD = {"time.sleep(1e9)": "no answer within", "os._exit(3)": "the worker ended with code 3",
       "raise KeyError('gone')": "KeyError: 'gone'", "return float('nan')": "finite number",
       "await refuse()": "no answer within"}


def test_a_coroutine_that_hangs_or_dies_costs_its_completion_only(own):  # noqa: F811
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in BAD)
    spec = own("async def refuse():  # to be cancelled\n    while True:\n        try:\n"
               "            await asyncio.sleep(1e9)\n        except asyncio.CancelledError:\n"
               "            pass\nasync def f(completion):\n    await asyncio.sleep(0)\n" + faults
               + "    return float(completion)")
    texts = [text for i, code in enumerate(BAD) for text in (str(i), code)] + ["99"]
    scores = score([spec, "short"], texts, timeout=2.0)
    assert totals(scores[::2]) == [i - 0.001 for i in [*range(len(BAD)), 99]]
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

    monkeypatch.setattr(waiting.asyncio, "sleep", sleep)
    loaded = waiting.Loaded([worker.Reward(f, ["completion"])], 0.2, 3)
    for needed, value, waited in ("0", 1, []), ("3", 4, [1, 2, 4]), ("9", None, [1, 2, 4]):
        pauses.clear(), tries.clear()
        ((values, error, retries),), = waiting.score(loaded, [[item(needed)]])
        assert (values, pauses, retries) == ([value], waited, len(waited))
        assert bool(error) == (value is None)
    assert "the server is away" in error


# ---- examples/judge.py, examples/reward_model.py

GRADES = json.dumps({"correct": 10, "complete": 5, "brief": 0})


class Server(BaseHTTPRequestHandler):
    """Grades as a completion says: away (once 503), odd, or the grades."""
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


def test_the_judge_behind_a_server(monkeypatch, capfd):
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        for name, value in dict(JUDGE_URL=url, JUDGE_MODEL="m", JUDGE_KEY="k",
                                NO_PROXY="127.0.0.1").items():
            monkeypatch.setenv(name, value)
        texts = [item(text, prompt="What is 6 x 7?") for text in ("42", "away", "odd")]
        scores = score([f"{ROOT}/examples/judge.py:judge"], texts, workers=1, retries=1,
                       timeout=60.0)
        server.shutdown()
    assert [(s.total, s.parts["retries"]) for s in scores] == [(0.5, 0), (0.5, 1), (None, 1)]
    assert "no grade from 0 to 10 for correct, complete, brief" in scores[2].error
    assert "4 calls, 400 tokens read, 36 written" in capfd.readouterr().out
    assert {asked[:3] for asked in Server.asked} == {("/v1/chat/completions", "Bearer k", "m")}
    judge, said = importlib.import_module("examples.judge"), Server.asked[0][3]
    assert "What is 6 x 7?" in said and all(text in said for text in judge.RUBRIC.values())
    assert judge.grade(f"So {{x}}:\n```json\n{GRADES}\n```") == 0.5
    for other in "11", "9.5", '"10"', "null":
        with pytest.raises(ValueError, match="the judge gave no grade"):
            judge.grade(GRADES.replace("10", other))


def test_the_reward_model_is_the_classifiers_logit(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))

    def logit(question, completion):
        text = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                f"{completion}<|im_end|>\n")
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits)

    pairs = [("6 x 7", "42"), ("6 x 7", ""), ("7 x 6", "42")]
    scores = score([f"{ROOT}/examples/reward_model.py:score"],
                   [item(text, prompt=asked, question="6 x 7") if asked == "6 x 7"
                    else item(text, prompt=asked) for asked, text in pairs], workers=1, timeout=60)
    expected = [logit(*pair) for pair in pairs]
    assert totals(scores) == pytest.approx(expected, abs=1e-5), scores[0].error
    assert len({*expected}) == 3
