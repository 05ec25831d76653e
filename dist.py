"""dist.py: ranks: split a list over them, pad, gather, agree; start and end.

A rank is one process of a run. The global batch is the same list on every rank, and the splits are
pure functions of it, so ranks cannot disagree about who has which items.

Top to bottom: how a list is split; `World` with the collectives, which all ranks must call in the
same order; `join`, which makes this process a rank, and the checks before it; and how a run ends:
after SIGTERM (`Stop`), normally, and after a failure (`run`).
"""
import ctypes
import datetime
import os
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as td
from torch.distributed.rendezvous import rendezvous

from errors import Mistakes, SettingsError, tell

SAVED = 75  # exit status after SIGTERM with a saved state: EX_TEMPFAIL of sysexits, "try again"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # for one rank; port 0: any free port
FOREVER = datetime.timedelta(9999)  # longer than any run; gloo counts nanoseconds in 64 bits
# The values in a process without copies, unless the variables are unset.
NO_COPY = {"RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1",  # Open MPI
           "PMI_SIZE": "1", "PMIX_RANK": "0",  # MPICH, Intel MPI
           "MV2_COMM_WORLD_SIZE": "1", "FLUX_JOB_SIZE": "1", "JSM_NAMESPACE_SIZE": "1",
           "PALS_RANKID": "0"}


# ---- splitting: pure functions of sizes ----

def share(n: int, ranks: int, rank: int) -> slice:
    """Returns the slice of n items that belongs to `rank`. The ranks' slices are contiguous and in
    rank order. The first n % ranks ranks get one more item than the others.
    """
    small, extra = divmod(n, ranks)
    start = rank * small + min(rank, extra)
    return slice(start, start + small + (rank < extra))


def pad_to_multiple(items: list, multiple: int, filler) -> list:
    """Returns the items, padded with `filler` to a length that is a multiple of `multiple`."""
    return items + [filler] * (-len(items) % multiple)


def assert_divisible(n: int, by: int, what: str, per: str) -> int:
    """Returns n // by. Raises a SettingsError if n is not a multiple of `by`; its text has the
    nearest values of n and `by` that would work. what, per: the names of n and `by` in the text.
    """
    if n % by == 0:
        return n // by
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    values = {n - n % by, n + by - n % by} - {0}
    near = {max(d for d in divisors if d < by), min((d for d in divisors if d > by), default=n)}
    values, near = (" or ".join(map(str, sorted(numbers))) for numbers in (values, near))
    raise SettingsError(f"{what} is {n} and {per} is {by}: {n} is not a multiple of {by}. "
                        f"Would work: {what} {values}, or {per} {near}.")


# ---- the collectives ----

