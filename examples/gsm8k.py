"""GSM8K: word problems of grade school. An answer ends in "#### 72". arxiv.org/abs/2110.14168

    python grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k:main --reward gsm8k
"""
import re
from decimal import Decimal

from scoring.verifiers import last_boxed

NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
                    r"|(?<![0-9])\.[0-9]+")


def gsm8k(completion, answer, **row):
    r"""1 if the number after the last ####, else in the last \boxed{}, else the last, is right."""
    gold = numbers_in(str(answer).rpartition("####")[2])[-1:]
    if not gold:
        raise ValueError(f"gsm8k needs a number in the answer (got {answer!r:.200})")
    _, mark, after = completion.rpartition("####")
    if mark:
        given = numbers_in(after.lstrip().partition("\n")[0])[:1]
    else:
        boxed = last_boxed(completion)
        given = numbers_in(completion if boxed is None else boxed)[-1:]
    return float(given == gold)


def numbers_in(text: str) -> list[Decimal]:
    """'$1,234.50' -> 1234.5, '10-5' -> 10 and 5, 'x = -5' -> -5."""
    return [Decimal(n.replace(",", "")) for n in NUMBER.findall(text.replace("$", ""))]
