"""Rewards that wait: many at once in a worker, each tried again where it fails."""
import asyncio
import email.utils
import http.server
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.error
from collections import Counter, defaultdict
from contextlib import closing
from unittest import mock

import httpx
import pytest
import requests

import fakes
import plan
import rewards
import worker
from families import ROOT
from parts.judges import plug, servers, waiting
from parts.judges.pool import JudgePool
from worker import ITEM


def item(completion: str, **row) -> dict:
    return ITEM | dict(completion=completion, answer="", tokens=1, columns=row)


def score(specs, items, group=1, workers=1, timeout=60.0):
    """(reward, rewards, error) of each item of a batch. items: or texts."""
    items = [item(x) if isinstance(x, str) else x for x in items]
    args = fakes.args(reward_workers=workers, reward_timeout=timeout, reward_retries=0)
    with closing(JudgePool(specs, args)) as pool:
        pool.wait()
        pool.loading = 1.0
        found = pool.ask(items, group if pool.groups else 1)
        return [rewards.weighted_sum(pool.specs, one) for one in found]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of rewards → its name."""
    monkeypatch.chdir(tmp_path)

    def write(code):
        (tmp_path / "own.py").write_text(f"import asyncio, os, time\n{code}")
        return "own.py"
    return write


def test_coroutines_and_others_are_added_up_and_one_loop_stays_open(own):
    """A group of TRL's form is one job, with the time of all; it fails as a whole."""
    own("async def trl(completions, level, **columns):\n    assert level == [2, 2]\n"
        "    if 'bad' in completions: return [1.0]\n    await asyncio.sleep(1.2)\n"
        "    return [len(text) for text in completions]\ndef g(completion): return 3\nclient = []\n"
        "async def alone(completion):   # a client that lives longer than one call\n"
        "    client.append(asyncio.get_running_loop())\n"
        "    return client[0] is client[-1] and not client[0].is_closed()")
    specs, args = [f"own.py:{name}" for name in ("trl", "g", "alone")], fakes.args()
    found = rewards.check(specs, args)
    assert [["trl", "level", True]] == [it for it in found.needs if it[1] != "answer"]
    assert found.waits == ["trl", "alone"]
    assert plug.pool(None, args, found.waits) is JudgePool and plug.pool(None, args, []) is None
    items = [item(text, level=2) for text in ("a", "b", "bb", "b", "bad", "c")]
    found = [tuple(each.values()) for _, each, _ in score(specs, items, 2, timeout=1.0)]
    assert found == [(1, 3, 1, 0), (1, 3, 1, 0), (2, 3, 1, 0), (1, 3, 1, 0), (None, 3, 1, 0),
                     (None, 3, 1, 0)]  # the last: retries


