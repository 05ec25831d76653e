"""What was brought is read right, and the policies are one (README.md)."""
from parts.guards import limits, made_up, rows, tokenizer
from parts.guards.chats import check_all_is_used as check_chat  # noqa: F401
from parts.guards.logprobs import GuardArgs as Flags  # noqa: F401
from parts.guards.logprobs import compare_policies as ready  # noqa: F401
from rewards import check_rows

FIRST = 200  # rows of --data, and of --eval_data, on which the tokenizer is checked


def check(args, inputs):
    """SettingsError: a row is read wrong. It returns what the model cannot take."""
    trained, held_out, warnings = inputs.rows, inputs.eval_rows, inputs.warnings
    first = trained[:FIRST] + held_out[:FIRST]
    tokenizer.check_tokenizer(inputs.tokenizer, inputs.source, first)
    inputs.notes += [f"--{flag} has {rows.what_is_read(found)}" for flag, found in (
        ("data", trained), ("eval_data", held_out)) if found]
    samples = args.needs_rollouts and not args.eval_only  # to train on them
    rows.what_is_shared(trained if samples else [], held_out, warnings)
    scored = trained + held_out if samples else held_out
    check_rows(inputs.reward_facts.needs, scored, warnings)
    made_up.try_once(args, scored, inputs.reward_facts, warnings)
    return limits.model_limits(args, inputs.lm.config, trained + held_out)
