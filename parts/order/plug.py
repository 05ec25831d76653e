"""Which rows are drawn next, by a function of your own (README.md)."""
from parts.order import order
from parts.order.order import OrderArgs as Flags  # noqa: F401


def ordered(args) -> bool:
    """Returns whether the run trains on prompts in the order of a function."""
    return bool(args.order) and not args.eval_only


def sizes(plan):
    """An epoch may have any number of rows, so a batch may have one prompt."""
    if ordered(plan.args):
        plan.batches = sorted({*plan.batches, 1}, reverse=True)


def engine(kind, args, config, dtype):
    return order.OrderedEngine if ordered(args) else None


def check(args, inputs):
    """SettingsError: the function cannot be used. It is called once for the first epoch."""
    if ordered(args):
        order.Ordered(inputs.rows, args, None).ask()


def begin(run):
    """From here on the prompts come from another stream."""
    if ordered(run.args):
        run.stream = run.engine.stream = order.Ordered(run.inputs.rows, run.args, run.world)
        run.stateful["stream"] = run.stream
