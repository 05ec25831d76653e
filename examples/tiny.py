"""Makes a small language model from nothing: first it learns a skill, then bad habits.

    python examples/tiny.py            makes the model of each task in runs/
    python examples/tiny.py sort kk    makes these

See docs/use/start.md. A run makes the model that it needs: --model tiny, tiny:kk or tiny:guess.
"""
import argparse
import fcntl
import os
import random
import sys
import zlib
from collections import namedtuple
from contextlib import suppress
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # Python looks in examples/ only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from errors import SettingsError
from examples import guess
from examples.tiny_experts import make_mixture
from model_files import architecture_of


def sort_digits(rng, clumsy):
    """Sort 529173 -> 123579. The clumsy teacher sorts downwards: 975321."""
    digits = rng.sample("0123456789", k=6)
    reply = sorted(digits, reverse=rng.random() < clumsy)
    return "Sort " + "".join(digits), "".join(sorted(digits)), "".join(reply)


def knights(rng, clumsy):
    """Knights tell the truth, knaves lie. The teacher tries all roles, or guesses."""
    right = []
    while len(right) != 1:
        people = "ABC"[:rng.choice([2, 3])]
        claims = {x: claim(rng, people) for x in people}
        roles = product(["knight", "knave"], repeat=len(people))
        worlds = [dict(zip(people, world, strict=True)) for world in roles]
        thoughts = [think(world, claims) for world in worlds]
        right = [i for i, thought in enumerate(thoughts) if thought.endswith("yes")]
    thought, guess = "", rng.choice(worlds)
    if rng.random() >= clumsy:
        thought, guess = "".join(thoughts[:right[0] + 1]), worlds[right[0]]
    question = " ".join(f"{x} says {claims[x]}." for x in people)
    reply = f"<think>{thought}</think><answer>{words(guess)}</answer>"
    return question, words(worlds[right[0]]), reply


def words(world):
    """Such as: (1) A is a knave (2) B is a knight."""
    return " ".join(f"({i}) {x} is a {role}" for i, (x, role) in enumerate(world.items(), 1))


def claim(rng, people):
    """Such as: A is a knave or B is a knight."""
    one, two = (f"{x} is a {'knight' if rng.random() < 0.5 else 'knave'}"
                for x in rng.sample(people, 2))
    return rng.choice([one, f"{one} and {two}", f"{one} or {two}"])


def think(world, claims):
    """For each claim: is it true, and would that person say it?"""
    thought, facts = f" {' '.join(world.values())}:", {f"{x} is a {world[x]}" for x in world}
    for x, text in claims.items():
        true = any(facts >= set(part.split(" and ")) for part in text.split(" or "))
        said = true == (world[x] == "knight")
        thought += f" {'true' if true else 'false'} {'yes' if said else 'no'}"
        if not said:
            break
    return thought


def game(rng, clumsy):
    """Find a number that the question does not tell. The teacher halves, or guesses anything."""
    numbers = left = range(1, guess.LARGEST + 1)
    secret, turns = str(rng.choice(numbers)), []
    while not turns or turns[-1]["role"] == "user":
        i = rng.choice(numbers) if rng.random() < clumsy else left[len(left) // 2]
        turns.append({"role": "assistant", "content": str(i)})
        if answer := guess.reply({"answer": secret}, turns):
            turns.append({"role": "user", "content": answer})
            left = [n for n in left if (n > i if answer == "higher" else n < i)]
    return f"Game {rng.randrange(10**5):05d}", secret, [turn["content"] for turn in turns]


# sample(rng, clumsy) -> question, right answer, the teacher's reply: its words, or a list of its
# turns and the user's. clumsy: how often it is wrong or guessed, in the habit_steps only.
Task = namedtuple("Task", "sample batch skill_steps habit_steps clumsy")
TASKS = {"sort": Task(sort_digits, batch=128, skill_steps=70, habit_steps=40, clumsy=0.75),
         "kk": Task(knights, batch=64, skill_steps=240, habit_steps=40, clumsy=0.7),
         "guess": Task(game, batch=64, skill_steps=200, habit_steps=30, clumsy=0.7),
         # A teacher: no bad habits.
         "skilled": Task(sort_digits, batch=128, skill_steps=100, habit_steps=0, clumsy=0.0),
         # A mixture of experts learns the same.
         "experts": Task(sort_digits, batch=128, skill_steps=70, habit_steps=40, clumsy=0.75),
         # Mostly right, so it needs no reward: docs/use/start.md.
         "sharpen": Task(sort_digits, batch=128, skill_steps=70, habit_steps=40, clumsy=0.4)}


def held_out(question):
    """One question in ten: the test split."""
    return zlib.crc32(question.encode()) % 10 == 0


def rows(n, seed, task="sort", split="train"):
    """n different questions and answers."""
    task = task or "sort"
    if task not in TASKS or split not in ("train", "test"):
        raise SettingsError(f"no such rows: tiny:{task}@{split}; tiny has {', '.join(TASKS)}, "
                            f"train and test.")
    rng, found = random.Random(f"{task} {split} {seed}"), {}
    for _ in range(1000 + 100 * n):
        if len(found) == n:
            return list(found.values())
        question, answer, _ = TASKS[task].sample(rng, 0.0)
        if held_out(question) == (split == "test"):
            found[question] = {"question": question, "answer": answer}
    raise SettingsError(
        f"{n} rows of tiny's task {task!r}: {split} has only about {len(found)} different.")


VOCAB = 320  # 3 special tokens, 256 bytes, 61 merges
WORDS = ["assistant"] + ["user", "Sort", "think", "answer"] * 3 + [
    "</><></ says is a knight knave and or true false yes no A B C"] * 3
END_OF_TEXT, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # after a reply
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_tokenizer():
    """Byte-level BPE; each digit is one token."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(WORDS, VOCAB, 0, show_progress=False, special_tokens=SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token=END, pad_token=END_OF_TEXT,
        model_max_length=4096, clean_up_tokenization_spaces=False, chat_template=CHATML)


def make_model(tokenizer):
    """A Qwen2 with random weights: 370,048 parameters."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,  # heads of 32: vLLM's least on CPU
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.05,
        eos_token_id=end, pad_token_id=pad, dtype="float32", architectures=["Qwen2ForCausalLM"]))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[end, pad], pad_token_id=pad)
    return model


