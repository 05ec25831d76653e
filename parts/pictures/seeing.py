"""seeing.py: what a model that sees has beside.

In a packed input each prompt stands once, so its pictures are computed once for their group. Their
features stand at places of the prompt, never where the image token is: a completion may have it.
"""
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from architecture import Architecture, Shape
from memory import Memory
from model import LogprobModel, Model, Trained
from parts.pictures.engine import HELD, NEVER
from parts.pictures.kinds import ARCHITECTURES, NAMES
from parts.pictures.rows import pictures_in


class Seeing(Architecture):
    """A model that sees: a tower makes features of pixels, and its text part reads them."""
    auto = "AutoModelForImageTextToText"

    def __init__(self, config):
        super().__init__(config)
        self.own = ARCHITECTURES[config.model_type]

    @property
    def class_name(self) -> str:
        """See Architecture."""
        return f"{NAMES[self.config.model_type]}ForConditionalGeneration"

    def stacks(self, lm) -> list:
        """See Architecture. Its text part, and those of the tower."""
        return [getattr(lm.base_model, name) for name in (self.own.TEXT, *self.own.TOWER)]

    def shape(self, lm) -> Shape:
        """See Architecture."""
        shape, tower = super().shape(lm), tower_sizes(self.config, self.stacks(lm)[1:])
        return SeeingShape(**vars(shape) | {"root": shape.root - tower.sharded}, tower=tower)


class SeeingModel(Model):
    """A model that gets pictures beside the ids of a packed input."""

    def states(self, inputs):
        """See Model. The text part gets features of pictures among the embeddings of ids."""
        text = self.architecture.stacks(self.lm)[0]
        inputs = self.embedded(**inputs)
        return text.base_model(**inputs, use_cache=False).last_hidden_state

    def embedded(self, input_ids, pixels, places, **inputs) -> dict:
        """What the text part gets."""
        x = self.lm.get_input_embeddings()(input_ids)  # (1, S, H)
        values, *grids = pixels
        found = self.architecture.own.features(self.lm, values.to(x.dtype), *grids)
        first, *deep = [part[:len(places)].unsqueeze(0) for part in found]  # (1, n, H)
        inputs["inputs_embeds"] = x.index_copy(1, places, first)
        if deep:  # for each of the first layers (S, H): what is added to all tokens, mostly 0
            inputs |= {"visual_pos_masks": torch.ones_like(input_ids, dtype=torch.bool),
                       "deepstack_visual_embeds": [
                           torch.zeros_like(x).index_copy(1, places, part)[0] for part in deep]}
        return inputs


class SeeingLogprobModel(SeeingModel, LogprobModel):
    """Log-probs of a model that sees."""

    def head(self, hidden):
        """See LogprobModel. No policy samples the id of a picture."""
        logits = super().head(hidden)
        logits.detach()[..., self.lm.config.image_token_id] += NEVER
        return logits

    def hf_forward(self, inputs, keep):
        """See LogprobModel. The features go to the same places: transformers looks for image
        tokens, and a completion may have them."""
        if len(inputs["pixels"]) == 1:  # else positions have three axes
            inputs = {name: x for name, x in inputs.items() if name != "position_ids"}
        inputs = {name: x for name, x in inputs.items() if name != "packed"}
        return self.head(self.states(inputs)[:, keep])


class Seer(Trained):
    """A policy or a critic that sees."""

    def __init__(self, module, world, args):
        for part in module.architecture.stacks(module.lm)[1:]:
            part.requires_grad_(args.train_vision)
        super().__init__(module, world, args)

    def inputs(self, micro) -> dict:
        """See Trained. Pixels, as the family has them, and the places (n,) of their features in the
        packed input."""
        own, pixels, places, start = self.module.architecture.own, [], [], 0
        owners = {micro.batch.sizes[row][0]: row for row in micro.rows}
        for row in owners.values():  # each prompt once, in the order of batch.pack
            prompt = micro.batch.samples[row].prompt.row
            if seen := pictures_in(prompt):
                pixels.append(seen.eyes.pixels(seen.sources))
                places += [start + place for place in seen.places]
            start += len(prompt.prompt_ids)
        if not pixels:  # FSDP: all ranks gather the tower, so one that sees nothing runs it too
            pixels = [own.nothing(self.module.lm.config)]
        found = super().inputs(micro) | {
            "pixels": [torch.cat(part).to(micro.device) for part in zip(*pixels, strict=True)],
            "places": torch.tensor(places, dtype=torch.long, device=micro.device)}
        if len(found["pixels"]) > 1:  # with grids, of which tokens have positions
            found["position_ids"] = positions_of(micro).to(micro.device)
        return found


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


class SeeingMemory(Memory):
    """Memory of a model with a tower before its text part."""

    @property
    def trained(self) -> int:
        """See Memory. The tower only with --train_vision."""
        trained, vision = super().trained, self.args.train_vision
        return trained if vision or not trained else trained - self.shape.tower.params

    def gathered(self, shape: SeeingShape, root: int, update: bool) -> float:
        """See Memory. And a layer of the tower and the next one."""
        return super().gathered(shape, root, update) + 2 * self.c * shape.tower.layer

    def of_token(self, shape: SeeingShape, phase, update: bool) -> tuple[float, float]:
        """See Memory. And what the tower's layers keep."""
        kept = 1 if self.args.checkpointing else shape.tower.layers
        learns = update and self.args.train_vision
        stays, work = super().of_token(shape, phase, update)
        return stays + shape.tower.bytes(self.c, kept if learns else 0), work

    def engine_work(self, tokens: int, seqs: int) -> float:
        """See Memory. And the tower's, and the pixels that the engine holds."""
        tower = tokens * self.shape.tower.bytes(self.c, 0) + HELD * 2**30
        return super().engine_work(tokens, seqs) + tower


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
    found = np.concatenate([*prompts, *rest] if prompts else [in_line(micro.size)], 1)
    return torch.from_numpy(found).long().unsqueeze(1)


def in_line(tokens: int):
    """Of a text: (3, tokens)."""
    return np.tile(np.arange(tokens, dtype=np.int32), (3, 1))
