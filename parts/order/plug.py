"""Which rows are drawn next, by a function of your own (README.md)."""
from parts.order import order
from parts.order.order import OrderArgs as Flags  # noqa: F401


def ordered(args) -> bool:
    """Returns whether the run trains on prompts in the order of a function."""
    return bool(args.parts.order.order) and not args.eval_args.eval_only


def sizes(plan):
    """An epoch may have any number of rows, so a batch may have one prompt."""
    if ordered(plan.args):
        plan.batches = sorted({*plan.batches, 1}, reverse=True)


def engine(kind, run):
    return order.OrderedEngine if ordered(run.args) else None


def begin(run):
    """The stream is another one from here on. The first epoch is asked for before any step."""
    if ordered(run.args):
        run.stream = run.stateful["stream"] = order.Ordered(run)
        if not run.start:
            run.world.together(run.stream.ask)
