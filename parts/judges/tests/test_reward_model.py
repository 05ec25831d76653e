"""examples/reward_model.py: a text that the model has no window for is never half a reward."""
import importlib.util
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from examples import tiny
from families import ROOT

SIZES = dict(vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0,
             initializer_range=0.5)
# model_type: what its window is called, and by how much the word says more than it takes
KINDS = {"qwen2": ("max_position_embeddings", 0), "llama": ("max_position_embeddings", 0),
         "gpt2": ("n_positions", 0), "bert": ("max_position_embeddings", 0),
         "roberta": ("max_position_embeddings", 1), "qwen3": ("max_position_embeddings", 0)}


def loaded(folder, kind: str, window: int, named: bool, monkeypatch):
    """The module with a random model of this window. named: the tokenizer has a limit, and the
    model a larger one."""
    word, more = KINDS[kind]
    config = AutoConfig.for_model(kind, **SIZES | {word: window + (256 if named else more)})
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = tiny.make_tokenizer()
    tokenizer.model_max_length = window if named else 10**30
    tokenizer.save_pretrained(folder)
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    spec = importlib.util.spec_from_file_location("own", ROOT / "examples/reward_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_scored_whole_or_refused_with_both_lengths(kind, chat, tmp_path, monkeypatch):
    rng, window = random.Random(f"window {kind} {chat}"), 64
    module = loaded(tmp_path, kind, window, rng.random() < 0.5, monkeypatch)
    module.tokenizer.chat_template = module.tokenizer.chat_template if chat else None
    sizes, outcomes = [0, 1, 500, 6000, *rng.choices(range(30, 70), k=20)], set()
    for size in sizes:
        question, answer = "Sort 31", "".join(rng.choices("0123456789", k=size))
        length = len(module.inputs_of(question, answer)["input_ids"][0])
        outcomes.add(length > window)
        if length > window:
            with pytest.raises(ValueError, match=rf"{length:,} tokens.* {window}\b"):
                module.score(answer, question)
        else:
            assert isinstance(module.score(answer, question), float)
    assert outcomes == {True, False}
