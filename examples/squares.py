"""Pictures with squares to count, and a random model that sees them, from nothing.

    python examples/squares.py        makes runs/squares/: the pictures, the rows and the model

A picture has 1 to 4 white squares on a grid of 2 x 2. train.jsonl and test.jsonl have other shades
and places; swapped.jsonl has the rows of test.jsonl with the answers of others: what a model that
sees nothing could reach. The model is an Idefics3 (SmolVLM) of 0.3 M parameters.
"""
import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":  # Python looks in examples/ only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from examples import tiny

TILE = 32  # pixels of a side that the tower sees at once
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))]
CHATML = (  # a message is text, or a list of texts and images
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


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


def make_processor(splits: int = 1) -> Idefics3Processor:
    """splits: tiles in a row and in a column of a picture; 1: the picture is one tile."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = CHATML
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": splits * TILE}, max_image_size={"longest_edge": TILE})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHATML)


def make_model(folder: str, seed: int = 0, splits: int = 1, noise: float = 0.0) -> None:
    """A random model with its processor. noise: of all parameters, norms and biases too."""
    processor, tower = make_processor(splits), dict(hidden_size=64, num_hidden_layers=2)
    tokenizer = processor.tokenizer
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
               bos_token_id=None)
    text = dict(
        model_type="llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, initializer_range=0.05, tie_word_embeddings=False, **ids)
    config = Idefics3Config(
        text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_config=tower | dict(intermediate_size=128, num_attention_heads=2, image_size=TILE,
                                   patch_size=8, initializer_range=0.1),
        scale_factor=2, tie_word_embeddings=False, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
        with torch.no_grad():
            for p in model.parameters():
                p += noise * torch.randn_like(p)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ids)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main(folder: Path = Path("runs/squares")) -> None:
    for name, n in ("train", 512), ("test", 128), ("swapped", 128):
        make_rows(folder, name, n, swap=name == "swapped")
    make_model(str(folder / "model"))
    print(folder)


if __name__ == "__main__":
    main()
