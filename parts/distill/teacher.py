"""teacher.py: for distill.py: the teacher, its memory, and the prompts of --teacher_prompt."""
from dataclasses import dataclass, replace

from batch import Batch
from chat_template import marks_of
from data import DataArgs, Row, make_row
from errors import SettingsError
from memory import UPDATE_HEAD, Memory
from model_files import shape_from
from plan import Phase
from preflight import Inputs, open_model

HEAD = 6  # float32 matrices (chunk, vocabulary) of the teacher, beside UPDATE_HEAD


def find_teacher(args, inputs: Inputs, weights: bool = True) -> None:
    """Makes --teacher the reference model of these inputs. SettingsError unless it has the
    vocabulary of --model, a row of its head for each id that the student may sample, and a position
    for each token."""
    folder, lm, tokenizer = open_model(args.teacher, "teacher", weights)
    if tokenizer.get_vocab() != inputs.tokenizer.get_vocab():
        raise SettingsError(f"--teacher {args.teacher} must share the vocabulary of --model "
                            f"{args.model}: their tokenizers differ. Would work: a larger model of "
                            "the same family.")
    shape, rows, exact = shape_from(lm), inputs.shape.vocab, args.divergence != "none"
    sizes = f"--teacher has {shape.vocab:,} rows and --model {rows:,}"
    if shape.vocab < rows:  # the rows behind the tokenizer's can be sampled too
        raise SettingsError(f"--teacher {args.teacher} needs a head with a row for each of the "
                            f"student's: {sizes}. Would work: a teacher with {rows:,} rows"
                            f"{'' if exact else ' or more'}.")
    if exact and shape.vocab != rows:
        raise SettingsError(f"--divergence {args.divergence} needs heads of equal size: {sizes}. "
                            "Would work: --divergence none.")
    room = lm.config.get_text_config().to_dict().get("max_position_embeddings")
    prompt, longest = args.max_prompt_tokens, args.max_tokens
    if room and prompt + longest > room:
        works = f"--max_tokens {room - prompt}" if prompt < room else (
            f"--max_prompt_tokens {room // 2} --max_tokens {room - room // 2}")
        raise SettingsError(f"--max_prompt_tokens {prompt} + --max_tokens {longest} must be at "
                            f"most the {room} positions of --teacher {args.teacher}. Would work: "
                            f"{works}.")
    inputs.reference, inputs.shape = folder, replace(inputs.shape, reference=shape)


class TeacherMemory(Memory):
    """With --divergence an update also has the teacher's head and hidden states."""

    def micro_batch(self, phase: Phase) -> tuple[float, float]:
        """See Memory."""
        layers, logits = super().micro_batch(phase)
        if phase.name != "update" or self.args.divergence == "none":
            return layers, logits
        teacher = self.shape.reference or self.shape
        more = self.c * (teacher.root + phase.tokens * teacher.hidden)
        return layers + more, logits * (1 + HEAD / UPDATE_HEAD)


@dataclass
class TaughtRow(Row):
    """A row with the prompt that --teacher_prompt makes."""
    teacher_ids: list[int] | None = None

    def digested(self, of_file) -> list:
        """See data.Row."""
        return [*super().digested(of_file), self.teacher_ids]


def add_teacher_prompts(rows: list[Row], tokenizer, args: DataArgs,
                        template: str) -> list[TaughtRow]:
    """The rows with the prompt of each for the teacher. It must not be shorter than the row's own:
    micro-batches are cut by it."""
    args, marks, found = replace(args, prompt_template=template), marks_of(tokenizer), []
    for row in rows:
        try:
            made = make_row(row.index, row.columns, row.source, tokenizer, marks, args)
        except (SettingsError, ValueError) as error:
            why = str(error).replace("--prompt_template", "--teacher_prompt")
            raise SettingsError(f"--teacher_prompt, row {row.number}: {why}") from None
        if made is None:
            raise SettingsError(f"--teacher_prompt gives row {row.number} no text.")
        if not len(row.prompt_ids) <= len(made.prompt_ids) <= args.max_prompt_tokens:
            raise SettingsError(
                f"--teacher_prompt gives row {row.number} {len(made.prompt_ids)} tokens; it must "
                f"give from the prompt's own {len(row.prompt_ids)} up to --max_prompt_tokens "
                f"{args.max_prompt_tokens}.")
        found.append(TaughtRow(**vars(row), teacher_ids=made.prompt_ids))
    return found


def behind_teacher_prompts(batch: Batch) -> Batch:
    """The same completions behind the prompts that add_teacher_prompts made, if it did."""
    if not isinstance(batch.samples[0].prompt.row, TaughtRow):
        return batch
    moved = []
    for sample in batch.samples:
        row = sample.prompt.row
        prompt = sample.prompt._replace(row=replace(row, prompt_ids=row.teacher_ids))
        moved.append(replace(sample, prompt=prompt))
    return Batch(moved)
