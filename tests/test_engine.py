"""The engine is the policy: real engines on two ranks, after every sync of weights."""
import json
import re
import subprocess

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import fakes
import families
import memory
import plan
from family_cases import make
from forked import INTERPRETER
from model_files import shape_from
from ranks import script
from rollout import block_tokens
from tracked import ROOT


@pytest.fixture(scope="module", params=[
    ("1", True), pytest.param(("2", False), marks=pytest.mark.slow)], ids=str)
def found(request, tmp_path_factory) -> dict:
    """What engine_worker.py measures, of ranks for an engine and a head that is tied or not."""
    tp, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    make("Qwen2", str(folder / "model"), dict(tie_word_embeddings=tied))
    done = script("tests/engine_worker.py", folder / "model", folder / "out", tp, ranks=2)
    assert done.stdout == done.stderr == "", "it ends with noise"
    return json.loads((folder / "out").read_text()) | {"folder": folder, "tp": tp}


def test_logprobs_are_equal_after_every_sync_and_only_then(found):
    """At a temperature that is not 1, to the rounding of float32. Without the sync, or without the
    reset of the prefix cache, they are not; and a reset that fails ends the run."""
    gap = found["gap"]
    assert len(found["rounding"]) == 4
    for when, rounding in found["rounding"].items():
        assert gap[when] < families.ROUNDINGS * rounding, when
    assert gap["none"] > 1e-2
    assert gap["no cache reset"] > 1e-2  # prompts are longer than a cache block


def test_a_weight_that_one_rank_did_not_load_is_seen_on_all(found):
    assert re.match(r"engine and trainer differ before an update by [\d.]+ nats a token, more than "
                    r"--max_gap 0.001; .* did not take all", found["said"])


def test_what_a_seed_samples_depends_on_nothing_else(found):
    """Alone and among others, without a compiler; and in a call of 9,600 prompt tokens, which vLLM
    once computed in parts and ended the run: a CPU generator cannot be rewound."""
    assert found["same"] and found["crowd"] and not found["compiled"]


def test_a_sample_holds_every_token_that_was_sampled(found):
    """The last one too, and each counts in the loss."""
    held, sampled = found["held"]
    assert held == sampled


def test_a_group_shares_the_whole_blocks_of_its_prompt_and_completions_stay_the_same(found):
    """By one engine, and by those of two ranks: the tokens of each completion, and its log-probs to
    the rounding of float32, as alone."""
    alone, *together = found["shared"]
    assert sum(cached for *_, cached in alone) == 0
    for engines, some in enumerate(together, 1):
        assert [ids for ids, *_ in some] == [ids for ids, *_ in alone]
        for (_, one, _), (_, other, _) in zip(some, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        computed = engines if found["tp"] == "1" else 1  # of the two prompts of 43 tokens, 8 times
        assert sum(cached for *_, cached in some) == 2 * (8 - computed) * block_tokens(None, 256)


START = """
import sys
from types import SimpleNamespace
import torch
import rollout
try:
    rollout.Engine(SimpleNamespace(tp=1),
                   SimpleNamespace(device=torch.device("cpu")), None, None, [])
except AttributeError as error:  # behind the imports
    assert "'dtype'" in str(error), error
assert "vllm" in sys.modules
print([name for name in ("scipy.signal", "opentelemetry.exporter") if name in sys.modules])
import scipy.signal
"""


def test_a_start_leaves_out_what_no_run_uses():
    """And a user's own file can import it."""
    done = subprocess.run([INTERPRETER, "-c", START], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_plan_counts_the_blocks_that_the_engine_has(found):
    """What both hold of the longest sequences, in the 2**28 bytes of families.run_of."""
    blocks, size = found["cache"]
    args = fakes.args(kv_cache_gb=0.25, max_num_seqs=4096, tp=int(found["tp"]), dtype="float32",
                      max_prompt_tokens=232, max_tokens=24)
    lm = AutoModelForCausalLM.from_pretrained(found["folder"] / "model")
    planned = memory.Memory(plan.Plan(args, 2, 8, 0), shape_from(lm), None, 2**34)
    assert planned.holds == (blocks - 1) * size // 256 < 4096  # vLLM keeps one block for itself


PLAIN = """
import json, os, sys
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
               "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
from vllm import LLM, SamplingParams, TokensPrompt
llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, kv_cache_memory_bytes=2**27,
          max_model_len=256)
params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[2])
prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(sys.argv[2])]
done = llm.generate(prompts, params, use_tqdm=False)
print('FOUND', json.dumps([list(one.outputs[0].token_ids) for one in done]))
"""


@pytest.mark.slow
def test_a_plain_vllm_serves_the_export(found):
    """As a user starts it, it generates the greedy tokens of the training engine."""
    done = script("-c", PLAIN, found["folder"] / "out.sync again", json.dumps(found["prompts"]))
    assert json.loads(done.stdout.partition("FOUND")[2]) == found["greedy"]
