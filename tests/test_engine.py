"""The engine is the policy: real engines on two ranks, after every weight sync, tied and untied."""
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from forked import PYTHON

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


@pytest.fixture(scope="module", params=["tied", "untied"])
def found(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        make(folder / "model", request.param == "tied")
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2",
               "--standalone", "tests/engine_worker.py", folder / "model", folder / "out"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out").read_text()) | {
        "folder": folder, "stderr": done.stderr, "stdout": done.stdout}


def test_logprobs_equal_after_every_sync_at_two_temperatures(found):
    for when in ("sync 0", "sync 1", "sync 2", "sync again"):
        assert max(found["gap"][when]) < 1e-4, (when, found["gap"])


def test_without_the_sync_or_the_cache_reset_they_do_not(found):
    assert found["gap"]["no sync"][0] > 1e-2
    assert found["gap"]["no cache reset"][0] > 1e-2     # prompts are longer than a cache block


def test_the_guard_names_a_wrong_engine_and_a_wrong_trainer(found):
    """One rank's wrong tensor is seen on all. Granite divides its logits: nobody noticed."""
    said = found["guard"]
    assert said.pop("well") == "they agree"
    head = said.pop("head x 2")
    assert "trainer and transformers differ" in head and "LogprobModel in model.py" in head
    for fault, sentence in said.items():
        assert re.match(r"engine and trainer differ before the first update by [\d.]+ nats a "
                        r"token, more than --max_gap 0.001; .* did not take all", sentence), fault


def test_a_refused_cache_reset_is_an_error(found):
    assert "prefix cache" in found["refused"]


def test_a_seeded_request_samples_the_same_alone_and_among_others(found):
    assert all(found["same"].values())


def test_more_prompt_tokens_than_the_engine_takes_at_once(found):
    """48 prompts of 200 tokens in one call once ended the run: vLLM computed one in two parts, and
    rewinds its request's generator for that. A CPU generator cannot be rewound."""
    assert found["crowd"]


def test_nobody_waits_for_a_compiler(found):
    """torch.compile of the sampler's small functions once took 10 s of the first step."""
    assert not found["compiled"]


def test_it_ends_without_noise(found):
    assert found["stdout"] == "" and found["stderr"] == ""


PLAIN = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, dtype='float32', enforce_eager=True, kv_cache_memory_bytes=2**27,
          max_model_len=256)
params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[2])
prompts = [TokensPrompt(prompt_token_ids=p) for p in prompts]
out = llm.generate(prompts, params, use_tqdm=False)
print('IDS', json.dumps([list(o.outputs[0].token_ids) for o in out]))
"""


def test_the_export_gives_the_same_greedy_tokens_in_transformers_and_in_a_plain_vllm(found):
    """Both load the folder as a user would. The training engine's tokens are the reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = str(found["folder"] / "out.model")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for prompt, greedy in zip(found["prompts"], found["greedy"], strict=True):
            ids = list(prompt)
            for token in greedy:
                assert int(lm(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)
    if not lm.config.tie_word_embeddings:
        return              # one plain engine is enough: the tied export could miss a weight
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([PYTHON, "-c", PLAIN, folder, json.dumps(found["prompts"])],
                          env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("IDS")]
    assert lines, done.stderr[-2000:]
    assert json.loads(lines[0].removeprefix("IDS")) == found["greedy"]
