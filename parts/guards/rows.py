"""rows.py: says which columns are read, and counts rows that are both trained and evaluated on.

Answers such as "proof" and "notfound" stand where a data set has none:
https://github.com/NVIDIA-NeMo/RL/issues/3417
"""
import re
from collections import Counter

from data import Row
from plan import count


def what_is_read(rows: list[Row]) -> str:
    """Describes from which columns the run reads prompt and answer: each combination of columns
    with its number of rows. Where most answers hold a digit, it adds up to three that several rows
    share and that hold none, because some data sets write "proof" or "notfound" where there is no
    answer."""
    forms = Counter(", ".join(f"{what} from {column}" if column else f"no {what}"
                              for what, column in row.origins.items()) for row in rows)
    answers = Counter(str(row.answer) for row in rows if row.origins.get("answer"))
    words = {word: n for word, n in answers.most_common() if not re.search(r"\d", word)}
    found = [f"{count(n, 'row')}: {form}" for form, n in forms.most_common()]
    common = [f"{word!r:.40} {n:,} times" for word, n in words.items() if n > 1][:3]
    if common and 2 * sum(words.values()) <= answers.total():
        found.append("answers without a digit: " + ", ".join(common))
    return "; ".join(found)


def what_is_shared(rows: list[Row], eval_rows: list[Row], warnings: dict):
    """Adds a warning if rows of the evaluation are rows of the training too: then its result says
    little about other rows."""
    known = {hash(repr(row.digested(str))) for row in rows}
    if shared := sum(hash(repr(row.digested(str))) in known for row in eval_rows):
        warnings[f"{shared:,} of the {len(eval_rows):,} rows of --eval_data are rows of --data "
                 "too, so an evaluation says little about unseen rows. Would work: rows that are "
                 "held out."] = ""
