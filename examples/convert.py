"""Rows of other systems as docs/use/data_and_rewards.md has them: a function for each form.

    python examples/convert.py chats rows.jsonl > mine.jsonl
"""
import argparse
import ast
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import data

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool",
         "function_call": "assistant", "tool_call": "assistant"}
WEIGHTS = ("loss", "loss_mask", "loss_scale", "loss_weight", "mask", "train", "training",
           "trainable", "train_on_turn")  # 0 or false: the turn is not learned


def chats(row):
    """LLaMA-Factory, ms-swift, axolotl: roles, calls as messages, other names of a weight."""
    found = [message(m) for m in row.get("messages") or row["conversations"]]
    rest = {name: value for name, value in row.items() if name not in ("messages", "conversations")}
    return rest | {"messages": found}


def message(m):
    role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
    found = {"role": ROLES.get(role, role), "content": content}
    calls = content if role.endswith("_call") else m.get("function_call")
    if calls:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        calls = calls if isinstance(calls, list) else [calls]
        found |= {"content": None, "tool_calls": [{"type": "function", "function": call}
                                                  for call in calls]}
    weights = [m[name] for name in ("weight", *WEIGHTS) if name in m]
    return found | ({"weight": min(map(int, weights))} if weights else {})


def alpaca(row):
    """instruction, input and output, with the turns before them in `history`."""
    turns = [*(row.get("history") or []),
             [f"{row['instruction']}\n{row.get('input') or ''}".strip(), row["output"]]]
    return {"messages": [{"role": role, "content": text} for turn in turns
                         for role, text in zip(("user", "assistant"), turn, strict=True)]}


def pandas(row):
    """Objects and lists that to_csv wrote as Python's own text."""
    return {name: ast.literal_eval(value) if str(value)[:1] in ("{", "[") else value
            for name, value in row.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=["chats", "alpaca", "pandas"])
    parser.add_argument("data", help="rows, as --data takes them")
    options = parser.parse_args()
    for row in data.read(options.data)[0]:
        print(json.dumps(globals()[options.form](row)))
