"""Pictures with squares to count, and a random model that sees them, from nothing.

    python examples/squares.py                makes runs/squares/: the pictures, rows and model
    python examples/squares.py qwen2_5_vl     the same, with a model of another family beside

A picture has 1 to 4 white squares on a grid of 2 x 2. train.jsonl and test.jsonl have other shades
and places; swapped.jsonl has the rows of test.jsonl with the answers of others: what a model that
sees nothing could reach. The model is an Idefics3 (SmolVLM) of 0.3 M parameters; those of Qwen-VL
need torchvision.
"""
import argparse
import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":  # Python looks in examples/ only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from examples import tiny

TILE, PATCH = 32, 8  # pixels of a side: what the tower sees at once, and a patch of it
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))]
QWENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHATML = (  # a message is text, or a list of texts and images
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
QWENS_CHATML = CHATML.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
KINDS = ("idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6])


def draw(rng: random.Random, count: int) -> Image.Image:
    """`count` squares in some of four places, brighter than what is around them."""
    image = Image.new("RGB", (TILE, TILE), tuple(rng.randrange(60) for _ in range(3)))
    for place in rng.sample(range(4), count):
        shade, side = tuple(rng.randrange(180, 256) for _ in range(3)), rng.randrange(9, 13)
        x, y = (16 * at + rng.randrange(16 - side) for at in (place % 2, place // 2))
        image.paste(shade, (x, y, x + side, y + side))
    return image


def make_rows(folder: Path, name: str, n: int, swap: bool = False) -> None:
    """n rows of NAME.jsonl, and their pictures. swap: each has the answer of the row before it."""
    rng, rows = random.Random(name), []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    counts = [rng.randrange(1, 5) for _ in range(n)]
    for i, count in enumerate(counts):
        path = f"pictures/{name}_{i:04d}.png"
        draw(rng, count).save(folder / path)
        answer = counts[i - 1] if swap else count
        rows.append({"prompt": "Count", "image": path, "answer": str(answer)})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_processor(splits: int = 1, kind: str = "idefics3"):
    """splits: tiles in a row and in a column of the largest picture."""
    tokenizer, qwen = tiny.make_tokenizer(), kind != "idefics3"
    tokenizer.add_special_tokens({"additional_special_tokens": QWENS if qwen else MARKS})
    tokenizer.chat_template = QWENS_CHATML if qwen else CHATML
    if qwen:
        return qwen_processor(kind, tokenizer, splits)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": splits * TILE}, max_image_size={"longest_edge": TILE})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHATML)


def qwen_processor(kind: str, tokenizer, splits: int):
    """It sees 4 tokens in a tile."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        from parts.pictures.qwen2_vl import INSTALL
        raise SystemExit(f"examples/squares.py needs torchvision: {INSTALL}.") from None
    import transformers
    from transformers import Qwen2VLImageProcessor
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    videos = "Qwen3VL" if kind == "qwen3_vl" else "Qwen2VL"
    size = dict(shortest_edge=TILE**2, longest_edge=(splits * TILE) ** 2)
    given = dict(size=size, patch_size=PATCH, temporal_patch_size=2, merge_size=2)
    return getattr(transformers, f"{name}Processor")(
        Qwen2VLImageProcessor(**given), tokenizer,
        getattr(transformers, f"{videos}VideoProcessor")(**given), chat_template=QWENS_CHATML)


def ids_of(tokenizer) -> dict:
    return dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None)


def config_of(kind: str, tokenizer):
    """Of a small model."""
    ids, token = ids_of(tokenizer), tokenizer.convert_tokens_to_ids
    text = dict(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.05, tie_word_embeddings=False, **ids)
    of_qwen = dict(rope_parameters=ROPE)
    tower = dict(hidden_size=64, intermediate_size=128, initializer_range=0.1, patch_size=PATCH)
    if kind == "idefics3":
        return AutoConfig.for_model(
            kind, text_config=text | {"model_type": "llama"}, image_token_id=token("<image>"),
            vision_config=tower | dict(num_hidden_layers=2, num_attention_heads=2,
                                       image_size=TILE),
            scale_factor=2, tie_word_embeddings=False, **ids)
    tower |= dict(depth=2, num_heads=2, out_hidden_size=128, spatial_merge_size=2)
    if kind == "qwen2_vl":  # its hidden_size is the text model's
        tower |= dict(hidden_size=128, embed_dim=64, mlp_ratio=2)
    if kind == "qwen2_5_vl":  # the first layer sees windows of a tile
        tower |= dict(window_size=TILE, fullatt_block_indexes=[1])
    if kind == "qwen3_vl":
        of_qwen = dict(head_dim=32, rope_parameters=ROPE | {"mrope_interleaved": True})
        tower |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    return AutoConfig.for_model(
        kind, text_config=text | of_qwen, vision_config=tower, tie_word_embeddings=False,
        **{f"{name}_token_id": token(f"<|{mark}|>") for name, mark in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
            ("vision_end", "vision_end"))}, **ids)


def make_model(folder: str, seed: int = 0, splits: int = 1, noise: float = 0.0,
               kind: str = "idefics3") -> None:
    """A random model with its processor. noise: of all parameters, norms and biases too."""
    processor = make_processor(splits, kind)
    config = config_of(kind, processor.tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p += noise * torch.randn_like(p)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, **ids_of(processor.tokenizer))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main(folder: Path = Path("runs/squares"), *kinds: str) -> None:
    for name, n in ("train", 512), ("test", 128), ("swapped", 128):
        make_rows(folder, name, n, swap=name == "swapped")
    make_model(str(folder / "model"))
    for kind in kinds:
        make_model(str(folder / kind), kind=kind)
    print(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []],
                        metavar="KIND", help=", ".join(KINDS))
    main(Path("runs/squares"), *parser.parse_args().kinds)