def test_the_coroutines_of_a_worker_run_together(own):
    """Each waits until as many run at once as may, or as are left: fewer would wait for ever."""
    own("open = most = 0\nasync def f(completion):\n    global open, most\n    open += 1\n"
        "    most = max(most, open)\n    while most < int(completion): await asyncio.sleep(0)\n"
        "    for _ in range(3): await asyncio.sleep(0)\n    open -= 1\n    return most")
    texts = [str(min(64, 70 - i // 64 * 64)) for i in range(70)]
    scores = score(["own.py:f"], texts)
    assert all(int(text) <= total <= 64 for text, (total, *_) in zip(texts, scores, strict=True))


BAD = {"time.sleep(1e9)": "no answer within", "os._exit(3)": "the worker ended with code 3",
       "raise KeyError('gone')": "KeyError: 'gone'", "return float('nan')": "finite number",
       "await refuse()": "no answer within"}


def test_a_coroutine_that_hangs_or_dies_costs_its_completion_only(own):
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in BAD)
    own("async def refuse():  # to be cancelled\n    while True:\n        try:\n"
        "            await asyncio.sleep(1e9)\n        except asyncio.CancelledError:\n"
        "            pass\nasync def f(completion):\n    await asyncio.sleep(0)\n" + faults
        + "    return float(completion)")
    texts = [text for i, code in enumerate(BAD) for text in (str(i), code)] + ["99"]
    scores = score(["own.py:f", "short"], texts, workers=2, timeout=2.0)
    assert [total for total, *_ in scores[::2]] == [i - 0.001 for i in [*range(len(BAD)), 99]]
    for code, (total, _, error) in zip(BAD, scores[1::2], strict=True):
        assert total is None and BAD[code] in error, (code, error)


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
    loaded = waiting.Loaded([worker.Reward("f", f, ["completion"], False)], 0.2, 3)
    for needed, value, waited in ("0", 1, []), ("3", 4, [1, 2, 4]), ("9", None, [1, 2, 4]):
        pauses.clear(), tries.clear()
        (found,), = waiting.score(loaded, [[item(needed)]])
        assert pauses == waited and found["retries"] == len(waited)
        assert found["f"] == value if value else "the server is away" in found["f"]
    assert "--reward_retries must be" in "".join(plan.problems(fakes.args(reward_retries=11), 1))


# ---- a server says something else

GRADED = {"choices": [{"message": {"content": '{"correct": 5, "complete": 5, "brief": 5}'}}]}
JSON, HTML = "application/json", "text/html"
SOON = email.utils.formatdate(time.time() + 3600, usegmt=True)
OTHERS = [  # (status, headers, body), how often it says so; the tries, the pauses; its sentence
    ((429, {"Retry-After": "4"}, {"error": {"message": "slow down"}}), 1, [4.0], None),
    ((429, {"Retry-After": "0"}, ""), 2, [0.0, 0.0], None),
    ((429, {"Retry-After": "1e9"}, "busy"), 9, [7.0, 7.0], "429: busy"),
    ((503, {"Retry-After": SOON}, "<html><title>Down</title></html>"), 1, [7.0], None),
    ((429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, ""), 1, [0.0], None),
    ((429, {"Retry-After": "soon"}, ""), 1, [1], None),
    ((429, {"Retry-After": "-3"}, ""), 1, [1], None),
    ((408, {}, ""), 1, [1], None), ((425, {}, ""), 1, [1], None), ((409, {}, ""), 1, [1], None),
    ((500, {}, {"detail": "CUDA out of memory"}), 9, [1, 2], "500: CUDA out of memory"),
    ((502, {}, "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"), 9,
     [1, 2], "502: 502 Bad Gateway nginx"), ((504, {}, ""), 2, [1, 2], None),
    ((400, {}, {"error": {"message": "'max_tokens' is unsupported"}}), 9, [],
     "400: 'max_tokens' is unsupported"),
    ((401, {}, {"error": "no key"}), 9, [], "401: no key"),
    ((403, {}, "no\n\nway"), 9, [], "403: no way"),
    ((404, {}, {"object": "error", "message": "the model `x` does not exist"}), 9, [],
     "404: the model `x` does not exist"), ((404, {}, ""), 9, [], "404"),
    ((422, {}, {"detail": [{"loc": ["body"], "msg": "field required"}]}), 9, [], "field required"),
    ((413, {}, "x" * 99999), 9, [], "413: xxx"), ((302, {"Location": "/login"}, ""), 9, [], "302"),
    ((403, {}, "<script" * 99999), 9, [], "403: <script"),
    ((403, {}, "<" * 200_000), 9, [], "403: <"),
    ((501, {}, "no"), 9, [1, 2], "501: no"), ((400, {"Retry-After": "1"}, "no"), 9, [], "400: no"),
    ((200, {}, "<html><title>Sign in</title></html>"), 9, [], "200: Sign in"),
    ((200, {}, ""), 9, [], "200"), ((200, {}, {"error": {"message": "no credit"}}), 9, [],
                                    "200: no credit"),
    ((200, {}, {"choices": []}), 9, [], "200: "), ((200, {}, [1]), 9, [], "200: [1]"),
    ((200, {}, {"choices": [{"message": {"content": None}}]}), 9, [1, 2], "gave no grade"),
    (("closes", {}, ""), 1, [1], None),
    (("sleeps", {}, ""), 9, [1, 2], "no answer within 7 seconds")]


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size = 128


class Server(http.server.BaseHTTPRequestHandler):
    """Says, to what it is asked with the answer N, line N of OTHERS, and then a grade."""
    asked = Counter()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        n = int(re.search(r"<answer>\\n(\d+)", body)[1])
        (status, headers, said), often, *_ = OTHERS[n]
        self.asked[n] += 1
        if self.asked[n] > often:
            status, headers, said = 200, {}, GRADED
        if status == "closes":
            return self.connection.shutdown(socket.SHUT_RDWR)
        if status == "sleeps":
            return self.server.ended.wait(60)
        said = said if isinstance(said, str) else json.dumps(said)
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(said))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture(scope="module")
def judged():
    """The answers of the shipped judge to each line of OTHERS, and the pauses."""
    server = Listener(("127.0.0.1", 0), Server)
    server.ended = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1/"
    pauses, wait = defaultdict(list), asyncio.wait

    def asked() -> int:
        return int(sys._getframe(2).f_locals["items"][0]["completion"])

    async def sleep(seconds):
        pauses[asked()].append(seconds)

    async def soon(tasks, timeout):  # it never comes
        return await wait(tasks, timeout=0.2 if OTHERS[asked()][0][0] == "sleeps" else 600)

    with mock.patch.dict(os.environ, JUDGE_URL=address, JUDGE_MODEL="x"), mock.patch.multiple(
            waiting.asyncio, sleep=sleep, wait=soon):
        loaded, _ = waiting.load([worker.RewardSpec(
            "judge", 1.0, str(ROOT / "examples/judge.py"))], 7, 2)
        found = waiting.score(loaded, [[item(str(n))] for n in range(len(OTHERS))])
    server.ended.set()
    server.shutdown()
    return found, pauses


@pytest.mark.parametrize("n", range(len(OTHERS)))
def test_what_a_server_says_is_judged_by_what_it_is(judged, n):
    """It is asked again where that can help, when it says so, and its words are the reason."""
    (found,), pauses = judged[0][n], judged[1][n]
    error = found["judge"] if isinstance(found["judge"], str) else None
    said, _, right, words = OTHERS[n]
    assert len(pauses) == found["retries"], error
    assert pauses == right, error
    assert Server.asked[n] == len(right) + 1 or said[0] == "sleeps", error
    assert bool(error) == bool(words)
    if words:
        assert words in error.strip().splitlines()[-1] and len(error) < 3000, error


def of_requests(status: int, text: str, **headers) -> Exception:
    """An exception of requests, whose response is false."""
    response = requests.Response()
    response.status_code, response._content, response.headers = status, text.encode(), headers
    return requests.HTTPError(f"{status} Client Error", response=response)


class OfAiohttp(Exception):
    """Its response is gone; it has these."""
    status, headers = 429, {"retry-after": "3"}


def wrapped(error: Exception) -> Exception:
    """As of a client's user, who says more."""
    try:
        raise RuntimeError("the judge failed") from error
    except RuntimeError as outer:
        return outer


URL = "https://x.org/v1?key=secret"


@pytest.mark.parametrize("error, words, again, wait", [
    (of_requests(429, "busy", **{"Retry-After": "2"}), "answered 429: busy", True, 2.0),
    (of_requests(400, '{"message": "no"}'), "answered 400: no", False, None),
    (wrapped(of_requests(404, "")), "answered 404", False, None),
    (OfAiohttp(), "answered 429", True, 3.0), (wrapped(OfAiohttp()), "answered 429", True, 3.0),
    (urllib.error.HTTPError(URL, 503, "", {"Retry-After": "x"}, None), "answered 503", True, None),
    (httpx.ConnectError("refused", request=httpx.Request("GET", URL)), "at https://x.org/v1.", True,
     None), (httpx.ReadTimeout("late"), "", True, None), (KeyError("choices"), "", True, None),
    (ValueError("no grade"), "", True, None)])
def test_the_exceptions_of_other_clients_are_read_too(error, words, again, wait):
    said = servers.said_in(error)
    assert said.words.endswith(words) and said[1:] == (again, wait)
    assert bool(said.words) == bool(words) and "secret" not in said.words
