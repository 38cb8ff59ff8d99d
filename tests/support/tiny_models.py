"""Models of a few thousand weights, drawn at random and saved by transformers as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    "Mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_key_value_heads": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "GLM-4-MoE": (
        "glm4_moe",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "Llama-4": (
        "llama4_text",
        {
            "intermediate_size_mlp": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
}

LIMITED: dict[str, tuple[str, dict[str, Any]]] = {  # models with limits that transformers' classes do not have
    "EXAONE-MoE": (
        "exaone_moe",
        {
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "mlp_layer_types": ["sparse", "sparse"],
            "layer_types": ["full_attention", "full_attention"],
            "sliding_window": 512,
            "sliding_window_pattern": None,
        },
    ),
}


# Of vLLM: where the class of a model stands, by its name in config.json.
VLLM_CLASSES = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Llama4ForCausalLM": "llama4",
    "ExaoneMoeForCausalLM": "exaone_moe",
}


def save(name: str, folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A model of ``MODELS`` or ``LIMITED`` in bfloat16, saved in ``folder``, with a tokenizer whose tokens are bytes.

    ``sizes`` are others than its own.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, own = (MODELS | LIMITED)[name]
    config = AutoConfig.for_model(kind, **(_COMMON | own | sizes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    for parameter in model.parameters():  # biases too, which begin at zero
        torch.nn.init.normal_(parameter.data, std=0.2)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
