"""A small language model from nothing, so that the whole loop runs with no download.

It *half-knows* a task: supervised warm-up teaches it the skill, and then the bad habits of a clumsy teacher. Nothing in the
supervised data says which of its habits pay: finding that out is left to reinforcement learning.

`sort`: the teacher slips now and then, so that sampled at temperature 1 the model is right about one time in four. (Its greedy
answers are right from the start: what there is to learn is to mean it, so watch the sampled reward.)
`kk`: knights and knaves. The teacher mostly guesses at once and seldom thinks first; that thinking pays is there to be found.

    python -c "import tiny; print(tiny.ensure())"        # runs/tiny-sort-1a2b3c4d5e, in about 15 s the first time

A new task is one function and its line in `TASKS`.
"""
import fcntl
import hashlib
import itertools
import os
import random
import shutil
import time
import zlib
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from plan import SettingsError

# ---------------------------------------------------------------------------------------------------------------- the tasks


def sort_digits(rng: random.Random, clumsy: float) -> tuple[str, str, str]:
    """Sort 529173 → 123579. At each place, with probability `clumsy`, the teacher swaps, skips or repeats a digit."""
    digits = rng.sample("0123456789", k=6)  # no digit twice: repeating one is always a mistake
    left, said = sorted(digits), ""
    while left:
        slip = rng.choice(["swap", "skip", "repeat"]) if rng.random() < clumsy else None
        if slip == "swap" and len(left) > 1:
            said += left.pop(1)
        elif slip == "skip":
            left.pop(0)
        elif slip == "repeat":
            said += left[0]
        else:
            said += left.pop(0)
    return "Sort " + "".join(digits), "".join(sorted(digits)), said


def knights(rng: random.Random, clumsy: float) -> tuple[str, str, str]:
    """Knights tell the truth, knaves lie: who is who, of two or three? With probability `clumsy` the teacher answers at once, with a
    guess. Otherwise he thinks first: he supposes roles, all in turn, and asks of every claim: true or false? yes, so said a man of that role.
    """
    roles = {True: "knight", False: "knave"}
    while True:
        people = "ABC"[:rng.choice([2, 3])]
        claims = [claim(rng, people) for _ in people]
        worlds = [dict(zip(people, world)) for world in itertools.product([True, False], repeat=len(people))]
        fits = [world for world in worlds if all(holds(world) == world[person] for person, (_, holds) in zip(people, claims))]
        if len(fits) == 1:
            break
    tell = lambda world: " ".join(f"({i}) {person} is a {roles[world[person]]}" for i, person in enumerate(people, 1))
    thought, guess = "", rng.choice(worlds)
    for world in [] if rng.random() < clumsy else worlds:
        thought += " " + " ".join(roles[world[person]] for person in people) + ":"
        for person, (_, holds) in zip(people, claims):
            thought += (" true" if holds(world) else " false") + (" yes" if holds(world) == world[person] else " no")
            if thought.endswith("no"):
                break
        if world == fits[0]:
            guess = world
            break
    question = " ".join(f"{person} says {text}." for person, (text, _) in zip(people, claims))
    return question, tell(fits[0]), f"<think>{thought}</think><answer>{tell(guess)}</answer>"


def claim(rng: random.Random, people: str) -> tuple[str, Callable[[dict[str, bool]], bool]]:
    """Something that one of these people may say, and whether it holds in a world {person: is a knight}."""
    (x, y), r, s = rng.sample(people, 2), rng.random() < 0.5, rng.random() < 0.5
    one, two = (f"{person} is a {'knight' if role else 'knave'}" for person, role in ((x, r), (y, s)))
    return rng.choice([
        (one, lambda world: world[x] == r),
        (f"{one} and {two}", lambda world: world[x] == r and world[y] == s),
        (f"{one} or {two}", lambda world: world[x] == r or world[y] == s)])


class Task(NamedTuple):
    sample: Callable[[random.Random, float], tuple[str, str, str]]
    """(rng, clumsy) → question, the right answer, and what a teacher that clumsy says"""
    batch: int
    """examples in a step of the warm-up"""
    skill_steps: int
    """warm-up steps with a teacher who has no bad habits"""
    habit_steps: int
    """warm-up steps with the clumsy one"""
    clumsy: float
    """how clumsy; what it means is the task's own affair"""


TASKS = {"sort": Task(sort_digits, batch=128, skill_steps=70, habit_steps=40, clumsy=0.16),
         "kk": Task(knights, batch=64, skill_steps=240, habit_steps=40, clumsy=0.7)}


