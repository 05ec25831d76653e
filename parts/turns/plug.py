"""Several turns: tools, environments, credit (README.md)."""
from errors import SettingsError
from parts.turns import turns
from parts.turns.turns import TurnArgs as Flags  # noqa: F401

METRICS = {
    "reward/turns": "with --reward turns: mean of what all turns of an episode were paid",
    "rollout/turns_mean": "turns of the model per completion",
    "rollout/reply_failed": "completions that failed between two turns",
    "rollout/truncated_frac": "also completions without room for their reply",
    "time/rollout": "with the replies"}
REWARDS = dict.fromkeys(("environment", "turns"), "parts/turns/paid.py")


def check(args, inputs):
    """SettingsError: the function of --reply, or the chat template, cannot be used with these rows.
    """
    if args.reply:
        rows = inputs.rows + inputs.eval_rows
        if any(row.columns.get("chat_template_kwargs") for row in rows):
            raise SettingsError("rows with chat_template_kwargs take no --reply.")
        turns.check(args, inputs.tokenizer, inputs.ends, inputs.shape.vocab, rows)


def engine(kind, args, config, dtype):
    return turns.PlayingEngine if args.reply else None


def pool(kind, args, waits):
    return turns.EpisodePool if args.reply else None
