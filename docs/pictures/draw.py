"""Draws the pictures of the docs, as SVG made of plain strings.

    python docs/pictures/draw.py             # all of them
    python docs/pictures/draw.py memory      # one

Numbers come from where they are made: docs/learn/one_step.md, plan.py, results/, ladder/,
exercises/curves/.
"""
import argparse
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
WIDTH = 760
INK, GREY, PALE, LINE = "#1f2328", "#59636e", "#eaeef2", "#afb8c1"
BLUE, GREEN, ORANGE, RED = "#b6d7ff", "#aceebb", "#ffd8b5", "#ffcecb"
USUAL = {"font-family": "sans-serif", "font-size": "13", "fill": INK, "text-anchor": "start",
         "font-weight": "normal"}  # of a picture's words; others say how they differ
DARK = ["#0969da", "#1a7f37", "#bc4c00", "#8250df", "#cf222e"]


def text(x, y, words, size=13, color=INK, anchor="start", weight="normal", mono=False) -> str:
    words = str(words).replace("&", "&amp;").replace("<", "&lt;")
    given = {"font-family": "monospace" if mono else "sans-serif", "font-size": f"{size}",
             "fill": color, "text-anchor": anchor, "font-weight": weight}
    differ = "".join(f' {name}="{value}"' for name, value in given.items() if value != USUAL[name])
    return f'<text x="{x:g}" y="{y:g}"{differ}>{words}</text>'


def upwards(x, y, words) -> str:
    """The name of an axis of values, its middle at this place."""
    return (f'<g transform="translate({x:g} {y:g}) rotate(-90)">'
            f'{text(0, 0, words, 11, GREY, "middle")}</g>')


def box(x, y, w, h, fill, words="", size=13, line=LINE, mono=True, color=INK) -> str:
    label = text(x + w / 2, y + h / 2 + size * 0.36, words, size, color, "middle", mono=mono)
    return (f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            f'stroke="{line}"/>' + (label if str(words) else ""))


def arrow(x1, y1, x2, y2, color=GREY) -> str:
    return (f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.4" marker-end="url(#head)"/>')


def rule(x1, y1, x2, y2, color=LINE, dash="") -> str:
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}"{dash}/>')


def curve(points, color, dash="", width=1.3) -> str:
    points = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in points)
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<polyline fill="none" stroke="{color}" stroke-width="{width}"{dash} '
            f'points="{points}"/>')


