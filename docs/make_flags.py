"""Writes the tables of docs/use/flags.md: defaults, and the docstrings that --help prints."""
import ast
import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import distill, grpo, ppo, sft  # noqa: E401, E402, I001
from keeping.checkpoint import FIXED, SAME_UPDATE  # noqa: E402

PAGE, BEGIN = ROOT / "docs/use/flags.md", "<!-- the tables: written by docs/make_flags.py -->\n"


def typed(value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return "none" if text in ("", "None") else text


def documented(cls) -> dict[str, str]:
    """{field: its docstring} of the fields that this class adds to those that it extends."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    return {field.target.id: " ".join(text.value.value.replace("|", "\\|").split())
            for field, text in zip(body, body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)}


def tables() -> str:
    found, text = {}, ""  # {(group, class): {flag: {default: scripts}}}
    for args in (script.Args() for script in (grpo, ppo, sft, distill)):
        owners = [("", cls, args) for cls in type(args).__mro__[::-1] if is_dataclass(cls)]
        owners += [(name, type(v), v) for name, v in vars(args).items() if is_dataclass(v)]
        for group, cls, values in owners:
            for flag in documented(cls):
                defaults = found.setdefault((group, cls), {}).setdefault(flag, {})
                defaults.setdefault(typed(getattr(values, flag)), []).append(args.script)
    for (group, cls), flags in sorted(found.items(), key=lambda item: item[0][0] != ""):
        scripts = sum(next(iter(flags.values())).values(), [])
        of = "all scripts" if len(scripts) == 4 else ", ".join(scripts)
        text += f"| **{group} options of {of}** | | | |\n".replace("** o", "**o")
        for flag, meaning in documented(cls).items():
            usual, *others = flags[flag].items()
            default = "; ".join([usual[0], *(f"{', '.join(s)} {v}" for v, s in others)])
            kept = "same" if flag in SAME_UPDATE else "fixed" if flag in FIXED else ""
            text += f"| `--{flag}` | {default} | {meaning} | {kept} |\n"
    return "| flag | default | meaning and unit | update |\n|---|---|---|---|\n" + text


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + tables())
