"""other_systems.py: flags of other systems, and what they are called here, from two pages."""
import re
from pathlib import Path

ERRORS = Path(__file__).resolve().parents[2] / "docs/use/recipes.md"
FLAGS = Path(__file__).with_name("README.md")
ELSEWHERE = {  # what is no flag of a script
    r"(num|n)?_?gpus(_per_node)?|nproc(_per_node)?|num_processes|world_size":
        "the number of ranks is torchrun's: torchrun --nproc_per_node {value} {script}",
    "nnodes|num_nodes|num_machines":
        "the number of machines is torchrun's: torchrun --nnodes {value} … {script}",
    r"config(_(file|path|name))?|cfg|yaml": "there are no config files: flags stand on the command "
        "line, and {script} --help lists them",
    "score_tokens": "it is called --logprob_tokens now",
    "critic_score_tokens": "it is called --critic_value_tokens now",
    "deepspeed|fsdp|accelerate|ds_config": "FSDP2 is always on, and has no file of its own"}


def theirs(words: list[str], script: str = "grpo.py") -> tuple[list[str], list[str]]:
    """Returns a sentence for each of the words that is another system's flag (`--NAME VALUE`,
    `--NAME=VALUE`, or as verl and EasyR1 have it NAME=VALUE); and the words without them and their
    values."""
    sentences, rest, dropped = [], [], False
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        flag, equals, value = word.partition("=")
        dashed, found = word.startswith("--"), []
        if dashed or equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", flag):
            value = value if equals else "" if after.startswith("--") else after
            found = ours(flag) or in_errors(flag) or elsewhere(flag, value, script)
            sentences += found
        if dashed:
            dropped = bool(found)
        if not dropped and not found:
            rest.append(word)
    return sentences, rest


def last(flag: str) -> str:
    """Returns the name of a flag, as a part of a dotted name: verl's are long."""
    return "." + flag.lstrip("-+").replace("-", "_")


def table(page: Path, heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading of a page, its head first; [] without it."""
    text = page.read_text() if page.exists() else ""
    section = text.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def names(flag: str, cell: str) -> bool:
    """Returns whether the flag is one of the words in backticks of a cell."""
    return any(last(flag).endswith("." + word) for word in re.findall(r"`([\w.]+)`", cell))


def ours(flag: str) -> list[str]:
    """Returns a sentence if other systems have the flag: what it is called here."""
    found, (head, *rows) = [], table(FLAGS, "I come from another system")
    for here, *theirs in rows:
        known = [system for system, cell in zip(head[1:], theirs, strict=True) if names(flag, cell)]
        if known:
            whose = " and ".join(f"{system}'s" for system in known)
            whose = whose.replace(" and ", ", ", len(known) - 2)
            found.append(f"{whose} {'' if found else flag + ' '}is {here.replace('`', '')}")
    return [", ".join(found) + " here."] if found else []


def in_errors(flag: str) -> list[str]:
    """Returns a sentence if the table of errors has the flag: what to use here."""
    for words, here in table(ERRORS, "Errors of other systems"):
        if names(flag, words):
            return [f"{flag}: " + re.sub(r"\[(.+?)\]\(.*?\)", r"\1", here).replace("`", "")]
    return []


def elsewhere(flag: str, value: str, script: str) -> list[str]:
    """Returns a sentence for a flag of ELSEWHERE."""
    name = last(flag).rpartition(".")[2]
    return [f"{flag}: {said.format(value=value or 'N', script=script)}."
            for known, said in ELSEWHERE.items() if re.fullmatch(known, name)]
