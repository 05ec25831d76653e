"""tools/watched.py: a script of the project, with an engine that notes what it uses.

    python tools/watched.py grpo.py FLAGS      writes runs/NAME/watched.json too

Bytes are those of this GPU that are in use, of all processes (torch.cuda.mem_get_info), in GiB: an
engine's memory is in no counter of torch. On a CPU there are none. `./run.sh gpu` and bench/gpu.py
read the file.
"""
import importlib
import json
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import batch
import dist
import rollout
import run
from flags import parse
from memory import GIB

kernels = set()  # of the trainer's attention, by their names in batch.py


def noting(kernel):
    """The kernel, which notes that it was called."""
    def called(*args, **options):
        kernels.add(kernel.__name__)
        return kernel(*args, **options)
    return called


def in_use(device: torch.device, cached: bool = False) -> float:
    """GiB of the GPU; on a CPU 0. cached: with what torch keeps and does not use."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    if not cached:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def of_worker(worker) -> dict[str, str]:
    """What vLLM chose: its runner, as the module of the class, and the kernels of attention."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return {"runner": type(worker.model_runner).__module__, "kernels": " ".join(sorted(
        {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}))}


class Watched(rollout.Engine):
    """The engine of the run. gib: what is in use before there is an engine; awake and asleep the
    first time, when the trainer has no moments yet; and at the peak of the rollouts. seconds: of
    each sleep and load. Of all ranks the largest numbers are written."""

    def __init__(self, args, world, inputs, *given):
        self.gib, self.seconds = {"before": in_use(world.device)}, defaultdict(list)
        self.memory = inputs.plan.memory
        super().__init__(args, world, inputs, *given)
        [self.chosen] = self.llm.collective_rpc(of_worker)

    @contextmanager
    def timed(self, name: str):
        began = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)

    @contextmanager
    def generating(self, policy):
        """torch keeps what it took until the engine wakes the next time, so what is in use at the
        end is the peak."""
        with super().generating(policy):
            yield
            used = in_use(self.world.device, cached=True)
            self.gib["rollout"] = max(used, self.gib.get("rollout", 0.0))

    def load(self, policy):
        with self.timed("load"):
            super().load(policy)

    def sleep(self):
        first = "asleep" not in self.gib
        if first:
            self.gib["awake"] = in_use(self.world.device)
        with self.timed("sleep"):
            super().sleep()
        if first:
            self.gib["asleep"] = in_use(self.world.device)

    def close(self):
        ranks = self.world.gather([{"gib": self.gib, "seconds": self.seconds,
                                    "trainer": sorted(kernels)}])
        memory = self.memory
        found = self.chosen | {"trainer": ranks[0]["trainer"], "ranks": self.world.size} | {
            what: {name: np.max([rank[what][name] for rank in ranks], axis=0).tolist()
                   for name in ranks[0][what]} for what in ("gib", "seconds")}
        found["plan"] = {"rollout": memory.sums[0] / GIB, "training": memory.sums[1] / GIB,
                         "asleep": memory.parts["engine"][1] / GIB,
                         "set aside": memory.parts["set aside"][1] / GIB}
        if self.world.rank == 0:
            (self.log.folder / "watched.json").write_text(json.dumps(found, indent=1))
        super().close()


def main(script: str) -> None:
    batch.varlen, batch.blocks = noting(batch.varlen), noting(batch.blocks)
    run.Engine = Watched
    module = importlib.import_module(script.removesuffix(".py"))
    dist.run(module.train, parse(module.Args, module.__doc__))


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(__doc__)
    else:
        main(sys.argv.pop(1))
