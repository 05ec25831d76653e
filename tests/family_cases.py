"""The families of models that all three programs compute alike, each with a tiny random model."""
import torch

ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
WINDOWS = ["sliding_attention", "full_attention"]
GRANITE = dict(logits_scaling=3.0, embedding_multiplier=5.0, residual_multiplier=0.3,
               attention_multiplier=0.1)
CASES = {  # name: (model_type, what differs from SIZES)
    "Llama": ("llama", dict(tie_word_embeddings=False)),
    "Llama, tied": ("llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "Llama, yarn": ("llama", dict(rope_parameters=ROPE)),
    "Mistral": ("mistral", dict(sliding_window=64, head_dim=32)),
    "Qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("qwen3", dict(head_dim=64)),
    "Phi": ("phi", dict(num_key_value_heads=2)),
    "Phi3": ("phi3", {}),
    "SmolLM3": ("smollm3", dict(no_rope_layers=[1, 0])),
    "Gemma": ("gemma", dict(head_dim=64)),
    "Gemma 2": ("gemma2", dict(head_dim=64, sliding_window=64, query_pre_attn_scalar=40,
                               attn_logit_softcapping=3.0, final_logit_softcapping=3.0)),
    "Gemma 3": ("gemma3_text", dict(head_dim=64, sliding_window=64, layer_types=WINDOWS)),
    "Gemma 4": ("gemma4_text", dict(
        head_dim=32, global_head_dim=64, sliding_window=32, layer_types=WINDOWS,
        vocab_size_per_layer_input=320, hidden_size_per_layer_input=16,
        final_logit_softcapping=1.0)),
    "VaultGemma": ("vaultgemma", dict(
        head_dim=32, sliding_window=64, query_pre_attn_scalar=40, attn_logit_softcapping=3.0,
        final_logit_softcapping=3.0)),
    "GLM": ("glm", dict(head_dim=32)),
    "GLM 4": ("glm4", dict(head_dim=32)),
    "Granite": ("granite", GRANITE),
    "Granite 4": ("granitemoehybrid", GRANITE | dict(  # dense, without Mamba
        num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=2, shared_intermediate_size=96,
        layer_types=["full_attention"] * 2, position_embedding_type="rope")),
    "Cohere": ("cohere", dict(logit_scale=0.3)),
    "OLMo2": ("olmo2", {}),
    "OLMo 3": ("olmo3", dict(sliding_window=64, layer_types=WINDOWS, rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0), full_attention=ROPE))),
    "Ministral 3": ("ministral3", dict(head_dim=32, rope_parameters=ROPE | dict(
        original_max_position_embeddings=256, llama_4_scaling_beta=0.1))),
    "Seed-OSS": ("seed_oss", dict(head_dim=64, attention_out_bias=True, mlp_bias=True)),
    "EXAONE 4": ("exaone4", dict(sliding_window=64, layer_types=WINDOWS)),
    "EXAONE 4, one kind": ("exaone4", dict(sliding_window=None, layer_types=WINDOWS[1:] * 2)),
    "Hunyuan": ("hunyuan_v1_dense", dict(head_dim=64)),
    "ERNIE 4.5": ("ernie4_5", dict(head_dim=64)),
    "Arcee": ("arcee", dict(mlp_bias=True, attention_bias=True)),
    "CWM": ("cwm", dict(head_dim=64, sliding_window=64, layer_types=WINDOWS, bos_token_id=1)),
    "Jais 2": ("jais2", {}),
    "GPT-2": ("gpt2", {}),
    "GPT-NeoX": ("gpt_neox", dict(num_key_value_heads=2)),
}
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1,
             bos_token_id=None, eos_token_id=2, pad_token_id=0)


def make(name: str, folder: str, options: dict | None = None) -> None:
    """Writes a random model of a case, or of a model_type with options beside those of its first
    case, with tiny.py's tokenizer. No weight is at its usual start."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples import tiny
    kind, usual = CASES.get(name) or next(
        (case for case in CASES.values() if case[0] == name), (name, {}))
    config = AutoConfig.for_model(
        kind, **SIZES | {"vocab_size": tiny.VOCAB} | usual | (options or {}))
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in (*lm.parameters(), *lm.buffers()):  # norms, biases, what files have
            p += 0.1 * torch.randn_like(p)
    lm.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
