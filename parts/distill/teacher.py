"""teacher.py: for distill.py: a teacher beside the policy, and the prompts of --teacher_prompt."""
from dataclasses import replace

from batch import Batch
from data import DataArgs, Row, make_row, marks_of
from errors import SettingsError
from model import Teacher


def beside(teacher, micro, temperature: float, kind: str) -> Teacher | None:
    """A teacher, a model.Policy or lora.Base, on this micro-batch. kind "none": None. Its head is
    whole from now on, until teacher.module.reshard(): the policy's backward calls it too."""
    if kind == "none":
        return None
    hidden, model = teacher.hidden(micro), teacher.module  # (n, H)
    model.unshard()
    return Teacher(hidden, model.head, temperature / model.scale, kind)


def add_teacher_prompts(rows: list[Row], tokenizer, args: DataArgs, template: str) -> None:
    """The prompt of each row for the teacher. It must not be shorter than the row's own:
    micro-batches are cut by it."""
    args, marks = replace(args, prompt_template=template), marks_of(tokenizer)
    for row in rows:
        try:
            made = make_row(row.index, row.columns, row.source, tokenizer, marks, args,
                            flag="--teacher_prompt")
        except (SettingsError, ValueError) as error:
            raise SettingsError(f"--teacher_prompt, row {row.index}: {error}") from None
        if made is None:
            raise SettingsError(f"--teacher_prompt gives row {row.index} no text.")
        row.teacher_ids = made.prompt_ids
        if not len(row.prompt_ids) <= len(row.teacher_ids) <= args.max_prompt_tokens:
            raise SettingsError(
                f"--teacher_prompt gives row {row.index} {len(row.teacher_ids)} tokens; it must "
                f"give from the prompt's own {len(row.prompt_ids)} up to --max_prompt_tokens "
                f"{args.max_prompt_tokens}.")


def behind_teacher_prompts(batch: Batch) -> Batch:
    """The same completions behind the prompts that add_teacher_prompts made, if it did."""
    if batch.samples[0].prompt.row.teacher_ids is None:
        return batch
    moved = []
    for sample in batch.samples:
        row = sample.prompt.row
        prompt = sample.prompt._replace(row=replace(row, prompt_ids=row.teacher_ids))
        moved.append(replace(sample, prompt=prompt))
    return Batch(moved)
