"""dist.py: ranks. Start and stop them, split a list over them, gather it back, balance token work, agree.

A *rank* is one process of `torchrun --nproc_per_node W script.py`; without torchrun there is one rank.

The rule of this codebase: the global batch is the same list, in the same order, on every rank. Splits are pure functions
of that list (the first half of this file), so ranks cannot disagree about who does what, and the splits are tested
without any process. What ranks say to each other (the second half, `World`) is five short collectives.
"""
import datetime
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import ClassVar

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")   # before torch is imported: NUMA and socket notes are not for everyone

import torch
import torch.distributed as td

from plan import SettingsError

STOPPED = 75  # exit status after SIGTERM with the state saved: sysexits' EX_TEMPFAIL, "try again"


# ---- splitting: pure functions of sizes -----------------------------------------------------------------------------

def share(n: int, ranks: int, rank: int) -> slice:
    """Which of n items are this rank's: a contiguous slice; the first n % ranks ranks get one more, any n ≥ 0 works.

    >>> [list(range(7))[share(7, 3, r)] for r in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    small, extra = divmod(n, ranks)
    start = rank * small + min(rank, extra)
    return slice(start, start + small + (rank < extra))


def pad_to_multiple(items: list, multiple: int, filler) -> list:
    """The items and as many fillers as make their number a multiple; the fillers must weigh nothing (see `unpad`)."""
    return items + [filler] * (-len(items) % multiple)


def unpad(items: list, n: int) -> list:
    """The first n items: undoes `pad_to_multiple` on anything that came back in the same order."""
    return items[:n]


def assert_divisible(n: int, by: int, what: str, per: str) -> int:
    """n // by, or a SettingsError that carries the numbers and the nearest values of both that work."""
    if n % by == 0:
        return n // by
    values = sorted({n - n % by, n + by - n % by} - {0})
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    near = sorted({max((d for d in divisors if d < by), default=1), min((d for d in divisors if d > by), default=n)})
    raise SettingsError(f"{what} is {n} and {per} is {by}: {n} is not a multiple of {by}. "
                        f"Nearest that work: {what} {' or '.join(map(str, values))}, or {per} {' or '.join(map(str, near))}.")


def cut(lengths: list[int], budget: int) -> list[list[int]]:
    """Rows → micro-batches of at most `budget` padded tokens (rows × longest). Sorted by length, so little is padding.

    Returns lists of row numbers, longest rows first. ValueError for a row that is longer than the budget: `plan.py`
    refuses such settings, so a run never meets one.
    """
    micros: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[row] > budget:
            raise ValueError(f"row {row} has {lengths[row]} tokens, more than the budget of {budget}")
        if micros and lengths[micros[-1][0]] * (len(micros[-1]) + 1) <= budget:
            micros[-1].append(row)
        else:
            micros.append([row])
    return micros