@dataclass
class World:
    """All ranks of a run, and this process's place among them. Every rank must make the same
    collective calls in the same order.
    """
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: td.ProcessGroup  # gloo: for tensors and objects on the host
    patient: td.ProcessGroup | None = None  # gloo, for waits without a timeout
    timeout: float = 600.0  # seconds that a rank waits for another
    began: datetime.datetime | None = None  # when the ranks first joined; kept by a restart
    again: str = ""  # the command that resumes this run
    step: int = -1  # the current step, for messages; -1 before the first one
    joined: ClassVar["World | None"] = None  # the World from `join`; `run` reads it
    ring: "Ring | None" = None  # ends this rank if another one fails; None: there is no other

    def mine(self, items: list) -> list:
        """Returns this rank's share of a list that is the same on every rank."""
        return items[share(len(items), self.size, self.rank)]

    def gather(self, mine: list, more: float = 0.0) -> list:
        """Returns the lists of all ranks, concatenated in rank order, on every rank: the inverse of
        `mine`. RuntimeError: some ranks did not arrive within --timeout plus `more` seconds. All
        ranks must call it (a collective).
        """
        limit = datetime.timedelta(seconds=self.timeout + more)
        td.monitored_barrier(self.control, limit)  # its error names the missing ranks
        lists: list = [None] * self.size
        td.all_gather_object(lists, mine, group=self.control)
        return [item for part in lists for item in part]

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is True on any rank. An `if` around a collective must test this
        result, never one rank's own flag. All ranks must call it (a collective).
        """
        return bool(self.max(torch.tensor(int(flag))))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over all ranks, in place, and returns it. All ranks must call it (a
        collective).
        """
        td.all_reduce(tensor, group=self.control)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the elementwise maximum of a CPU tensor over all ranks, in place, and returns it.
        All ranks must call it (a collective).
        """
        td.all_reduce(tensor, op=td.ReduceOp.MAX, group=self.control)
        return tensor

    def together(self, function, *args):
        """Calls function(*args) on each rank and returns this rank's result. If any rank raises a
        SettingsError, all ranks raise that of the lowest such rank. All ranks must call it (a
        collective).
        """
        mistakes = Mistakes()
        result = mistakes.attempt(function, *args)
        Mistakes(self.gather(mistakes)[:1]).stop()  # the first; the others are mostly the same
        return result

    def barrier(self):
        """Returns once every rank has called it. All ranks must call it (a collective)."""
        td.barrier(group=self.control)

    def meet(self):
        """A barrier without a timeout, for work on only one rank, such as the export. A rank that
        fails ends it (Ring). All ranks must call it (a collective)."""
        td.barrier(group=self.patient)

    def end(self):
        """A barrier, and the last collective of a run: a rank that exits before it has failed, and
        takes the others down (Ring). All ranks must call it (a collective)."""
        self.barrier()
        if self.ring:
            self.ring.say(False)
            self.ring.join()

    def same_phase(self, phase: str, count: int):
        """Checks that all ranks begin the phase with the same name, step and count; otherwise
        raises a RuntimeError on all ranks. Without this check they would wait in different
        collectives until a watchdog killed them. All ranks must call it (a collective).
        """
        phases = self.gather([(phase, self.step, count)])
        if len(set(phases)) > 1:
            raise RuntimeError(f"ranks disagree: rank by rank they begin (phase, step, number of "
                               f"parts) {phases}")

    def differences(self, facts: dict[str, object]) -> list[str]:
        """Returns a sentence for each fact whose value differs between ranks. facts: {name: value};
        values are compared by their repr. All ranks must call it (a collective).
        """
        everyone, found = self.gather([{name: repr(fact) for name, fact in facts.items()}]), []
        for name in facts:
            values = [theirs.get(name) for theirs in everyone]
            if others := [rank for rank, value in enumerate(values) if value != values[0]]:
                found.append(f"{name} is {values[0]} on rank 0 and {values[others[0]]} on rank "
                             f"{others[0]}; it must be the same on all ranks.")
        return found


def peak_memory(device: torch.device) -> int:
    """Returns the peak number of bytes in use since the last call: on a CPU the resident memory of
    this process; on a GPU what torch allocated, plus what others use of the card now.
    """
    if device.type != "cuda":
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with suppress(OSError):  # 5 resets the kernel's peak for this process
            Path("/proc/self/clear_refs").write_text("5")
        return peak
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()  # vLLM's own pools, other processes
    peak = others + torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def card_bytes() -> int | None:
    """Returns the bytes of this rank's GPU, or None if it has none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties().total_memory


def gpu_mistakes(ranks: int) -> list[str]:
    """Returns sentences that explain why this machine's GPUs cannot serve its ranks, or an empty
    list if they can or there is no GPU. ranks: the number of ranks on this machine.
    """
    count, hidden = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu_build, job = torch.version.cuda, os.environ.get("STARTED_AS")
    asked = gpu_build or hidden not in ("", "-1")  # vLLM's GPU build does not run on a CPU
    if count >= ranks or not count and not (asked and os.path.exists("/dev/nvidiactl")):
        return []
    works = "./run.sh setup, or CUDA_VISIBLE_DEVICES= for a run on the CPU"
    if count:
        works = f"RANKS={count} {job}" if job else f"torchrun --nproc_per_node {count}"
    elif gpu_build:
        works = ("a driver of version 580 or newer, numbers of nvidia-smi -L, or, for the CPU, "
                 ".venv-cpu/bin/python, which ./run.sh test makes")
    return [f"{ranks} ranks on this machine need {ranks} GPUs, and torch {torch.__version__} sees "
            f"{count} (CUDA_VISIBLE_DEVICES is {hidden}). Would work: {works}."]