def page(height: float, *parts: str) -> str:
    head = (f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" font-family="sans-serif" font-size="13" '
        f'fill="{INK}">', f"<defs>{head}</defs>",
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>', *parts, "</svg>", ""])


def part_of_a_step(x, y, names, words) -> list[str]:
    """A box with the files of one part of a step, and what it does."""
    return [box(x, y, 176, 66, BLUE),
            text(x + 88, y + 28, names, 15, anchor="middle", weight="bold", mono=True),
            text(x + 88, y + 51, words, 13, anchor="middle")]


def step() -> str:
    """One step, with the files that make it: those of README's first table."""
    left, middle, right, top, low = 32, 292, 552, 104, 254
    out = [text(20, 26, "One step, and the files that make it", 15, weight="bold"),
           text(20, 54, "once, before the first step:", 13, GREY),
           text(200, 54, "flags.py, preflight.py, plan.py, parts/guards", 14, mono=True),
           f'<rect x="14" y="72" width="732" height="296" rx="10" fill="none" stroke="{LINE}" '
           'stroke-dasharray="6 4"/>']
    for x, y, names, words in (
            (left, top, "data.py", "the next rows → prompts"),
            (middle, top, "rollout.py", "samples with vLLM"),
            (right, top, "rewards.py", "scores each completion"),
            (right, low, "grpo.py losses.py", "advantages and the loss"),
            (middle, low, "batch.py", "packs the micro-batches"),
            (left, low, "model.py", "FSDP2: gradient, update")):
        out += part_of_a_step(x, y, names, words)
    for x, words in (left + 176, "prompts"), (middle + 176, "completions"):
        out += [arrow(x + 4, top + 33, x + 80, top + 33),
                text(x + 42, top + 24, words, 12, anchor="middle")]
    for x, words in (right, "advantages"), (middle, "tokens"):
        out += [arrow(x - 4, low + 33, x - 80, low + 33),
                text(x - 42, low + 24, words, 12, anchor="middle")]
    x, y = left + 88, (top + 66 + low) / 2
    out += [arrow(right + 88, top + 70, right + 88, low - 4),
            text(right + 98, y + 5, "rewards", 13),
            rule(x, low - 4, x, y, GREY), rule(x, y, middle + 88, y, GREY),
            arrow(middle + 88, y, middle + 88, top + 70),
            text(x + 12, y - 8, "new weights, for the next step", 13),
            text(32, 352, "dist.py", 15, weight="bold", mono=True),
            text(104, 352, "on every rank: each has its share of the completions, and all take "
                 "the same step", 13),
            text(20, 396, "between steps:", 13, GREY),
            text(200, 396, "run.py, log.py, evaluate.py, checkpoint.py", 14, mono=True)]
    return page(412, *out)


def seeds_of(result: str) -> tuple[list, list]:
    """The rewards of each seed by step, and the accuracies before and after, of a result."""
    found = json.loads((ROOT / f"results/{result}.json").read_text())["seeds"].values()
    return ([one["steps"]["reward/exact"] for one in found],
            [one["evaluations"]["eval/pass@1"] for one in found])


def first_run() -> str:
    """What ./run.sh learns, beside a random reward: the mean of the seeds, lowest and highest."""
    x0, y0, w, h, x1, w1 = 62, 74, 390, 190, 540, 190
    out = [text(20, 26, "./run.sh: a tiny model learns to sort six digits", 15, weight="bold"),
           text(x0, 58, "share of right samples, by step", 13, weight="bold"),
           text(x1, 58, "accuracy on held-out rows", 13, weight="bold")]
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = y0 + h * (1 - part)
        out += [rule(x, y, x + width, y, PALE if part else LINE)
                for x, width in ((x0, w), (x1, w1))]
        out += [text(x - 8, y + 5, f"{part:g}", 13, GREY, "end") for x in (x0, x1)]
    for at in (1, 10, 20, 35):
        out.append(text(x0 + w * at / 35, y0 + h + 20, at, 13, GREY, "middle"))
    for at, words in (40, "before"), (150, "after"):
        out.append(text(x1 + at, y0 + h + 20, words, 13, GREY, "middle"))
    for job, color, dash, words in (("sort-grpo", DARK[0], "", "trained on the task's reward"),
                                    ("sort-grpo-coin", DARK[2], "7 4", "on a random reward")):
        rewards, accuracies = seeds_of(job)
        low, high = [[(x0 + w * at / 35, y0 + h * (1 - pick(values)))
                      for at, values in enumerate(zip(*rewards, strict=True), 1)]
                     for pick in (min, max)]
        band = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in low + high[::-1])
        out.append(f'<polygon points="{band}" fill="{color}" fill-opacity="0.18"/>')
        out.append(curve([(x0 + w * at / 35, y0 + h * (1 - sum(values) / len(values)))
                          for at, values in enumerate(zip(*rewards, strict=True), 1)], color, dash,
                         2))
        ends = []
        for x, values in zip((x1 + 40, x1 + 150), zip(*accuracies, strict=True), strict=True):
            mean = sum(values) / len(values)
            ends.append((x, y0 + h * (1 - mean)))
            out += [rule(x, y0 + h * (1 - min(values)), x, y0 + h * (1 - max(values)), color),
                    f'<circle cx="{x:g}" cy="{ends[-1][1]:.1f}" r="4" fill="{color}"/>']
        out += [curve(ends, color, dash, 2),
                text(x1 + 158, ends[1][1] + (14 if not dash else -8), f"{mean:.3f}", 13, color)]
        x = x0 if not dash else x0 + 375
        out += [curve([(x, y0 + h + 52), (x + 26, y0 + h + 52)], color, dash, 2),
                text(x + 34, y0 + h + 57, f"{words}: mean of {len(rewards)} seeds", 13)]
    out.append(text(x0, y0 + h + 80, "Bands: lowest to highest seed. A random reward gives each "
                    "completion 1 or 0 by chance.", 13, GREY))
    return page(y0 + h + 96, *out)