def balance(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Rows → ranks → micro-batches: [rank][micro] is a list of row numbers; [] is a micro-batch of padding alone.

    Every rank gets the same *number* of micro-batches, because FSDP's collectives are counted; their sizes may differ.
    Every row appears exactly once. No micro-batch exceeds `budget` padded tokens, so memory depends on the budget only.
    The i-th micro-batches of all ranks cost about the same, because they wait for each other.

    As few rounds as the budget allows, and more while they save more padding than a round costs: where lengths spread 1:20 that
    is a sixth of the work. Never more rounds than if all rows were as long as the longest, which is what the plan tells.
    """
    rounds = max(1, -(-len(cut(lengths, budget)) // ranks))
    most = -(-len(cut([max(lengths)] * len(lengths), budget)) // ranks) if lengths else 1
    lanes = deal(lengths, ranks, budget, rounds)
    while rounds < most and padded(more := deal(lengths, ranks, budget, rounds + 1), lengths) < padded(lanes, lengths):
        lanes, rounds = more, rounds + 1
    return lanes


ROUND = 512     # what one more round of micro-batches costs, in padded tokens: its collectives and its launches


def padded(lanes: list[list[list[int]]], lengths: list[int]) -> int:
    """What these lanes cost, in padded tokens: in each round the largest micro-batch, and the round itself."""
    return sum(max(len(micro) * max((lengths[row] for row in micro), default=0) for micro in hand) + ROUND for hand in zip(*lanes))


def deal(lengths: list[int], ranks: int, budget: int, rounds: int) -> list[list[list[int]]]:
    """The rows in `rounds` micro-batches a rank, as even as they come: see `balance`. The budget must allow so few."""
    cost = lambda micro: len(micro) * lengths[micro[0]] if micro else 0                   # padded tokens; longest rows come first
    low, high = max(lengths, default=1), budget      # the smallest budget that needs no more rounds evens the micros out
    while low < high:
        middle = (low + high) // 2
        if len(cut(lengths, middle)) <= rounds * ranks:
            high = middle
        else:
            low = middle + 1
    micros = cut(lengths, high)
    while len(micros) < rounds * ranks:              # too few for all ranks: halve the costliest that can be halved
        largest = max((m for m in micros if len(m) > 1), key=cost, default=None)
        if largest is None:
            break
        half = len(largest) // 2
        micros.remove(largest)
        micros += [largest[:half], largest[half:]]
    micros = pad_to_multiple(sorted(micros, key=cost, reverse=True), ranks, [])
    micros += [[]] * (rounds * ranks - len(micros))
    lanes: list[list[list[int]]] = [[] for _ in range(ranks)]
    for i in range(rounds):                          # deal back and forth, so that no rank always gets the larger one
        hand = micros[i * ranks:(i + 1) * ranks]
        for lane, micro in zip(lanes, hand if i % 2 == 0 else reversed(hand)):
            lane.append(micro)
    return lanes


# ---- talking: the collectives ---------------------------------------------------------------------------------------

@dataclass
class World:
    """All ranks, seen from this one. Methods that talk are collectives: every rank must call them, in the same order."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: td.ProcessGroup       # gloo, on the host: for objects, flags and checks; never for weights
    timeout: float                 # seconds a rank may be late
    joined: ClassVar["World | None"] = None                                # what `start` made, for `run`'s last words

    def mine(self, items: list) -> list:
        """My contiguous share of a list that is the same on every rank."""
        return items[share(len(items), self.size, self.rank)]

    def gather(self, mine: list) -> list:
        """Everyone's lists, joined in rank order: undoes `mine`, so what was split comes back in request order."""
        if self.size == 1:
            return list(mine)
        lists: list = [None] * self.size
        td.all_gather_object(lists, mine, group=self.control)
        return [item for part in lists for item in part]

    def agree(self, flag: bool) -> bool:
        """True on every rank if it is True on any: a branch around a collective is taken on this, never on `flag`."""
        if self.size == 1:
            return flag
        word = torch.tensor(int(flag))
        td.all_reduce(word, op=td.ReduceOp.MAX, group=self.control)
        return bool(word)

    def differences(self, facts: dict[str, object]) -> list[str]:
        """A sentence for each of `facts` that some rank has otherwise: every machine has a command line and disks of its own. A collective."""
        everyones, found = self.gather([{name: repr(value) for name, value in facts.items()}]), []
        for name, value in everyones[0].items():
            rank = next((rank for rank, theirs in enumerate(everyones) if theirs[name] != value), None)
            if rank is not None:
                found.append(f"{name} is {value} on rank 0 and {everyones[rank][name]} on rank {rank}; all ranks need the same.")
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place sum of a tensor over ranks (on the tensor's own device)."""
        if self.size > 1:
            td.all_reduce(tensor, group=self.control if tensor.device.type == "cpu" else None)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place maximum of a host tensor over ranks."""
        if self.size > 1:
            td.all_reduce(tensor, op=td.ReduceOp.MAX, group=self.control)
        return tensor

    def meet(self, phase: str, step: int, micros: int) -> None:
        """All ranks are about to begin the same phase of the same step with as many micro-batches, or the run ends here.

        Costs well under a millisecond. Without it, ranks that disagree wait inside a collective until a watchdog
        ends them half an hour later, with a message about the wrong thing.
        """
        if self.size == 1:
            return
        try:
            td.monitored_barrier(self.control, timeout=datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} waited up to {self.timeout:g} s (--timeout) at the start of {phase!r}, "
                               f"step {step}, and a rank did not come: {error}") from error
        word = f"{phase:.32}\n{step}\n{micros}".encode()
        words = [torch.zeros(64, dtype=torch.uint8) for _ in range(self.size)]
        td.all_gather(words, torch.tensor(list(word.ljust(64, b"\0")), dtype=torch.uint8), group=self.control)
        said = [bytes(w.tolist()).rstrip(b"\0").decode().split("\n") for w in words]
        for other, theirs in enumerate(said):
            if theirs != said[0]:
                tell = "rank {} is at the start of {!r}, step {}, with {} micro-batches".format
                raise RuntimeError(f"ranks disagree: {tell(0, *said[0])}, but {tell(other, *theirs)}")

    def late(self, seconds: float = 10.0) -> list[int]:
        """After a collective has timed out: the ranks that do not say within `seconds` that they have waited too."""
        store = td.distributed_c10d._get_default_store()
        store.set(f"waited/{self.rank}", "yes")
        time.sleep(seconds)
        return [rank for rank in range(self.size) if not store.check([f"waited/{rank}"])]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            td.barrier(group=self.control)


def start(timeout: float = 600.0) -> World:
    """Join the other ranks: gloo between hosts' processors, NCCL between GPUs. Call it before the engine is imported.

    Sets the number of threads as well, because vLLM turns `torch.set_num_threads` into a no-op later: on CPU the cores
    are divided among this machine's ranks, unless OMP_NUM_THREADS says otherwise (torchrun sets it to 1).
    """
    with socket.socket() as s:                       # a free port, for the run without torchrun
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        os.environ.setdefault(name, str(value))
    rank, size, local_rank, local_size = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    td.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    control = td.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
    World.joined = World(rank, size, local_rank, local_size, device, control, timeout)
    return World.joined


# ---- ending ---------------------------------------------------------------------------------------------------------

class Stop:
    """What signals mean to a rank. SIGTERM: save at the end of the step, and leave. Again, or not in time, and Ctrl-C: leave now.

    A thread acts on them, because a main thread that waits in a collective or computes in C would not. What reaches both
    torchrun and its ranks (a scheduler's kill of the whole group) comes twice within a moment, and is one signal.
    """
    requested = False              # of the process, like signals themselves: `run` looks at it too
    AGAIN = 2.0                    # seconds after which a second SIGTERM is a second one

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self.looping = self.leaving = False            # set by the loop when it begins, and by `agreed`
        first = world.rank - world.local_rank
        self.peers = [pid for pid in world.gather([os.getpid()])[first:first + world.local_size] if pid != os.getpid()]
        numbers, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())          # the kernel's signal becomes a byte here, whatever the main thread does
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(numbers,), daemon=True).start()

    def agreed(self) -> bool:
        """Whether any rank was told to stop. From then on all save and leave, and only a second signal interrupts that."""
        self.leaving = self.world.agree(Stop.requested)
        return self.leaving

    def _watch(self, numbers: socket.socket) -> None:
        came = 0.0
        while True:
            numbers.settimeout(0.2 if Stop.requested else None)
            try:
                heard = numbers.recv(64)
            except TimeoutError:
                heard = b""
            waited = time.monotonic() - came
            if signal.SIGINT in heard:
                self._leave(130, "interrupted")
            elif signal.SIGTERM in heard and not self.looping:
                self._leave(143, "SIGTERM before the first step: ended at once, there is nothing to save")
            elif signal.SIGTERM in heard and not Stop.requested:
                Stop.requested, came = True, time.monotonic()
            elif signal.SIGTERM in heard and waited > self.AGAIN:
                self._leave(143, "a second SIGTERM: ended at once; the last checkpoint stands")
            elif Stop.requested and not self.leaving and not all(map(alive, self.peers)):
                self._leave(1, "stops because another rank ended")         # SIGTERM is how torchrun tells
            elif Stop.requested and not self.leaving and waited > self.seconds:
                self._leave(143, f"SIGTERM: no step ended within --stop_seconds {self.seconds:g}; the step is abandoned, the last checkpoint stands")

    def _leave(self, status: int, text: str) -> None:
        os.write(2, f"[rank {self.world.rank}] {text}\n".encode())
        os._exit(status)


def alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(main, *args) -> None:
    """main(*args) as a rank: when one rank ends badly all do, within seconds, and the cause is the last thing on the screen.

    Exit status: 0, 2 for a mistake in the settings (one sentence, from rank 0), 75 stopped and saved, 130 Ctrl-C,
    143 SIGTERM without a save, 1 anything else. torchrun's own status is 1 for all of these; its last lines tell the ranks' ("exitcode : 75"),
    and runs/NAME/done.json is there once a run has come to its end. torchrun waits 30 s (--shutdown-timeout) for ranks after
    SIGTERM, which --stop_seconds must stay below. Leaves by os._exit: with engine threads alive a normal exit may hang.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler
    report, rank = get_error_handler(), os.environ.get("RANK", "0")
    report.initialize()
    try:
        main(*args)
        status = 0
    except SettingsError as error:
        status = 2
        if rank == "0" or error.alone:
            print(f"error: {error}", file=sys.stderr)
            report.record_exception(error)
        else:
            time.sleep(1)                              # the sentence first, then torchrun's own summary
    except KeyboardInterrupt:
        status = 130
        print(f"[rank {rank}] interrupted", file=sys.stderr)
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1 if leave.code else 0
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        if _peer_left(error):                          # not the cause: let torchrun end us while the cause is on the screen
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            print(f"[rank {rank}] stops because another rank ended", file=sys.stderr, flush=True)
            time.sleep(0 if Stop.requested else 15)
        else:
            if "Timed out waiting" in str(error) and World.joined:         # gloo's words; it does not say for whom
                late = World.joined.late()
                error.add_note(f"waited {World.joined.timeout:g} s (--timeout) for rank {', '.join(map(str, late)) or '(all came since)'}")
            print(f"[rank {rank}] failed:\n{traceback.format_exc()}", file=sys.stderr)
            report.record_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _peer_left(error: BaseException) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "remote process exited")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