def place():
    """Sets the environment variables that make this process a rank. If neither torchrun nor a
    scheduler has set WORLD_SIZE, or if it is 1, this process becomes the only rank. Raises a
    SettingsError if some variables are missing, or if this is one of several Slurm or MPI processes
    without WORLD_SIZE, each of which would be a separate run.
    """
    if "WORLD_SIZE" not in os.environ:
        others = [f"{name}={os.environ[name]}" for name, one in NO_COPY.items()
                  if os.environ.get(name, one) != one]
        if others:
            raise SettingsError(
                f"the environment has {' '.join(others)} and no WORLD_SIZE: each process would be "
                f"a run of its own. Would work: torchrun --nproc_per_node N, or WORLD_SIZE=1.")
    size = os.environ.get("WORLD_SIZE", "1")
    lost = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size != "1" and lost:
        raise SettingsError(f"the environment has WORLD_SIZE={size} and no {', '.join(lost)}. "
                            f"Would work: torchrun --nproc_per_node {size}, or unset WORLD_SIZE.")
    if size == "1" and not td.is_torchelastic_launched():
        os.environ.update(ALONE)
    for name in "LOCAL_RANK", "LOCAL_WORLD_SIZE":  # some schedulers start one rank per machine
        os.environ.setdefault(name, ALONE[name])