def shift() -> str:
    """Completion 1 of docs/learn/one_step.md: ids, outputs, targets, log-probs."""
    found = (ROOT / "docs/learn/one_step.md").read_text()
    numbers = re.search(r"^logp \(14,\)\n.*\n +1: +(.*)", found, re.M)[1].split()
    ids = [1, 3, 2, 4, 4, 0]
    names = ["&lt;user&gt;", "a", "&lt;assistant&gt;", "b", "b", "&lt;end&gt;"]
    x, w = 150, 96
    title = "One completion in the model: the output at a token predicts the next token"
    out = [text(20, 20, title, 14, weight="bold"), '<g transform="translate(0 24)">']

    def at(i):
        return x + i * w

    out += [text(at(0) + 1.5 * w, 24, "prompt", 13, GREY, "middle"),
            text(at(3) + 1.5 * w, 24, "completion", 13, GREY, "middle")]
    for y, label in ((52, "position"), (84, "ids"), (170, "output"), (256, "targets"),
                     (288, "log-probs")):
        out.append(text(20, y, label, 13))
    for i, (token, name) in enumerate(zip(ids, names, strict=True)):
        fill = PALE if i < 3 else GREEN
        out += [text(at(i) + w / 2, 52, i, 13, GREY, "middle", mono=True),
                box(at(i), 64, w - 6, 30, fill, token),
                text(at(i) + w / 2 - 3, 110, name, 11, GREY, "middle").replace("&amp;", "&")]
        used = 2 <= i <= 4
        out += [arrow(at(i) + w / 2 - 3, 116, at(i) + w / 2 - 3, 148),
                box(at(i), 150, w - 6, 30, BLUE if used else "white",
                    "logits" if used else "not used", 12, color=INK if used else GREY)]
        if used:
            out.append(arrow(at(i) + w / 2, 182, at(i + 1) + w / 2 - 8, 234))
    for i in range(3, 6):
        out += [box(at(i), 236, w - 6, 30, GREEN, ids[i]),
                box(at(i), 268, w - 6, 30, "white", numbers[i - 3])]
    out += [text(at(0), 256, "The log-probs of the sampled", 12, GREY),
            text(at(0), 273, "tokens, in nats: one number", 12, GREY),
            text(at(0), 290, "for each target.", 12, GREY), "</g>"]
    return page(338, *out)


def denominator() -> str:
    """One denominator, beside a mean of means."""
    rows = [(0, 0, 2, 3.0), (0, 1, 6, 1.0), (1, 0, 1, 8.0), (1, 1, 3, 0.0)]
    total = sum(n for *_, n, _ in rows)
    right = sum(n * loss for *_, n, loss in rows) / total
    wrong = sum(loss for *_, loss in rows) / len(rows)
    out = [text(20, 26, f"A minibatch of {len(rows)} completions, {total} tokens, on 2 ranks with "
                "2 micro-batches each", 14, weight="bold"),
           text(20, 48, "a cell is a token, and its number is the token's loss", 12, GREY),
           text(430, 78, f"one denominator: {total}", 13, "#1a7f37", weight="bold"),
           text(610, 78, "mean of means", 13, "#cf222e", weight="bold")]
    for i, (rank, micro, n, loss) in enumerate(rows):
        y = 92 + i * 42 + rank * 14
        if micro == 0:
            out.append(text(20, y + 42, f"rank {rank}", 13))
        out += [box(90 + k * 34, y, 30, 30, GREEN, f"{loss:g}") for k in range(n)]
        out += [text(320, y + 20, f"micro-batch {micro}", 12, GREY),
                text(430, y + 20, f"{n} × {loss:g} / {total} = {n * loss / total:.2f}", 13,
                     mono=True),
                text(610, y + 20, f"{n * loss:g} / {n} = {loss:.2f}", 13, mono=True)]
    y = 92 + 4 * 42 + 24
    out += [rule(430, y, 740, y, INK),
            text(430, y + 24, f"sum = {right:.2f}", 14, "#1a7f37", weight="bold", mono=True),
            text(610, y + 24, f"mean = {wrong:.2f}", 14, "#cf222e", weight="bold", mono=True),
            text(20, y + 8, "The sum is the mean over all tokens, with any cut.", 12, GREY),
            text(20, y + 25, "In the mean of means, a token of a short", 12, GREY),
            text(20, y + 42, "micro-batch counts more, and the cut matters.", 12, GREY)]
    return page(y + 56, *out)


