"""canary.py: memory as it really is. The peak of every phase, and one worst-case micro-batch of each before the first rollout.

The plan (memory.py) is arithmetic; this is the measurement beside it. A run that would meet its longest micro-batch, and the end of
its memory, hours later meets both in its first minute, and says which flag to change and to what.
"""
import os
import resource
import time
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as td

from batch import Batch, Completion, Micro
from dist import World
from memory import GIB
from plan import Plan, SettingsError


# ---- the meter ------------------------------------------------------------------------------------------------------

class Peak:
    """The most memory in use since this was made. On GPU: of the card, by anyone. On CPU: resident, of this process.

    On GPU it is what the card had in use, plus how far PyTorch's own peak rose: a sleeping engine has given its pages back,
    though PyTorch still counts them, so only differences of PyTorch's figures are used.
    """

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.allocated, self.reserved, self.before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), in_use()
        else:
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")                    # the kernel's high-water mark starts anew
            except OSError:
                pass                                   # then the mark is that of the whole run, and a phase reads the largest so far

    def read(self) -> tuple[float, float]:
        """(by tensors, with what PyTorch's allocator keeps for later), in bytes; the same twice on CPU."""
        if not self.gpu:
            return (resident(),) * 2
        tensors = self.before - (self.reserved - self.allocated) + torch.cuda.max_memory_allocated() - self.allocated
        return tensors, max(in_use(), self.before + torch.cuda.max_memory_reserved() - self.reserved)


def in_use() -> float:
    """Bytes of the GPU that anyone uses."""
    free, card = torch.cuda.mem_get_info()
    return card - free


def resident() -> float:
    """The process's high-water mark of resident bytes."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)


class Peaks:
    """The peak of every phase of a step."""

    def __init__(self, world: World):
        self.world, self.tensors, self.kept = world, {}, {}

    @contextmanager
    def phase(self, name: str):
        """Measures a with-block. Phases do not nest."""
        peak = Peak(self.world.device)
        yield
        tensors, kept = peak.read()
        self.tensors[name] = max(tensors, self.tensors.get(name, 0))
        self.kept[name] = max(kept, self.kept.get(name, 0))

    def metrics(self) -> dict[str, float]:
        """memory/PHASE_gb and memory/peak_gb since the last call, GiB of the rank that has most; on GPU reserved_gb too. A collective."""
        worst = lambda peaks: self.world.max(torch.tensor([*peaks.values(), max(peaks.values(), default=0)], dtype=torch.float64) / GIB).tolist()
        names = [*self.tensors, "peak"]
        found = {f"memory/{name}_gb": value for name, value in zip(names, worst(self.tensors))}
        if self.world.device.type == "cuda":
            found |= {f"memory/{name}_reserved_gb": value for name, value in zip(names, worst(self.kept))}
        self.tensors, self.kept = {}, {}
        return found


# ---- the canary -----------------------------------------------------------------------------------------------------

def canary(plan: Plan, world: World, vocab: int, policy, reference=None, critic=None) -> dict[str, float]:
    """One worst-case micro-batch through each phase, with gradient but no optimizer step → the peak of each phase, bytes.

    Weights and optimizer state are left bit for bit as they were. What the first optimizer step will allocate is set aside
    meanwhile. Each phase grows in three stages, so that where the last does not fit, two measured points say what would.
    """
    a, found, forwards = plan.args, {}, {
        "score": lambda m: [p.logprobs(m, a.temperature)[0] for p in (policy, reference) if p][-1],
        "update": lambda m: sum(policy.logprobs(m, a.temperature, entropy="grad" if a.entropy_coef else "value")),
        "critic score": lambda m: critic.values(m),
        "critic update": lambda m: critic.values(m)}
    ballast = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.to_local().device)
               for trained in (policy, critic) if trained and not trained.optimizer.state for p in trained.module.parameters()]
    for phase in plan.phases(max(plan.batches)):
        if phase.name in found:
            continue
        points: list[tuple[int, float]] = []           # (tokens, peak) of the stages that fitted
        for part in (4, 2, 1):
            tokens, peak = phase.tokens // part, Peak(world.device)
            try:
                with torch.set_grad_enabled("update" in phase.name):
                    out = forwards[phase.name](worst_micro(tokens, phase.longest, vocab, world.device))
                    if out.requires_grad:
                        (policy if phase.name == "update" else critic).backward(out.sum())
            except (MemoryError, RuntimeError) as error:       # torch's OutOfMemoryError is a RuntimeError
                if not is_oom(error):
                    raise
                end(world, phase, tokens, points, peak.read()[0])
            del out
            points.append((tokens, peak.read()[0]))
        for trained in filter(None, (policy, critic)):
            trained.optimizer.zero_grad(set_to_none=True)
        found[phase.name] = points[-1][1]
    del ballast
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def worst_micro(tokens: int, longest: int, vocab: int, device: torch.device) -> Micro:
    """Rows of equal length that fill `tokens`, none longer than `longest`, of which all but one token bear loss."""
    rows = -(-tokens // longest)
    length = max(2, tokens // rows)
    ids = np.arange(length - 1, dtype=np.int32) % vocab
    return Micro(Batch([[0]] * rows, [Completion(ids, np.zeros(length - 1, np.float32), False)] * rows), list(range(rows)), device)


def is_oom(error: BaseException) -> bool:
    """Whether memory ran out, on GPU or CPU: the CPU's allocator has only words for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def largest(points: list[tuple[int, float]], failed: int, full: float) -> int:
    """The most tokens that should fit: the line through the two points, up to `full`, the peak when memory ran out.

    At least what did fit, and below what did not.

    >>> largest([(100, 10.0), (200, 15.0)], failed=400, full=22.5)
    350
    """
    if len(points) < 2 or points[1][1] <= points[0][1]:
        return points[-1][0] if points else failed // 2
    (t1, m1), (t2, m2) = points
    return int(min(max(t2 + (full - m2) * (t2 - t1) / (m2 - m1), t2), 0.95 * failed))


def end(world: World, phase, failed: int, points: list[tuple[int, float]], full: float) -> None:
    """Ends the run with one sentence: this rank's, unless another was first."""
    flag, fits = f"--{phase.name.replace(' ', '_')}_tokens", largest(points, failed, full)
    advice = (f"the peaks measured on the way suggest at most {flag} {fits}" if fits >= phase.longest else
              f"the peaks measured on the way suggest {fits:,} tokens, but one sequence may have {phase.longest:,}: "
              f"--checkpointing, --offload or more ranks save more; --plan says which")
    first = world.size == 1 or td.distributed_c10d._get_default_store().add("canary", 1) == 1
    if not first:
        time.sleep(1)                                  # the other's sentence first
        raise SystemExit(2)
    error = SettingsError(f"out of memory in the canary, before the first rollout: a micro-batch of the {phase.name} with {failed:,} tokens does not fit "
                          f"({flag} is {phase.budget}; rank {world.rank} was at {full / GIB:.1f} GiB); {advice}.")
    error.alone = True
    raise error from None
