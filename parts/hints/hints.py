"""hints.py: what is allowed, and is perhaps not meant: sentences of the plan.

`of_run` has all of them.
"""
import re
from dataclasses import replace

import data
from chat_template import KEYS
from worker import find_file

FIRST = 200  # rows whose columns are looked at


def of_run(args, inputs):
    """Yields the sentences for a run. inputs: preflight.Inputs."""
    yield from high_rate(args, inputs.shape.params)
    yield from late_counts(args)
    yield from what_is_unread(args, inputs.rows + inputs.eval_rows, inputs.reward_facts.reads)
    yield from what_is_not_computed(inputs.lm.config)


# ---- numbers ----

def high_rate(args, parameters: int):
    """Yields a sentence if --lr is far above the usual rate. parameters: of the model."""
    usual = replace(args, lr=None)
    usual.choose_rates(parameters)
    if args.lr and args.lr >= 100 * usual.lr:
        yield (f"--lr {args.lr:g} is {args.lr / usual.lr:,.0f} times the usual rate for a model "
               f"of this size. Would work: --lr {usual.lr:g}.")


def late_counts(args):
    """Yields a sentence for each count of steps that a run of so few steps does not reach."""
    if args.eval_only or not args.steps:
        return
    warmup, wait = args.warmup_steps, 0
    if args.needs_critic:
        wait = args.critic_warmup_steps
    if warmup and warmup + wait >= args.steps:
        after = f" after --critic_warmup_steps {wait}" if wait else ""
        yield (f"--warmup_steps {warmup}{after} ends when the {args.steps} --steps do, or later: "
               "the rate only rises.")
    for name, every in (("eval_every", args.eval_every),
                        ("save_every", args.save_every)):
        if (every or 0) > args.steps:
            yield f"--{name} {every} is more than --steps {args.steps}: it does nothing."


# ---- columns ----

# Names of columns that belong to a question, and of those that tell of its answer or its origin.
ASKED = re.compile("option|choice|context|passage|premise|hypothes|document|paragraph|evidence|"
                   "table|schema|story|article|hint|^input|^(prompt|question|problem)$")
BESIDE = re.compile("answer|solution|respon|complet|generat|reason|rational|explan|thought|trace|"
                    "output|label|messages|conversations|extra_info|reward|meta|url|source")
LONG = 100  # characters of a text that may be a part of a question, whatever its column is called


def what_is_unread(args, rows: list[data.Row], reads: list[str]):
    """Yields a sentence if columns that look like a part of the question, such as choices or a long
    text, are not in the prompt and no reward or environment reads them. reads: the parameters of
    the rewards. A function that takes all columns reads those that its file names."""
    flags = vars(args) | {"data": "", "eval_data": ""}
    files = {*re.findall(r"'([^']+\.py):", repr([*flags.values()]))}
    there = filter(None, map(find_file, sorted(files)))
    code = "".join(path.read_text(errors="replace") for path in there)
    template = args.prompt_template or ""
    found = {}  # in the order of the row's columns
    for row in rows[:FIRST]:
        for column, value in row.columns.items():
            texts, name = texts_in(value), column.lower()
            long = isinstance(value, list | dict) or len("".join(texts)) > LONG
            if (ASKED.search(name) or long and not BESIDE.search(name)) and not (
                    column in reads or column in row.origins.values() or column in KEYS
                    or f"{{{column}}}" in template
                    or re.search(rf"\b{re.escape(column)}\b", code)
                    or all(as_words(text.strip(), row.prompt) for text in texts)):
                found[column] = row
    if found:
        own = "{prompt}" if "question" in found else "{question}"
        filled = "\\n".join([own, *(f"{{{column}}}" for column in found)])
        row = next(iter(found.values()))
        yield (f"nothing reads {', '.join(found)} of row {row.number} of {row.source}: is it a "
               f"part of the question? Would work: --prompt_template '{filled}'.")


def as_words(text: str, prompt: str) -> bool:
    """Returns whether a text stands in a prompt, and not only as a part of a word."""
    return bool(re.search(
        rf"(?:(?<!\w)|(?!\w)){re.escape(text)}(?:(?!\w)|(?<!\w))", prompt))


def texts_in(value) -> list[str]:
    """Returns the texts in a value, at any depth."""
    if isinstance(value, dict | list):
        return sum(map(texts_in, value.values() if isinstance(value, dict) else value), [])
    return [value] if isinstance(value, str) else []


# ---- config.json ----

# Of the heads of classifiers, which a language model has not, nothing is said.
TRAINED = re.compile(r"(?!classifier|summary).*(drop|jitter|(aux|z|balanc\w*)_loss)")


def asked(config: dict) -> list[str]:
    """Returns ["KEY VALUE", …]: what a configuration, or one in it, asks for in training only, such
    as dropout. The gradient of a policy is that of the function which sampled, and the engine has
    none of these."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += asked(value)
        elif TRAINED.match(str(key)) and type(value) in (int, float) and value > 0:
            found.append(f"{key} {value:g}")
    return found


def what_is_not_computed(config):
    """Yields a sentence if the configuration of the model asks for something in training only: a
    run is the same for all of its values."""
    if found := asked(config.to_dict()):
        yield (f"config.json has {', '.join(found)}: a training here does without, as the engine "
               "does.")