def quiet_torch():
    """Makes torch's C++ code print only errors, unless TORCH_CPP_LOG_LEVEL is set. By default it
    prints a warning for each binding to a memory node. torch read the variable on import, so this
    function makes it read the variable again.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
        library._ZN3c1011initLoggingEv()  # c10::initLogging()


def join(timeout: float = 600.0) -> World:
    """Joins the other ranks of the run and returns the World. It chooses this rank's device, its
    number of CPU threads and the backends: nccl for a GPU, gloo for the host. It must run before
    vLLM is imported, because that turns `torch.set_num_threads` into a no-op.

    timeout: how many seconds a rank waits for another. Raises a SettingsError if not all ranks join
    in that time.
    """
    place()
    quiet_torch()
    local_rank, local_size = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
    if td.is_torchelastic_launched():  # if torchrun is killed, no rank must survive
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PDEATHSIG
    device, backend, given = torch.device("cpu"), "gloo", os.environ.get("OMP_NUM_THREADS")
    if torch.cuda.is_available() and not gpu_mistakes(local_size):  # preflight.py reports these
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        given = None if given == "1" else given  # torchrun sets 1
    if given is None:  # the ranks of a machine divide its cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    store, rank, size = meet(limit := datetime.timedelta(seconds=timeout))
    # torchrun's store outlives its ranks. The ranks of a restart must not read the old addresses.
    attempt = td.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    td.init_process_group(backend, timeout=limit, store=attempt, rank=rank, world_size=size)
    control, patient = (td.new_group(backend="gloo", timeout=it) for it in (limit, FOREVER))
    began = store.compare_set("began", "", datetime.datetime.now().isoformat()).decode()
    World.joined = World(rank, size, local_rank, local_size, device, control, patient, timeout,
                         datetime.datetime.fromisoformat(began))
    if size > 1:
        World.joined.ring = Ring(rank, size)
    return World.joined


def meet(limit: datetime.timedelta):
    """Waits for the other ranks and returns (their common store, this rank, the number of ranks).
    Raises a SettingsError if not all arrive within the limit."""
    try:
        return next(rendezvous("env://", timeout=limit))
    except td.DistError as error:
        said = " ".join(f"{name}={os.environ[name]}" for name in (
            "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        why = str(error).split("\n")[0].rstrip(".")
        raise SettingsError(f"not all ranks met within --timeout {limit.total_seconds():g} s "
                            f"({said}): {why}. Would work: start all of them, or unset "
                            f"these.") from error


# ---- ending ----

class Stop:
    """Ends a run after the current step, with a checkpoint, when a rank gets SIGTERM."""

    def __init__(self, world: World):
        self.world, self.asked = world, False
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_):
        """Handles SIGTERM: records on this rank that the run should end."""
        self.asked = True

    def agreed(self) -> bool:
        """Returns whether any rank got SIGTERM. All ranks must call it (a collective)."""
        return self.world.any_rank(self.asked)


class Ring(threading.Thread):
    """Ends this process if another rank fails, on this machine or another.

    A rank may wait for a failed one where neither a signal nor an exception reaches it, such as in
    NCCL. So a thread on each rank waits for a message from the previous rank, and passes it on. If
    that process ends without a message, however it ends, the system closes their connection.
    """
    GRACE = 20  # seconds in which a rank may exit by itself, with a better message

    def __init__(self, rank: int, size: int):
        super().__init__(daemon=True)
        self.before, self.after = (rank - 1) % size, (rank + 1) % size
        self.group = td.new_group(backend="gloo", timeout=FOREVER)
        self.start()

    def say(self, failed: bool):
        """Tells the next rank that a rank has failed, or that the run has succeeded."""
        with suppress(RuntimeError):  # the next rank has also exited
            td.send(torch.tensor([failed]), self.after, self.group)

    def run(self):
        """Returns once the run has succeeded. After a failure, exits the process with status 1."""
        failed = torch.tensor([True])
        with suppress(RuntimeError):  # the previous rank has exited
            td.recv(failed, self.before, self.group)
        if failed:
            self.say(True)
            time.sleep(self.GRACE)
            tell("error: another rank has failed, so this one exits", sys.stderr)
            os._exit(1)


def run(main, *args):
    """Runs main(*args) and exits the process. If one rank fails, all ranks exit, and torchrun's
    last lines show the first failure.

    The exit status is 0 after success; 1 after a failure or a missed grade; 2 after an error in the
    settings; 75 if the run was stopped and its state saved; 130 after Ctrl-C. torchrun's own status
    is 1 for all of these except 0. The process exits with os._exit, because the engine's threads
    may block a normal exit.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler
    report = get_error_handler()
    report.initialize()
    try:
        status = main(*args) or 0
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            tell(status, sys.stderr)
            status = 1
    except KeyboardInterrupt:
        status = 130
        if os.environ.get("RANK", "0") == "0":
            again = World.joined and World.joined.again
            tell(f"interrupted. To resume: {again}" if again else "interrupted", sys.stderr)
    except BaseException as error:
        status = error.status if isinstance(error, SettingsError) else 1
        say_why(error, report)
    for stream in sys.stdout, sys.stderr:
        with suppress(OSError):  # a full disk
            stream.flush()
    os._exit(status)


def say_why(error: BaseException, report):
    """Prints why this rank exits, and records the error in `report` for torchrun's last lines. A
    SettingsError is printed as its sentence, any other error with its traceback.
    """
    if td.is_torchelastic_launched():  # torchrun ends this rank now if another one exited first
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ranks that fail the same way would print the same text: local rank 0 goes first, and
        # torchrun ends the others while they wait.
        time.sleep(4 if int(os.environ["LOCAL_RANK"]) else 2)
    said = f"[rank {os.environ.get('RANK', '0')}] failed:\n{traceback.format_exc()}"
    if isinstance(error, SettingsError):
        said, error = f"error: {error}", error.with_traceback(None)
    tell(said, sys.stderr)
    report.record_exception(error)