def packed() -> str:
    """Padded rows, the packed input with its positions, and who attends to whom."""
    rows, cell, out = [("a", 4), ("b", 2), ("c", 3)], 30, []
    colors = {"p": PALE, "a": BLUE, "b": GREEN, "c": ORANGE}
    out.append(text(20, 24, "padded: 3 rows × 6 = 18 tokens", 14, weight="bold"))
    for i, (name, n) in enumerate(rows):
        cells = ["p"] * 3 + [name] * (n - 1) + [""] * (4 - n)
        out += [box(20 + k * cell, 36 + i * 34, cell - 2, cell, colors.get(c, "white"), c)
                for k, c in enumerate(cells)]
    cells = [("p", k) for k in range(3)] + [(name, 3 + k) for name, n in rows for k in range(n - 1)]
    out += [text(20, 176, f"packed: {len(cells)} tokens", 14, weight="bold"),
            text(20, 240, "position", 12, GREY)]
    x = 20
    out += [box(x + k * cell, 188, cell - 2, cell, colors[c], c) for k, (c, _) in enumerate(cells)]
    out += [text(x + k * cell + 14, 258, p, 13, GREY, "middle", mono=True)
            for k, (_, p) in enumerate(cells)]
    out += [text(20, 284, "p: the prompt; a, b, c: its three completions.", 12),
            text(20, 303, "The prompt is there once. The last token of a", 12, GREY),
            text(20, 320, "completion predicts nothing: both leave it out.", 12, GREY),
            text(20, 337, "Positions of a completion go on after its prompt.", 12, GREY)]
    x, y, c = 440, 56, 29
    out += [text(x - 20, 24, "attention: a row sees the filled columns", 14, weight="bold")]
    for i, (who, _) in enumerate(cells):
        out += [text(x - 14, y + i * c + 19, who, 13, GREY, "middle", mono=True),
                text(x + i * c + 14, y - 8, who, 13, GREY, "middle", mono=True)]
        for j, (whom, _) in enumerate(cells):
            sees = j <= i and whom in ("p", who)
            out.append(box(x + j * c, y + i * c, c - 2, c - 2, colors[whom] if sees else "white"))
    return page(348, *out)


def memory_table() -> str:
    """memory.py's own plan for one GPU."""
    import grpo
    import plan
    from bench.gpu import skeleton
    from memory import GIB, Memory
    from model_files import shape_from

    args = replace(grpo.Args(model="Qwen/Qwen2.5-7B-Instruct", batch=8, group=64,
                             max_tokens=4096), checkpointing=True)
    found = Memory(plan.Plan(args, 4, None, 0), shape_from(skeleton("7b")), 80 * GIB)
    color = {"set aside": LINE, "weights": "#0969da", "gradients": "#cf222e",
             "moments": "#54aeff", "micro-batch": "#2da44e", "logits": "#a6e3b5",
             "engine": "#fb8f44"}
    bottom, scale = 336, 280 / 80
    out = [text(20, 24, "Planned memory of one GPU in the two halves of a step: Qwen2.5-7B on 4 "
                "GPUs", 14, weight="bold"), text(20, 46, "GiB", 12, GREY)]
    for gib in range(0, 81, 20):
        y = bottom - gib * scale
        out += [rule(62, y, 434, y, INK if gib in (0, 80) else PALE, "5 4" if gib == 80 else ""),
                text(54, y + 4, f"{gib}", 12, GREY, "end")]
    out.append(text(440, bottom - 80 * scale + 4, "all of the GPU", 12, GREY))
    for column, (name, total) in enumerate(zip(("rollout", "training"), found.sums, strict=True)):
        x, y = 92 + column * 166, bottom
        for part, sizes in found.parts.items():
            h = sizes[column] / GIB * scale
            if not h:
                continue
            y -= h
            out.append(f'<rect x="{x}" y="{y:.1f}" width="144" height="{h:.1f}" '
                       f'fill="{color[part]}" stroke="white" stroke-width="0.7"/>')
        out += [text(x + 72, y - 6, f"{total / GIB:.1f}", 13, INK, "middle"),
                text(x + 72, bottom + 20, name, 13, INK, "middle")]
    used = [part for part in found.parts if any(found.parts[part])]
    for i, part in enumerate(reversed(used)):  # in the order of the columns
        sizes = [f"{size / GIB:.1f}" for size in found.parts[part]]
        out += [box(470, 76 + 28 * i, 16, 16, color[part], line="white"),
                text(494, 89 + 28 * i, part), text(660, 89 + 28 * i, sizes[0], anchor="end"),
                text(720, 89 + 28 * i, sizes[1], anchor="end")]
    out += [text(660, 60, "rollout", 12, GREY, "end"), text(720, 60, "training", 12, GREY, "end")]
    return page(372, *out)


