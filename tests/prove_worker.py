"""`prove_worker.py CASES OUT`: tools/prove.py on several files, in one process: torch is imported
once. CASES: json, [[file, flags, numbers of the promises], …]. OUT: [{number: [figure, what]}, …]
"""
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
import torch  # noqa: E402

from running.args import parse  # noqa: E402
from tools import prove  # noqa: E402


def main(cases: str, out: str) -> None:
    torch.set_num_threads(1)
    found = []
    for path, flags, numbers in json.loads(Path(cases).read_text()):
        print(path, *flags, flush=True)
        file = prove.load(path)
        sys.argv = [path, *flags]
        results = prove.prove(file, parse(file.Args, ""), [prove.PROMISES[n - 1] for n in numbers])
        print(*(f"{n} {r.figure:.0e} {r.what}" for n, r in zip(numbers, results, strict=True)),
              sep="\n", flush=True)
        found.append({n: [r.holds, r.what] for n, r in zip(numbers, results, strict=True)})
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
