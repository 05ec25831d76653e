"""seeing.py: what a model that sees has beside.

In a packed input each prompt stands once, so its pictures are computed once for their group. Their
features stand at places of the prompt, never where the image token is: a completion may have it.
"""
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from errors import SettingsError, as_sentence
from family import Family, Shape
from parts.pictures import idefics3, qwen2_vl
from parts.pictures.engine import HELD, looking
from parts.pictures.rows import folder_of, make_row, pictures_in

NAMES = {"idefics3": "Idefics3", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL",
         "qwen3_vl": "Qwen3VL"}  # of transformers
FAMILIES = {kind: idefics3 if kind == "idefics3" else qwen2_vl for kind in NAMES}


def find_eyes(args, config, folder: str, reference: str | None = None):
    """Of --model, in its folder. reference: that of another model, which gets the same pixels."""
    eyes = load_eyes(args.model, folder, config, *args.picture_args.limits)
    if reference:
        from transformers import AutoConfig
        config, theirs = AutoConfig.from_pretrained(reference), None
        if config.model_type in FAMILIES:
            theirs = load_eyes(args.teacher, reference, config, flag="teacher")
        if theirs is None or theirs.kind != eyes.kind:
            raise SettingsError(f"--teacher {args.teacher} must see as --model {args.model} does: "
                                "with an equal processor for pictures and an equal image token.")
    return eyes


def load_eyes(name: str, folder: str, config, *limits: int, flag: str = "model"):
    """Those of a model's family. SettingsError: its files have no processor."""
    with as_sentence(f"--{flag} {name} has no processor for pictures that transformers can load"):
        return FAMILIES[config.model_type].Eyes(folder, config, *limits)


def check_template(name: str, files):
    """SettingsError: the processor has another chat template than the tokenizer. vLLM takes the
    processor's, and for a chat with tools the tokenizer's."""
    from transformers import ProcessorMixin
    with as_sentence(f"--model {name} has no processor that transformers can load"):
        theirs = ProcessorMixin.get_processor_dict(files.folder)[0].get("chat_template")
    if theirs is not None and theirs != files.tokenizer.chat_template:
        raise SettingsError(f"--model {name}: its processor's chat template, which vLLM takes for "
                            "pictures, differs from its tokenizer's. Would work: one "
                            "chat_template.jinja, and no chat_template.json.")


