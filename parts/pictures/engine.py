"""engine.py: the engine gets the pictures of a prompt beside its ids."""
from parts.pictures.eyes import opened
from parts.pictures.kinds import load_eyes
from parts.pictures.rows import pictures_in
from rollout import Engine

NEVER = -100.0  # added to the logit of an id that no policy samples: vLLM allows no less
HELD = 2  # GiB of pictures' pixels that an engine holds at once


class LookingEngine(Engine):
    """An engine that sees."""

    def __init__(self, args, world, inputs, *given):
        self.eyes = load_eyes(args.model, inputs.source, inputs.lm.config,
                              args.min_image_tokens, args.max_image_tokens)
        self.pictured = [*filter(None, map(pictures_in, inputs.rows + inputs.eval_rows))]
        super().__init__(args, world, inputs, *given)

    def options(self, max_len):
        """See Engine. No row of the data has more pictures in its prompt than `most`."""
        most = max((len(row.sources) for row in self.pictured), default=0)
        # vLLM's own normalization would have noise for a mean, by load_format="dummy".
        return super().options(max_len) | {
            "limit_mm_per_prompt": {"image": max(1, most), "video": 0},
            "mm_processor_cache_gb": HELD, "mm_device_do_normalize": False,
            "mm_processor_kwargs": {"size": self.eyes.size}}

    def forget(self):
        """See Engine. The worker forgot the features of pictures: so must the scheduler."""
        super().forget()
        self.llm.llm_engine.reset_encoder_cache()

    def sampling(self, sample, temperature):
        """See Engine."""
        return super().sampling(sample, temperature) | {"logit_bias": {self.eyes.token: NEVER}}

    def contexts(self, samples):
        """See Engine. One token for each picture, of which vLLM makes more itself. Of ids that are
        those of a tile already it would make still more, and say nothing."""
        found, seen = super().contexts(samples), [pictures_in(s.prompt.row) for s in samples]
        images = {it: [*map(opened, it)] for it in {p.sources for p in seen if p}}  # once
        for prompt, pictures in zip(found, seen, strict=True):
            if pictures:
                prompt |= {"prompt_token_ids": pictures.short_ids,
                           "multi_modal_data": {"image": images[pictures.sources]}}
        return found

    def outputs(self, samples, temperature, **options):
        """See Engine. It holds HELD of pixels at once."""
        found = []
        for part in parts_of(samples):
            found += super().outputs(part, temperature, **options)
        self.llm.llm_engine.reset_mm_cache()
        compare_ids(samples, found)
        return found


def parts_of(samples: list) -> list[list]:
    """Parts whose pixels fit. Those of a group count once."""
    parts, room, seen = [[]], HELD * 2**30, set()
    for sample in samples:
        pictures = pictures_in(sample.prompt.row)
        if pictures and pictures.sources not in seen:
            if parts[-1] and pictures.bytes > room:
                parts, room, seen = [*parts, []], HELD * 2**30, set()
            room -= pictures.bytes
            seen.add(pictures.sources)
        parts[-1].append(sample)
    return parts


def compare_ids(samples: list, outputs: list) -> None:
    """RuntimeError unless engine and trainer have the same ids."""
    for sample, output in zip(samples, outputs, strict=True):
        ids = sample.prompt.row.prompt_ids
        if output.prompt_token_ids != ids:
            raise RuntimeError(
                f"engine and trainer differ in the ids of a prompt with pictures: "
                f"{len(output.prompt_token_ids)} and {len(ids)} tokens")