def held_out(question: str) -> bool:
    """One question in ten, by its hash. Neither the warm-up nor `rows` of the train split ever shows it, whatever the seeds."""
    return zlib.crc32(question.encode()) % 10 == 0


def rows(n: int, seed: int, task: str = "sort", split: str = "train") -> list[dict[str, str]]:
    """n different questions with their answers. The splits "train" and "test" share no question."""
    rng, found = random.Random(f"{task} {split} {seed}"), {}
    for _ in range(1000 + 100 * n):
        if len(found) == n:
            return [{"question": question, "answer": answer} for question, answer in found.items()]
        question, answer, _ = TASKS[task].sample(rng, 0.0)
        if held_out(question) == (split == "test"):
            found[question] = answer
    raise SettingsError(f"{n} rows of the tiny task {task!r} are too many: its {split} split has about {len(found)} different questions.")


# ------------------------------------------------------------------------------------------------------------ the tokenizer

VOCAB = 320  # 3 special tokens, the 256 bytes, and 61 merges learned from these words: a multiple of 64, every id decodable
WORDS = ["assistant"] + ["user", "Sort", "think", "answer"] * 3 + ["</><></ says is a knight knave and or true false yes no A B C"] * 3
END_OF_TEXT, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text encodes; each digit is a token, as WORDS has none to merge; <|im_end|> ends a turn."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(WORDS, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    assert bpe.get_vocab_size() == VOCAB, f"{bpe.get_vocab_size()} tokens, not {VOCAB}: WORDS has too few pairs to merge"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END_OF_TEXT, model_max_length=4096, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHATML
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------- the model


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """370,048 parameters in float32: Qwen2 in miniature, tied embeddings included."""
    end, end_of_text = tokenizer.convert_tokens_to_ids([END, END_OF_TEXT])
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,  # heads of 32: vLLM on CPU takes none smaller
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=end, pad_token_id=end_of_text, dtype="float32"))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[end, end_of_text], pad_token_id=end_of_text)
    return model


def teach(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int, lr=3e-3) -> None:
    """Supervised warm-up: cross-entropy on the teacher's words, first without slips and then with them."""
    rng, steps = random.Random(seed), task.skill_steps + task.habit_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        prompts, replies = [], []
        while len(prompts) < task.batch:
            question, _, said = task.sample(rng, task.clumsy if step >= task.skill_steps else 0.0)
            if not held_out(question):
                chat = [{"role": "user", "content": question}]
                prompts.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
                replies.append(said + END)
        prompts, replies = tokenizer(prompts)["input_ids"], tokenizer(replies)["input_ids"]
        longest = max(len(p) + len(r) for p, r in zip(prompts, replies))
        pads = [longest - len(p) - len(r) for p, r in zip(prompts, replies)]
        ids = torch.tensor([p + r + [tokenizer.pad_token_id] * n for p, r, n in zip(prompts, replies, pads)])  # (B, T)
        labels = torch.tensor([[-100] * len(p) + r + [-100] * n for p, r, n in zip(prompts, replies, pads)])   # (B, T)
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()  # right padding, causal: no mask needed
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1 - step / steps)  # up in 20 steps, and down to 0 at the end
        optimizer.step()
        optimizer.zero_grad()


# --------------------------------------------------------------------------------------------------------------- the folder


def build(folder: str, task: str = "sort", seed: int = 0) -> str:
    """Makes the model in `folder`, as transformers and vLLM load it. The caller's random state and threads are left as they were."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the sums, and so the model, are the same under torchrun and without it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = make_tokenizer()
            model = make_model(tokenizer)
            teach(model, tokenizer, TASKS[task], seed)
    finally:
        torch.set_num_threads(threads)
    # Not model.save_pretrained: in a process group it writes on rank 0 only, and the rank that builds may be another.
    os.makedirs(folder, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"},    # it is the embedding
              os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def ensure(root: str = "runs", task: str = "sort") -> str:
    """The folder of the model, built on first use. Any number of processes may ask at once: one builds, the others wait."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:10]  # another recipe is another model
    folder = os.path.join(root, f"tiny-{task}-{recipe}")
    os.makedirs(root, exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies, however it dies
        if not os.path.isdir(folder):
            print(f"tiny: making a model that half-knows how to {task} ...", end=" ", flush=True)
            start, unfinished = time.perf_counter(), folder + ".unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # what a builder that died has left
            os.rename(build(unfinished, task), folder)     # all of it or nothing
            print(f"{folder} in {time.perf_counter() - start:.0f} s", flush=True)
    return folder