def turns() -> str:
    """Ids are only appended. What the engine sampled is trained on."""
    parts = [("prompt", 150, PALE, "given"), ("answer 1", 120, GREEN, "sampled"),
             ("reply 1", 100, ORANGE, "appended"), ("answer 2", 110, GREEN, "sampled"),
             ("reply 2", 80, ORANGE, "appended"), ("answer 3", 90, GREEN, "sampled")]
    x0, out = 96, []
    ends = [sum(p[1] for p in parts[:i]) for i in range(len(parts) + 1)]
    out.append(text(20, 26, "Three turns: each call gets all ids so far, and adds its own", 14,
                    weight="bold"))
    for turn in range(3):
        y, upto = 46 + turn * 46, 1 + 2 * turn
        out.append(text(20, y + 21, f"turn {turn + 1}", 13))
        for i in range(upto):
            name, w, fill, _ = parts[i]
            out.append(box(x0 + ends[i], y, w - 3, 32, fill, name, 12, mono=False, color=GREY))
        name, w, fill, _ = parts[upto]
        out.append(box(x0 + ends[upto], y, w - 3, 32, fill, name, 12, line=INK, mono=False))
        if turn == 0:
            out.append(text(x0 + ends[upto + 1] + 8, y + 21, "the engine samples it", 12, GREY))
        if turn == 1:
            out.append(text(x0 + ends[upto + 1] + 8, y + 21, "no token before is changed", 12,
                            GREY))
    y = 46 + 3 * 46 + 12
    out += [rule(20, y - 8, 740, y - 8), text(20, y + 21, "episode", 13),
            text(20, y + 57, "sampled", 13), text(20, y + 93, "weight", 13)]
    for i, (name, w, fill, _) in enumerate(parts):
        x, sampled = x0 + ends[i], fill == GREEN
        out.append(box(x, y, w - 3, 32, fill, name, 12, mono=False))
        if i:
            out += [box(x, y + 36, w - 3, 32, "white", "True" if sampled else "False", 12,
                        color=INK if sampled else GREY),
                    box(x, y + 72, w - 3, 32, "white", "1/n" if sampled else "0", 12,
                        color=INK if sampled else GREY)]
    out += [box(20, y + 124, 14, 14, GREEN),
            text(42, y + 136, "sampled by the engine: trained on, with the engine's own ids", 12),
            box(20, y + 146, 14, 14, ORANGE),
            text(42, y + 158, "appended: read by the model, never trained on; n counts the "
                 "sampled tokens alone", 12)]
    return page(y + 172, *out)