class Seeing(Family):
    """Of a model that sees: a tower makes features of pixels, and its text part reads them."""
    types = tuple(NAMES)
    auto = "AutoModelForImageTextToText"

    def __init__(self, config):
        super().__init__(config)
        self.own, self.never = FAMILIES[config.model_type], (config.image_token_id,)

    @property
    def architecture(self) -> str:
        """See Family."""
        return f"{NAMES[self.config.model_type]}ForConditionalGeneration"

    def parts(self, lm) -> list:
        """Its text part, and those of the tower."""
        return [getattr(lm.base_model, name) for name in (self.own.TEXT, *self.own.TOWER)]

    def inputs(self, micro) -> dict:
        """Pixels, as `own` has them, and the places (n,) of their features in the packed input."""
        pixels, places, start = [], [], 0
        owners = {micro.batch.sizes[row][0]: row for row in micro.rows}
        for row in owners.values():  # each prompt once, in the order of batch.pack
            prompt = micro.batch.samples[row].prompt.row
            if seen := pictures_in(prompt):
                pixels.append(seen.eyes.pixels(seen.sources))
                places += [start + place for place in seen.places]
            start += len(prompt.prompt_ids)
        if not pixels:  # FSDP: all ranks gather the tower, so one that sees nothing runs it too
            pixels = [self.own.nothing(self.config)]
        found = {
            "pixels": [torch.cat(part).to(micro.device) for part in zip(*pixels, strict=True)],
            "places": torch.tensor(places, dtype=torch.long, device=micro.device)}
        if len(found["pixels"]) > 1:  # with grids, of which tokens have positions
            found["position_ids"] = positions_of(micro).to(micro.device)
        return found

    def hidden(self, lm, inputs):
        """Of the text part."""
        return super().hidden(lm, self.embedded(lm, **inputs))

    def maker(self, make, args, files, spec):
        """See Family."""
        eyes = find_eyes(args, self.config, files.folder, files.reference)
        check_template(args.model, files)
        return partial(make_row, make=make, eyes=eyes, folder=folder_of(spec))

    def plain_logits(self, lm, head, keep, inputs):
        """With the features in the same places: transformers looks for image tokens."""
        return head(self.hidden(lm, inputs)[:, keep])

    def freeze(self, lm, args):
        """The tower, without --train_vision."""
        for part in self.parts(lm)[1:]:
            part.requires_grad_(args is not None and args.picture_args.train_vision)

    def engine(self, kind, args, inputs):
        """See Family."""
        eyes = load_eyes(args.model, inputs.source, self.config, *args.picture_args.limits)
        return looking(kind, eyes, inputs.rows + inputs.eval_rows)

    def first(self, rows):
        """Those with pictures."""
        return sorted(rows, key=lambda row: not pictures_in(row))

    def largest(self, rows, text_row):
        """With the pictures of the row that has most for its tokens: the tower computes them as
        often as the micro-batch has room for that row."""
        seen = max(filter(pictures_in, rows), default=None, key=lambda row: len(
            row.pictures.places) / len(row.prompt_ids))
        if not seen:
            return text_row

        def pictured(p: int, tokens: int):
            times = max(1, tokens // len(seen.prompt_ids))
            places = [i % p for i in range(times * len(seen.pictures.places))]
            return replace(seen, prompt_ids=[0] * p, pictures=seen.pictures._replace(
                sources=seen.pictures.sources * times, places=places,
                positions=in_line(p).tolist()))

        return pictured

    def shape(self, lm) -> Shape:
        """See Family."""
        shape, tower = super().shape(lm), tower_sizes(self.config, self.parts(lm)[1:])
        return SeeingShape(**vars(shape) | {"root": shape.root - tower.sharded}, tower=tower)

    def embedded(self, lm, input_ids, pixels, places, **inputs) -> dict:
        """What the part that reads tokens gets: features of pictures among the embeddings of ids.
        """
        x = lm.get_input_embeddings()(input_ids)  # (1, S, H)
        values, *grids = pixels
        found = self.own.features(lm, values.to(x.dtype), *grids)
        first, *deep = [part[:len(places)].unsqueeze(0) for part in found]  # (1, n, H)
        inputs["inputs_embeds"] = x.index_copy(1, places, first)
        if deep:  # for each of the first layers (S, H): what is added to all tokens, mostly 0
            inputs |= {"visual_pos_masks": torch.ones_like(input_ids, dtype=torch.bool),
                       "deepstack_visual_embeds": [
                           torch.zeros_like(x).index_copy(1, places, part)[0] for part in deep]}
        return inputs


# ---- its sizes ----

@dataclass
class Tower:
    """The sizes of what makes features of pictures."""
    params: int  # with the projector
    sharded: int  # parameters of all its layers
    layer: int  # of one
    layers: int
    hidden: int  # numbers of a patch between two layers
    made: int  # numbers that the matrices of a layer make of a patch
    patches: int  # that become one token
    pixels: int  # of one token
    deep: int  # layers whose features the text model gets too

    def bytes(self, c: int, kept: int) -> int:
        """For each token of the input, as if all were of pictures: pixels, the work of a layer,
        and what `kept` layers keep for backward. c: bytes of a number."""
        saved = kept * 2 * self.made
        work = 2 * self.made + (4 * self.deep - 5) * self.hidden  # without attention's part
        if 0 < kept < self.layers:  # the others keep their inputs
            saved += self.layers * self.hidden
        return 12 * self.pixels + self.patches * c * (work + saved)


@dataclass(kw_only=True)
class SeeingShape(Shape):
    tower: Tower
    kind: ClassVar[str] = "pictures"

    def frozen(self, args) -> int:
        """The tower, without --train_vision."""
        return 0 if args.picture_args.train_vision else self.tower.params

    def beside(self, c: int, args, update: bool) -> tuple[float, float]:
        """A layer of the tower and the next one, and what its layers keep."""
        kept = 1 if args.model_args.checkpointing else self.tower.layers
        learns = update and args.picture_args.train_vision
        return 2 * c * self.tower.layer, self.tower.bytes(c, kept if learns else 0)

    def in_engine(self, c: int, tokens: int) -> float:
        """The tower's, and the pixels that the engine holds."""
        return tokens * self.tower.bytes(c, 0) + HELD * 2**30


def tower_sizes(config, parts: list) -> Tower:
    """parts: its modules."""
    c = config.vision_config
    layers = next(m for m in parts[0].modules() if isinstance(m, nn.ModuleList))
    linears = [m for m in layers[0].modules() if isinstance(m, nn.Linear)]
    patches = getattr(c, "spatial_merge_size", 0) or config.scale_factor  # of a token's side
    patch = c.patch_size**2 * getattr(c, "temporal_patch_size", 1)
    sharded = sum(p.numel() for p in layers.parameters())
    return Tower(
        params=sum(p.numel() for part in parts for p in part.parameters()), sharded=sharded,
        layer=sharded // len(layers), layers=len(layers), hidden=linears[0].in_features,
        made=sum(m.out_features for m in linears), patches=patches**2, pixels=patches**2 * patch,
        deep=len(getattr(c, "deepstack_visual_indexes", ())))


# ---- positions ----

def positions_of(micro) -> torch.Tensor:
    """(3, 1, S) in the order of batch.pack: time, row and column of each token. A completion goes
    on behind the largest one of its prompt, on all axes."""
    prompts, ends, rest = [], {}, []
    for row in micro.rows:
        owner, length, tokens = micro.batch.sizes[row]
        if owner not in ends:
            pictures = pictures_in(micro.batch.samples[row].prompt.row)
            prompts.append(np.array(pictures.positions) if pictures else in_line(length))
            ends[owner] = prompts[-1].max() + 1
        rest.append(in_line(tokens - 1) + ends[owner])
    found = np.concatenate([*prompts, *rest] if prompts else [in_line(micro.tokens)], 1)
    return torch.from_numpy(found).long().unsqueeze(1)


def in_line(tokens: int):
    """Of a text: (3, tokens)."""
    return np.tile(np.arange(tokens, dtype=np.int32), (3, 1))
