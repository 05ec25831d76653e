"""The engine is the policy: real engines on two ranks, after every weight sync, tied and untied."""
import json
import re
from pathlib import Path

import pytest
import torch

import families
from ranks import script

ROOT = Path(__file__).parent.parent


def make(folder: Path, tied: bool) -> None:
    """A random Qwen2 with tiny.py's tokenizer. Its logits are spread: a wrong weight shows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples import tiny
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=tied, initializer_range=0.1, bos_token_id=None, eos_token_id=2,
        dtype="float32"))
    lm.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module", params=[
    "tied", pytest.param("untied", marks=pytest.mark.slow)])
def found(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        make(folder / "model", request.param == "tied")
    done = script("tests/engine_worker.py", folder / "model", folder / "out", ranks=2)
    assert done.stdout == done.stderr == "", "it ends with noise"
    return json.loads((folder / "out").read_text()) | {"folder": folder}


def test_logprobs_equal_after_every_sync_at_two_temperatures(found):
    for when, rounds in found["rounding"].items():
        for gap, rounding in zip(found["gap"][when], rounds, strict=True):
            assert gap < families.ROUNDINGS * rounding, (when, gap, rounding)


def test_a_sync_by_copies_brings_the_bits_of_vllms_loader(found):
    assert found["copied"]


def test_without_the_sync_or_the_cache_reset_they_do_not(found):
    assert found["gap"]["no sync"][0] > 1e-2
    assert found["gap"]["no cache reset"][0] > 1e-2     # prompts are longer than a cache block
    assert "prefix cache" in found["refused"]


def test_the_guard_names_a_wrong_engine_and_a_wrong_trainer(found):
    """One rank's wrong tensor is seen on all. Granite divides its logits: nobody noticed."""
    said = found["guard"]
    assert said.pop("well") == "they agree"
    head = said.pop("head x 2")
    assert "trainer and transformers differ" in head and "LogprobModel in model.py" in head
    for fault, sentence in said.items():
        assert re.match(r"engine and trainer differ before an update by [\d.]+ nats a "
                        r"token, more than --max_gap 0.001; .* did not take all", sentence), fault


def test_a_seeded_request_samples_the_same_alone_and_among_others_without_a_compiler(found):
    assert all(found["same"].values()) and not found["compiled"]


def test_more_prompt_tokens_than_the_engine_takes_at_once(found):
    """48 prompts of 200 tokens in one call once ended the run: vLLM computed one in two parts, and
    rewinds its request's generator for that. A CPU generator cannot be rewound."""
    assert found["crowd"]


def test_the_export_gives_the_same_greedy_tokens_in_transformers(found):
    """It loads the folder as a user would. The training engine's tokens are the reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = str(found["folder"] / "out.model")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for prompt, greedy in zip(found["prompts"], found["greedy"], strict=True):
            logits = lm(input_ids=torch.tensor([prompt + greedy])).logits[0]
            assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == greedy


@pytest.mark.slow
def test_a_plain_vllm_serves_the_export(found):
    served = families.plain_vllm(str(found["folder"] / "out.model"), found["prompts"])
    assert [ids for ids, _ in served] == found["greedy"]
