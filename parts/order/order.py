"""order.py: --order FILE.py:NAME: which rows the run draws next.

The function NAME(rows, known, *, seed, epoch) gets all rows (a list of data.Row) and what the run
knows of each (a list of Known), and returns one of two lists:

    rows       the epoch has these rows in this order: all of them, some, or some several times
    weights    a number of at least 0 for each row: the epoch has as many prompts as there are rows,
               and row i is drawn n·w_i / Σw times, rounded up or down at random without bias

Equal weights give the order of a run without --order. The function runs at the start of each epoch,
or with --order_every N as soon as N prompts have been drawn since.

It is called twice on each rank, and all results must be equal, so a random choice has to come from
`seed` and `epoch`. What the run knows and what is left of the epoch are in the checkpoint, so a
resumed run draws the same rows.
"""
from copy import deepcopy
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from data import Prompt, Row, Stream
from errors import Mistakes, SettingsError
from evaluate import passes
from rollout import Engine
from settings import Flags


@dataclass
class OrderArgs(Flags):
    """The order of the prompts."""
    order: str | None = None
    """Your own FILE.py:NAME, such as parts/order/learnability.py:learnability: from all rows and
    their pass rates it returns the next epoch's rows, or a weight per row."""
    order_every: int = 0
    """Call it again after this many prompts. 0: once per epoch."""
    switch: ClassVar[str] = "order"
    fixed: ClassVar[tuple[str, ...]] = ("order", "order_every")

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if not self.order or plan.args.eval_only:
            return
        flags = vars(plan.args)
        if not (plan.args.needs_rollouts and flags["reward"]):
            yield "--order needs completions with a --reward: the pass rates come from there."
        if flags.get("carry"):
            yield ("--order draws by the last rewards, and --carry has prompts in flight: give one "
                   "of them.")
        try:
            load(self.order)
        except SettingsError as error:
            yield str(error)


def load(spec: str):
    """Returns the function of --order. SettingsError: there is none, or it takes other arguments.
    """
    from flags import function_of  # flags.py imports the parts
    return function_of("order", spec, "rows known", "seed epoch")[0]


class Known(NamedTuple):
    """What the run knows of a row."""
    drawn: int = 0  # times that the row was drawn
    scored: int = 0  # its completions with a reward
    rate: float | None = None  # the share of these that pass (--eval_pass); None: none is scored
    last: float | None = None  # the same of the last draw that had a scored completion
    reward: float | None = None  # the mean reward


@dataclass
class Counts:
    """The sums from which a Known is made."""
    drawn: int = 0
    scored: int = 0
    passed: int = 0
    last: float | None = None
    total: float = 0.0

    def known(self) -> Known:
        """Returns the means."""
        n = self.scored
        return Known(self.drawn, n, self.passed / n if n else None, self.last,
                     self.total / n if n else None)


