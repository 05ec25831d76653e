"""servers.py: what a server said in place of an answer, as the exception of its client has it.

Clients such as httpx, requests, aiohttp and openai raise an exception that has the server's
response, or at least its status: https://www.rfc-editor.org/rfc/rfc9110#name-status-codes
"""
import html
import json
import re
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import NamedTuple

LATER = (408, 409, 425, 429)  # statuses below 500 for which the same request may succeed later
LONGEST = 300  # characters of what a server said
PAGE = 10_000  # characters of a page that are looked through for them


class Said(NamedTuple):
    """What an exception says of a server."""
    words: str  # a line with its status and its own sentence; "": nothing of a server
    again: bool  # whether the same request may succeed
    wait: float | None  # seconds that the server asks to wait (Retry-After); None: it does not


def said_in(error: BaseException) -> Said:
    """What an exception, or one that it comes from, says of a server. Without a status, such as
    where there is no connection, the request may succeed later."""
    causes = [error]
    while (causes[-1].__cause__ or causes[-1].__context__) and len(causes) < 9:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    address = next(filter(None, map(address_of, causes)), "")
    for cause in causes:
        response = getattr(cause, "response", None)
        status = next((value for owner in (response, cause) for name in ("status_code", "status")
                       if type(value := getattr(owner, name, None)) is int), None)
        if status is not None:
            headers = getattr(response, "headers", None) or getattr(cause, "headers", None) or {}
            said = sentence_of(response)
            return Said(f"The server{address} answered {status}{said and ': '}{said}",
                        status in LATER or status >= 500, seconds_in(headers))
    return Said(address and f"No answer of the server{address}.", True, None)


def address_of(error: BaseException) -> str:
    """" at ADDRESS", without a query, which may have a key. "": it is not known."""
    with suppress(Exception):  # httpx raises where an exception has no request
        return f" at {str(error.request.url).partition('?')[0]}"
    return ""


def sentence_of(response) -> str:
    """The server's own sentence, out of JSON, a page of HTML or a text."""
    text = None
    with suppress(Exception):  # it was not read, and its connection is closed
        text = response.text
    if not isinstance(text, str):
        return ""
    with suppress(ValueError, RecursionError):
        text = message_in(json.loads(text))
    text = text[:PAGE]
    if text.lstrip().startswith("<"):
        text = html.unescape(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]+>", " ", text))
    return " ".join(text.split())[:LONGEST]


def message_in(stored) -> str:
    """The sentence in an error as OpenAI, vLLM, FastAPI and others have it."""
    if isinstance(stored, list) and stored and isinstance(stored[0], dict | list):
        return message_in(stored[0])
    key = next((key for key in ("error", "message", "detail", "msg") if isinstance(stored, dict)
                and stored.get(key)), None)
    if key:
        return message_in(stored[key])
    return stored if isinstance(stored, str) else json.dumps(stored)


def seconds_in(headers) -> float | None:
    """The seconds of Retry-After, which has a number of them or a date."""
    with suppress(Exception):  # headers are of any client; the value is of any server
        value = next(value for name, value in headers.items() if name.lower() == "retry-after")
        if re.fullmatch(r"\s*\d+(\.\d*)?(e\d+)?\s*", value):
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
