"""loggers.py: --logger FILE.py:NAME: rows of metrics for other programs, as the run writes them.

    NAME(folder, *, settings)    is called once, before the first step, on rank 0. folder: the Path
                                 of the run. settings: what args.json has
    its result(step, metrics)    is called with each row of metrics.jsonl, {name: a finite number};
                                 of an evaluation only eval/, because its times are not a step's
    its result.close()           is called at the end, if there is one

A logger gets each row once. A resumed run makes some steps again, and a logger does not get their
rows again: .loggers.json in the run's folder has the last row that each one got.
"""
import inspect
import json
from dataclasses import dataclass

from errors import SettingsError
from files import is_evaluation, read, write_whole
from settings import Flags

WANDB = "parts/loggers/to_wandb.py:Wandb"


@dataclass
class LogArgs(Flags):
    """Other programs that get the metrics."""
    logger: tuple[str, ...] = ()
    """Your own FILE.py:NAME, such as parts/loggers/to_tensorboard.py:TensorBoard, which gets each
    row of metrics. Any number of them."""
    wandb: str | None = None
    """A Weights & Biases project; without a name, samestep. Offline without a key."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if len({*self.logger}) < len(self.logger):
            yield f"--logger names one twice (got {' '.join(self.logger)})."
        for spec in specs_of(self):
            try:
                load(spec)
            except SettingsError as error:
                yield str(error)


def specs_of(args) -> list[str]:
    """The FILE.py:NAME of each logger."""
    return [*args.logger, *[WANDB] * bool(args.wandb)]


def load(spec: str):
    """Returns what a FILE.py:NAME names. SettingsError: there is none, or it takes other
    arguments."""
    from flags import function_of  # flags.py imports the parts
    return function_of("logger", spec, "folder", "settings")[0]


class Loggers:
    """The loggers of a run, on rank 0. log: the log.Log that shows them each row. SettingsError:
    one of them cannot start."""

    def __init__(self, specs: list[str], log):
        self.log, self.path = log, log.folder / ".loggers.json"
        self.got = read(self.path) if self.path.exists() else {}  # {FILE.py:NAME: its last row}
        self.running = {}
        for spec in specs:
            try:
                write = load(spec)(log.folder, settings=read(log.folder / "args.json"))
                inspect.signature(write).bind(0, {})  # TypeError: it cannot be called so
                self.running[spec] = write
            except (Exception, SystemExit) as error:  # a user's file may raise anything
                raise SettingsError(f"{name_of(spec)} cannot start: {in_words(error)}. Would work: "
                                    "without it.") from error
            step = self.got.get(spec, [-1])[0]
            if log.rows and step > log.rows[-1]["step"] or not log.rows and step >= 0:
                log.say(f"{name_of(spec)} has the rows up to step {step}: it gets those after it")

    def write(self, row: dict):
        """Gives a row to each logger that has not got it yet. One that raises an error gets no
        more."""
        place = [row["step"], int(is_evaluation(row))]  # the evaluation after a step is the later
        prefix = "eval/" if place[1] else ""
        metrics = {name: value for name, value in row.items()
                   if name.startswith(prefix) and name != "step" and value is not None}
        for spec in [*self.running]:
            if place <= self.got.get(spec, [-1, 0]):
                continue
            self.got[spec] = place
            write_whole(self.path, json.dumps(self.got))
            self.attempt(spec, self.running[spec], row["step"], {**metrics})

    def close(self):
        """Ends the loggers."""
        for spec, logger in [*self.running.items()]:
            self.attempt(spec, getattr(logger, "close", int))

    def attempt(self, spec: str, function, *given):
        """Calls a function of a logger. If it raises an error, the logger is off from here."""
        try:
            function(*given)
        except (Exception, SystemExit) as error:
            self.running.pop(spec, None)
            self.log.say(f"{name_of(spec)} is off from here: {in_words(error)}")


def name_of(spec: str) -> str:
    """Returns a logger's name in messages: the flag that asked for it."""
    return "--wandb" if spec == WANDB else f"--logger {spec}"


def in_words(error: BaseException) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def begin(run):
    """Starts the loggers on rank 0. All ranks must call it (a collective)."""
    def start():
        """Starts them. SettingsError: one cannot start."""
        if run.log.writing and specs:
            run.log.readers.append(Loggers(specs, run.log))

    specs = specs_of(run.args)
    run.world.together(start)