class Ordered(Stream):
    """A stream of prompts in the order of a function. args: the script's. world: the ranks; None:
    no prompt is drawn."""

    def __init__(self, rows: list[Row], args, world):
        super().__init__(rows, args.seed)
        self.args, self.world = args, world
        self.function = load(args.order)
        # The function gets copies: what it writes into them reaches no prompt and no reward.
        self.shown = [replace(row, prompt_ids=[*row.prompt_ids], columns=deepcopy(row.columns))
                      for row in self.rows]
        self.place = {row.index: i for i, row in enumerate(self.rows)}
        self.counts = [Counts() for _ in self.rows]
        self.unread = []  # samples of the last rollouts: they may not have their rewards yet
        self.asked = 0  # calls of the function
        self.left: list[int] = []  # of the epoch: the places in `rows` that are drawn next
        self.since = 0  # prompts drawn since the last call

    @property
    def epoch(self) -> int:
        """The number of epochs that have begun before this one."""
        return max(0, self.asked - 1)

    def next(self, n: int) -> list[Prompt]:
        """Returns the next n prompts, fewer at the end of an epoch. All ranks must call it (a
        collective)."""
        self.read()
        if not self.left or 0 < self.args.order_every <= self.since:
            self.left = self.world.together(self.ask)
            Mistakes(self.world.differences({"the order of --order": self.left})).stop()
            self.asked, self.since = self.asked + 1, 0
        taken, self.left = self.left[:n], self.left[n:]
        prompts = [Prompt(self.position + i, self.rows[place]) for i, place in enumerate(taken)]
        self.position += len(prompts)
        self.since += len(prompts)
        return prompts

    # ---- the order

    def ask(self) -> list[int]:
        """Calls the function → the places of the rows of an epoch. SettingsError: it raises an
        error, it returns another thing than rows or weights, or its two results differ."""
        where = f"--order {self.args.order}, epoch {self.asked}"
        found = []
        for _ in range(2):
            try:
                returned = self.function([*self.shown], [one.known() for one in self.counts],
                                         seed=self.args.seed, epoch=self.asked)
            except (Exception, SystemExit) as error:
                raise SettingsError(f"{where}: {type(error).__name__}: {error}. Would work: a list "
                                    "of rows, or of weights.") from error
            found.append(self.places(returned, where))
        if found[0] != found[1]:
            raise SettingsError(f"{where}: two calls with the same arguments returned different "
                                "orders, so no run could be resumed. Would work: random numbers "
                                "from `seed` and `epoch`.")
        return found[0]

    def places(self, returned, where: str) -> list[int]:
        """Returns the places of the rows of an epoch, from what the function returned."""
        def refused(what: str) -> SettingsError:
            return SettingsError(f"{where}: it returned {what}. Would work: a list of the rows in "
                                 f"order, or {len(self.rows):,} weights of at least 0.")

        if isinstance(returned, np.ndarray | torch.Tensor):
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            raise refused(f"a {type(returned).__name__}")
        if not returned:
            raise refused("no row")
        if all(isinstance(one, Row) for one in returned):
            place = {id(row): i for i, row in enumerate(self.shown)}
            if {*map(id, returned)} - place.keys():
                raise refused("a row that is none of those that it got")
            return [place[id(row)] for row in returned]
        if other := [one for one in returned if not isinstance(one, Real | np.bool_)]:
            raise refused(f"a {type(other[0]).__name__} among {len(returned):,} values")
        if len(returned) > 2 and sorted(returned) == [*range(len(returned))]:
            raise refused("the places of rows in place of the rows")
        if len(returned) != len(self.rows):
            raise refused(f"{len(returned):,} weights for {len(self.rows):,} rows")
        try:
            weights = np.array([float(one) for one in returned])
        except OverflowError:
            raise refused("a weight that is too large") from None
        if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
            wrong = [w for w in weights if not (np.isfinite(w) and w >= 0)]
            raise refused(f"the weight {wrong[0]}" if wrong else "weights that are all 0")
        return epoch_of(weights, self.args.seed, self.asked)

    # ---- what is known

    def read(self):
        """Adds what the scores of the last rollouts say. It is called when these are complete."""
        for samples in self.unread:
            groups = {}
            for sample in samples:
                groups.setdefault(sample.prompt.position, []).append(sample)
            for group in groups.values():
                self.add(self.counts[self.place[group[0].prompt.row.index]], group)
        self.unread = []

    def add(self, counts: Counts, samples: list):
        """Adds a draw of a row. samples: its completions."""
        counts.drawn += 1
        scored = [s for s in samples if s.reward is not None]
        if scored:
            passed = sum(passes(s, self.args.eval_pass) for s in scored)
            counts.scored += len(scored)
            counts.passed += passed
            counts.last = passed / len(scored)
            counts.total += sum(s.reward for s in scored)

    def state_dict(self) -> dict:
        """Returns what a checkpoint keeps."""
        self.read()
        return super().state_dict() | {
            "asked": self.asked, "since": self.since, "left": self.left,
            "counts": {i: [*vars(one).values()] for i, one in enumerate(self.counts) if one.drawn}}

    def load_state_dict(self, state: dict):
        """Resumes from what `state_dict` returned. SettingsError: the run had no --order before."""
        if "left" not in state:
            raise SettingsError("--order: the run began without it. Would work: another --name.")
        super().load_state_dict(state)
        self.asked, self.since, self.left = state["asked"], state["since"], state["left"]
        for i, values in state["counts"].items():
            self.counts[int(i)] = Counts(*values)


def epoch_of(weights: np.ndarray, seed: int, epoch: int) -> list[int]:
    """Returns the places of the rows of an epoch. Row i is there n·w_i / Σw times, rounded up or
    down (systematic sampling), and its copies are spread over the epoch. Equal weights give the
    permutation of data.Stream.

    weights: (n,), not negative, at least one above 0.
    """
    n = len(weights)
    rng = np.random.default_rng([seed % 2**64, epoch])
    order = rng.permutation(n)  # as in data.Stream
    share = weights[order] / weights.max()  # equal weights are exactly 1
    ends = np.floor(share.cumsum() * (n / share.sum()) + rng.random())
    copies = np.diff(ends, prepend=0).astype(int)  # (n,): of each row, in the order of `order`
    # Copy j of c is drawn at the time (j + u) / c. u rises along `order`.
    place = np.repeat(np.arange(n), copies)
    first = np.repeat(copies.cumsum() - copies, copies)
    u = np.sort(rng.random(n))[place]
    times = (np.arange(len(place)) - first + u) / copies[place]
    return order[place[np.argsort(times, kind="stable")]].tolist()


class OrderedEngine(Engine):
    """An engine that shows its `stream` what it sampled."""

    def sample(self, prompts, group, temperature, purpose="train"):
        """See Engine."""
        samples = super().sample(prompts, group, temperature, purpose)
        if purpose == "train":
            self.stream.unread.append((*samples,))  # rewards.score_samples completes them
        return samples