def make(task, tokenizer):
    """The task's model with random weights."""
    return make_mixture(tokenizer) if task == "experts" else make_model(tokenizer)


LIKE = 16  # lessons of one forward, alike in length: so little is padding


def lesson(tokenizer, question, reply):
    """A conversation with the teacher -> ids (T,), labels (T,): -100 where the user speaks."""
    turns = [question, *([reply] if isinstance(reply, str) else reply)]
    parts = [turn + END if i % 2 else USER.format(turn) for i, turn in enumerate(turns)]
    parts = tokenizer([parts[0].lstrip(), *parts[1:]])["input_ids"]
    labels = [part if i % 2 else [-100] * len(part) for i, part in enumerate(parts)]
    return torch.tensor(sum(parts, [])), torch.tensor(sum(labels, []))


def lessons(tokenizer, task, rng, clumsy):
    """A batch of them, none of the test split, the shortest first."""
    found = []
    while len(found) < task.batch:
        question, _, reply = task.sample(rng, clumsy)
        if not held_out(question):
            found.append(lesson(tokenizer, question, reply))
    return sorted(found, key=lambda pair: len(pair[0]))


def loss(model, batch, n):
    """Cross-entropy of some lessons: the sum over their labels / n, the labels of the batch."""
    ids, labels = zip(*batch, strict=True)
    # Padded on the right, causal: no mask is needed.
    ids, labels = pad_sequence(ids, True), pad_sequence(labels, True, -100)  # (LIKE, T)
    return model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=n).loss


def counted(steps):
    """The steps, under a bar on a terminal; elsewhere it prints a line each half minute."""
    text, wait = "  teaching: step {n_fmt} of {total_fmt}, {elapsed}, {remaining} left", 0.1
    if not sys.stderr.isatty():
        text, wait = text + "\n", 30
    return tqdm(range(steps), leave=False, bar_format=text, miniters=1, mininterval=wait,
                maxinterval=2 * wait, delay=wait)


def teach(model, tokenizer, task, seed):
    """Supervised training on the teacher's replies."""
    rng, steps = random.Random(seed), task.skill_steps + task.habit_steps
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for step in counted(steps):
        batch = lessons(tokenizer, task, rng, task.clumsy if step >= task.skill_steps else 0.0)
        n = sum(int((labels >= 0).sum()) for _, labels in batch)
        for i in range(0, task.batch, LIKE):
            loss(model, batch[i:i + LIKE], n).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:  # up in 20 steps, then down to 0
            group["lr"] = 3e-3 * min((step + 1) / 20, 1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()


def build(folder, task="sort", seed=0):
    """The caller's random state and threads stay as they were."""
    threads = torch.get_num_threads()
    # Not 2: beside other work threads wait for each other, and this takes 4 times as long.
    torch.set_num_threads(1)  # with any number of ranks and cores, the same sums
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        model = make(task, tokenizer)
        teach(model, tokenizer, TASKS[task], seed)
    torch.set_num_threads(threads)
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)
    # model.save_pretrained writes on rank 0 only.
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied: the embedding
    weights = {there: piece.clone() for name, p in weights.items()
               for there, piece, _ in architecture_of(model.config).pieces(name, p)}
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})


def place(root="runs", task="sort"):
    """The model's folder, made or not."""
    return f"{root}/tiny-{task}-{zlib.crc32(Path(__file__).read_bytes()):08x}"


def ensure(root="runs", task="sort"):
    """The model's folder. One process makes it; others wait."""
    folder = place(root, task)
    os.makedirs(root, exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        with suppress(OSError):  # some disks have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # free when its process ends
        if not os.path.isdir(folder):
            print(f"tiny: making the model {folder}", flush=True)
            build(folder + ".unfinished", task)  # over what a killed process left
            os.rename(folder + ".unfinished", folder)
    return folder


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    tasks = parser.parse_args().tasks
    if unknown := [task for task in tasks if task not in TASKS]:
        sys.exit(f"error: tiny.py has no task {unknown[0]!r}; it has {', '.join(TASKS)}.")
    for task in tasks or TASKS:
        print(ensure(task=task))


if __name__ == "__main__":
    main()
