"""seeing.py: what a model that sees has beside. (rollout.SeeingEngine: an engine.)

In a packed input each prompt stands once, so its pictures are computed once for their group. Their
features stand at places of the prompt, never where the image token is: a policy may sample it.
"""
from dataclasses import dataclass

import torch

CLASSES = {"idefics3": "Idefics3ForConditionalGeneration"}
WHY_NOT = dict.fromkeys(
    ("internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"),
    ": its processor needs torchvision, and its part of the trainer is not written"
) | dict.fromkeys(("gemma3", "paligemma"), ": on a CPU vLLM's attention drops its pictures' mask")


def sees(config) -> bool:
    return config.model_type in CLASSES


def unserved(config):
    """Yields (what, whether this model has it): what vLLM does not compute alike."""
    if sees(config):
        text, tied = config.get_text_config(), config.tie_word_embeddings
        yield f"a text model of type {text.model_type}", text.model_type != "llama"
        yield "two values of tie_word_embeddings", tied != text.tie_word_embeddings


def text_of(lm):
    """The part of a model that reads tokens; of a text model all of it."""
    return lm.base_model.text_model if sees(lm.config) else lm


def tower_of(lm) -> list:
    """The modules that make features of pixels. []: a text model."""
    return [lm.base_model.vision_model, lm.base_model.connector] if sees(lm.config) else []


def train_tower(lm, on: bool) -> None:
    """Whether the tower's weights are trained."""
    for part in tower_of(lm):
        part.requires_grad_(on)


@dataclass
class Tower:
    """The sizes of what makes features of pictures, for the plan (preflight/memory.py)."""
    params: int  # with the projector
    sharded: int  # parameters of all its layers
    layer: int  # of one
    layers: int
    hidden: int
    inner: int
    patches: int  # that become one token
    pixels: int  # of one token

    def bytes(self, c: int, kept: int) -> int:
        """For each token of the input, as if all were of pictures: pixels, the work of a layer,
        and what `kept` layers keep for backward. c: bytes of a number."""
        work = 5 * self.hidden + 2 * self.inner
        saved = min(kept, self.layers) * (8 * self.hidden + 2 * self.inner)
        if 0 < kept < self.layers:  # the others keep their inputs
            saved += self.layers * self.hidden
        return 12 * self.pixels + self.patches * c * (work + saved)


def tower_sizes(lm) -> Tower | None:
    """None: a text model."""
    if not tower_of(lm):
        return None
    parts, c, patches = tower_of(lm), lm.config.vision_config, lm.config.scale_factor**2
    sharded = sum(p.numel() for p in parts[0].encoder.parameters())
    return Tower(
        params=sum(p.numel() for part in parts for p in part.parameters()), sharded=sharded,
        layer=sharded // c.num_hidden_layers, layers=c.num_hidden_layers, hidden=c.hidden_size,
        inner=c.intermediate_size, patches=patches, pixels=patches * c.patch_size**2)


def pictures_of(lm, micro) -> dict[str, torch.Tensor]:
    """The pictures of a micro-batch, for `embedded`: pixels (tiles, 3, h, w), and the places (n,)
    of their features in its packed input. {}: a text model."""
    if not sees(lm.config):
        return {}
    pixels, places, start = [], [], 0
    owners = {micro.batch.sizes[row][0]: row for row in micro.rows}
    for row in owners.values():  # each prompt once, in the order of packing.pack
        prompt = micro.batch.samples[row].prompt.row
        if prompt.pictures:
            pixels.append(prompt.pictures.eyes.pixels(prompt.pictures.sources))
            places += [start + place for place in prompt.pictures.places]
        start += len(prompt.prompt_ids)
    if not pixels:  # FSDP: all ranks gather the tower, so one that sees nothing runs it too
        side = lm.config.vision_config.patch_size * lm.config.scale_factor
        pixels = [torch.ones(1, 3, side, side)]
    return {"pixels": torch.cat(pixels).to(micro.device),
            "places": torch.tensor(places, dtype=torch.long, device=micro.device)}


def embedded(lm, input_ids, pixels=None, places=None, **inputs) -> dict:
    """What transformers' model gets: the ids (1, S) of a text model, else the features of pictures
    among the embeddings of its tokens."""
    if pixels is None:
        return inputs | {"input_ids": input_ids}
    x = lm.get_input_embeddings()(input_ids)  # (1, S, H)
    tower, connector = tower_of(lm)
    features = connector(tower(pixel_values=pixels.to(x.dtype)).last_hidden_state)
    features = features.flatten(0, 1)[:len(places)]  # (n, H)
    return inputs | {"inputs_embeds": x.index_copy(1, places, features.unsqueeze(0))}