def scale(x0, y0, w, h, last: int, low=0.0, high=1.0) -> list[str]:
    """The lines and the numbers of a panel: values, and steps up to the last."""
    out = []
    for part in (0, 0.5, 1):
        y, value = y0 + h * (1 - part), low + (high - low) * part
        out += [rule(x0, y, x0 + w, y, PALE if part else LINE),
                text(x0 - 6, y + 4, f"{value:.3g}", 11, GREY, "end")]
    return out + [text(x0 + w * step / last, y0 + h + 16, step, 11, GREY, "middle")
                  for step in (1, last // 2, last)]


def ends(values: list[float]) -> tuple[float, float]:
    """Round numbers that the values, and 0, are between: multiples of 1, 2 or 5."""
    low, high = min(0, *values), max(0, *values)
    size = 10.0 ** math.floor(math.log10(high - low))
    unit = next(k * size for k in (0.2, 0.5, 1, 2, 5) if high - low <= 4 * k * size)
    return unit * math.floor(low / unit + 1e-9), unit * math.ceil(high / unit - 1e-9)


def sick(name: str, metrics: str, title: str) -> str:
    """Metrics of exercises/curves/NAME.json."""
    units = {"policy/entropy": "nats", "rollout/length_mean": "tokens", "loss/kl": "nats",
             "rollout/logprob_gap_mean": "nats"}
    found = json.loads((ROOT / f"exercises/curves/{name}.json").read_text())
    out = [text(20, 20, title, 14, weight="bold")]
    for i, metric in enumerate(metrics.split()):
        both = [found[run][metric] for run in ("healthy", "run")]
        low, high = ends([*both[0], *both[1]])
        x0, y0, w, h, n = 64 + 243 * i, 62, 186, 120, len(both[0])
        out += [text(x0, y0 - 10, metric, 12, weight="bold"),
                upwards(x0 - 47, y0 + h / 2, units.get(metric, "")),
                text(x0 + w / 2, y0 + h + 30, "step", 11, GREY, "middle")]
        out += scale(x0, y0, w, h, n, low, high)
        for values, color, dash in zip(both, (DARK[1], DARK[4]), ("4 3", ""), strict=True):
            out.append(curve([(x0 + w * step / n, y0 + h * (high - value) / (high - low))
                              for step, value in enumerate(values, 1)], color, dash))
    for x, color, dash, words in ((60, DARK[1], "4 3", "without the mistake"),
                                  (230, DARK[4], "", "with it")):
        out += [rule(x, 232, x + 24, 232, color, dash), text(x + 30, 236, words, 12)]
    return page(248, *out)


def reward_panel(x0, y0, result: str, reward: str, title: str, w=190) -> list[str]:
    """The task's reward of each seed of a result, and that of a coin if it was trained on one."""
    h, out = 130, [text(x0, y0 - 10, title, 11, weight="bold")]
    found = json.loads((ROOT / f"results/{result}.json").read_text())["seeds"]
    runs = [one["steps"] for one in found.values()]
    last = runs[0]["step"][-1]
    out += scale(x0, y0, w, h, last)
    out += [text(x0 + w / 2, y0 + h + 30, "step", 11, GREY, "middle"),
            upwards(x0 - 32, y0 + h / 2, "mean reward")]
    for color, run in zip(DARK, runs, strict=False):
        for key, dash in (("reward/coin", "2 3"), (reward, "")):
            if key in run:
                steps = zip(run["step"], run[key], strict=True)
                out.append(curve([(x0 + w * step / last, y0 + h * (1 - value))
                                  for step, value in steps], color, dash))
    return out


def ladder() -> str:
    """ladder/curves.json: the reward of each file beside that of the one before."""
    found = [*json.loads((ROOT / "ladder/curves.json").read_text()).items()]
    out = [text(20, 20, "The reward of each file of the ladder, and of the one before it", 14,
                weight="bold")]
    for i, (before, after) in enumerate(zip(found, found[1:], strict=False)):
        x0, y0, w, h, last = 60 + 245 * i, 56, 190, 130, len(after[1])
        out += scale(x0, y0, w, h, last)
        out += [text(x0 + w / 2, y0 + h + 30, "step", 11, GREY, "middle"),
                upwards(x0 - 32, y0 + h / 2, "mean reward")]
        for k, ((name, rewards), color, dash) in enumerate(zip(
                (before, after), (GREY, DARK[0]), ("4 3", ""), strict=True)):
            out += [curve([(x0 + w * step / last, y0 + h * (1 - reward))
                           for step, reward in enumerate(rewards, 1)], color, dash),
                    rule(x0, y0 + h + 44 + 18 * k, x0 + 22, y0 + h + 44 + 18 * k, color, dash),
                    text(x0 + 28, y0 + h + 48 + 18 * k, f"{name}.py", 12)]
    return page(262, *out)


def seeds_legend(y, seeds: int) -> list[str]:
    """Which color is which seed, and which line is which reward."""
    out = []
    for i in range(seeds):
        out += [rule(56 + 74 * i, y - 4, 72 + 74 * i, y - 4, DARK[i]),
                text(77 + 74 * i, y, f"seed {i}", 12)]
    x = 66 + 74 * seeds
    return [*out, rule(x, y - 4, x + 22, y - 4, INK), text(x + 27, y, "the task's reward", 12),
            rule(x + 140, y - 4, x + 162, y - 4, INK, "2 3"),
            text(x + 167, y, "the random reward", 12)]


def game() -> str:
    """results/game beside its control."""
    title = text(20, 20, "The guessing game: share of games won, by step", 14, weight="bold")
    return page(266, title, *reward_panel(70, 66, "game", "reward/won", "trained on won or lost",
                                          290),
                *reward_panel(440, 66, "game-coin", "reward/won", "trained on a random reward",
                              290),
                *seeds_legend(254, 3))


def controls() -> str:
    """Three tasks, above their controls with a random reward and with none."""
    out = [text(20, 20, "The task's reward by step: trained on it, on a random reward, sharpened",
                14, weight="bold")]
    for i, (task, name, reward) in enumerate((("sorting", "sort-grpo", "exact"),
                                              ("knights and knaves", "kk", "kk01"),
                                              ("instructions", "instructions", "follows"))):
        x = 60 + 245 * i
        for row, (control, words) in enumerate((
                ("", "its reward"), ("-coin", "random reward"), ("-sharpen", "sharpened"))):
            out += reward_panel(x, 62 + 206 * row, name + control, f"reward/{reward}",
                                f"{task}: {words}")
    return page(672, *out, *seeds_legend(660, 5))


def pipelines() -> str:
    """results/pipelines.json: the held-out accuracy of each seed by what was spent until then."""
    from results.pipelines import BEFORE
    found = json.loads((ROOT / "results/pipelines.json").read_text())["pipelines"]
    out = [text(20, 24, "From a base model to a policy: held-out accuracy of each seed", 14,
                weight="bold")]
    w, h, y0 = 290, 150, 60
    for x0, what, most in (60, "tokens", 12000), (430, "seconds", 1000):
        for value in (0, 0.5, 1):
            y = y0 + h * (1 - value)
            out += [rule(x0, y, x0 + w, y, PALE if value else LINE),
                    text(x0 - 6, y + 4, f"{value:g}", 11, GREY, "end")]
        for part in (0, 0.5, 1):
            out.append(text(x0 + 6 + (w - 6) * part, y0 + h + 16, f"{most * part:,.0f}", 11, GREY,
                            "middle"))
        words = {"tokens": "tokens sampled", "seconds": "seconds of training"}[what]
        out.append(upwards(x0 - 32, y0 + h / 2, "held-out accuracy"))
        out.append(text(x0 + w / 2, y0 + h + 32, f"{words}, earlier stages included", 11, GREY,
                        "middle"))
        for color, (pipeline, seeds) in reversed([*zip(DARK, found.items(), strict=True)]):
            for seed, run in seeds.items():
                before = sum(found[one][seed][what] for one in BEFORE[pipeline])
                out.append(curve([(x0 + 6 + (w - 6) * (before + p[what]) / most,
                                   y0 + h * (1 - p["pass"])) for p in run["points"]], color))
    told = {"sft": "128 right answers", "sft-long": "800 right answers", "grpo": "from the base",
            "sft-grpo": "GRPO after sft", "distill": "taught by sft-grpo"}
    for i, (color, name) in enumerate(zip(DARK, found, strict=True)):
        x, y = 60 + 240 * (i % 3), y0 + h + 56 + 20 * (i // 3)
        out += [rule(x, y, x + 22, y, color), text(x + 28, y + 4, f"{name}: {told[name]}", 12)]
    return page(y0 + h + 96, *out)


PICTURES = {"shift": shift, "denominator": denominator, "packed": packed, "memory": memory_table,
            "turns": turns, "pipelines": pipelines, "game": game, "controls": controls,
            "ladder": ladder}
SICK = {  # the metrics that show it
    "stale": ("10", "rollout/logprob_gap_mean policy/entropy reward/mean",
              "A stale prefix cache: the engine keeps keys and values of old weights"),
    "temperature": ("9", "rollout/logprob_gap_mean policy/entropy reward/mean",
                    "A wrong temperature: the engine samples at half the trainer's"),
    "kl_sign": ("11", "loss/kl grad/norm reward/mean", "A KL term with the wrong sign"),
    "rate": ("13", "policy/entropy rollout/length_mean reward/mean",
             "A learning rate that is too high: 0.01 instead of 3e-4"),
    "collapse": ("collapse", "policy/entropy grad/norm reward/mean",
                 "An entropy bonus with the wrong sign"),
    "hacked": ("12", "reward/mean reward/exact rollout/length_mean",
               "A hacked reward: it counts digits, and reward/exact is only measured")}
PICTURES |= {f"sick_{name}": partial(sick, *what) for name, what in SICK.items()}
PICTURES |= {"step": step, "first_run": first_run}  # of README.md
PICTURES = {name: made for name, made in PICTURES.items() if (HERE / f"{name}.svg").exists()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=", ".join(PICTURES))
    names = parser.parse_args().names
    if unknown := {*names} - PICTURES.keys():
        sys.exit(f"error: no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        (HERE / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main()
