"""seeing.py: what a model that sees has beside.

In a packed input each prompt stands once, so its pictures are computed once for their group. Their
features stand at places of the prompt, never where the image token is: a completion may have it.
"""
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from parts.pictures import idefics3, qwen2_vl
from parts.pictures.rows import pictures_in

CLASSES = {kind: f"{name}ForConditionalGeneration" for kind, name in {
    "idefics3": "Idefics3", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL"}.items()}  # of transformers
FAMILIES = {kind: idefics3 if kind == "idefics3" else qwen2_vl for kind in CLASSES}
NEVER = -100.0  # is added to the image token's logit: no policy samples it. vLLM's lowest


def sees(config) -> bool:
    """Whether the model of this config sees pictures."""
    return config.model_type in FAMILIES


def text_of(lm):
    """The part of a model that reads tokens; of a text model all of it."""
    return getattr(lm.base_model, FAMILIES[lm.config.model_type].TEXT) if sees(lm.config) else lm


def tower_of(lm) -> list:
    """The modules that make features of pixels. []: a text model."""
    names = FAMILIES[lm.config.model_type].TOWER if sees(lm.config) else ()
    return [getattr(lm.base_model, name) for name in names]


def train_tower(lm, on: bool) -> None:
    """Whether the tower's weights are trained."""
    for part in tower_of(lm):
        part.requires_grad_(on)


def forbid(lm, logits) -> None:
    """In place (n, V), of a model that sees: rollout.py forbids its engine the same."""
    logits.detach()[..., lm.config.image_token_id] += NEVER  # a constant, so without a gradient


@dataclass
class Tower:
    """The sizes of what makes features of pictures, for the plan (plan.py)."""
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


def tower_sizes(lm) -> Tower | None:
    """None: a text model."""
    if not tower_of(lm):
        return None
    parts, c = tower_of(lm), lm.config.vision_config
    layers = next(m for m in parts[0].modules() if isinstance(m, nn.ModuleList))
    linears = [m for m in layers[0].modules() if isinstance(m, nn.Linear)]
    patches = getattr(c, "spatial_merge_size", 0) or lm.config.scale_factor  # of a token's side
    patch = c.patch_size**2 * getattr(c, "temporal_patch_size", 1)
    sharded = sum(p.numel() for p in layers.parameters())
    return Tower(
        params=sum(p.numel() for part in parts for p in part.parameters()), sharded=sharded,
        layer=sharded // len(layers), layers=len(layers), hidden=linears[0].in_features,
        made=sum(m.out_features for m in linears), patches=patches**2, pixels=patches**2 * patch,
        deep=len(getattr(c, "deepstack_visual_indexes", ())))


def pictures_of(lm, micro) -> dict[str, torch.Tensor]:
    """What `embedded` needs of the pictures of a micro-batch: pixels, as the family has them, and
    the places (n,) of their features in its packed input."""
    pixels, places, start = [], [], 0
    owners = {micro.batch.sizes[row][0]: row for row in micro.rows}
    for row in owners.values():  # each prompt once, in the order of batch.pack
        prompt = micro.batch.samples[row].prompt.row
        if found := pictures_in(prompt):
            pixels.append(found.eyes.pixels(found.sources))
            places += [start + place for place in found.places]
        start += len(prompt.prompt_ids)
    if not pixels:  # FSDP: all ranks gather the tower, so one that sees nothing runs it too
        pixels = [FAMILIES[lm.config.model_type].nothing(lm.config)]
    found = {"pixels": [torch.cat(part).to(micro.device) for part in zip(*pixels, strict=True)],
             "places": torch.tensor(places, dtype=torch.long, device=micro.device)}
    if len(found["pixels"]) > 1:  # with grids, of which tokens have positions
        found["position_ids"] = positions_of(micro).to(micro.device)
    return found


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


def embedded(lm, input_ids, pixels, places, **inputs) -> dict:
    """What the part that reads tokens gets: features of pictures among the embeddings of ids."""
    x = lm.get_input_embeddings()(input_ids)  # (1, S, H)
    values, *grids = pixels
    found = FAMILIES[lm.config.model_type].features(lm, values.to(x.dtype), *grids)
    first, *deep = [part[:len(places)].unsqueeze(0) for part in found]  # (1, n, H)
    inputs["inputs_embeds"] = x.index_copy(1, places, first)
    if deep:  # for each of the first layers (S, H): what is added to all tokens, mostly 0
        inputs |= {"visual_pos_masks": torch.ones_like(input_ids, dtype=torch.bool),
                   "deepstack_visual_embeds": [
                       torch.zeros_like(x).index_copy(1, places, part)[0] for part in deep]}
    return inputs
