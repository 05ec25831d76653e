"""The model of tiny:experts."""
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM


def make_mixture(tokenizer):
    """A Qwen3-MoE with random weights, two of eight experts for a token."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, norm_topk_prob=True, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None, eos_token_id=end,
        pad_token_id=pad, dtype="float32", architectures=["Qwen3MoeForCausalLM"]))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[end, pad], pad_token_id=pad)
    return model
