"""The names that config.json files give the sizes of experts, and how the model families differ."""

from __future__ import annotations

from dataclasses import dataclass

from ...artifacts.records import Layout

# Each tuple lists the names of one size in the families' configs; "a.b" is b in the object a.
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
    "moe.num_experts",
)
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "ffn_config.moe_top_k",
    "moe.num_experts_per_tok",
)
HIDDEN = ("hidden_size", "d_model", "embed_dim", "dim")
LATENT = (
    "moe_latent_size",
    "moe_hidden_size",
    "routed_expert_hidden_size",
)  # if set, the routed experts' width in place of the hidden one
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size")
SHARED_COUNTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
    "moe.num_shared_experts",
)
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
)
FFN = "ffn_config"  # dbrx's: fields of the same model, in an object of their own
DENSE_WIDTH = ("intermediate_size",)  # the dense layers' width, or in some families the experts'
DENSE_WIDTH_APART = "dense_intermediate_size"  # a config that has it keeps the experts' width in DENSE_WIDTH

BY_LAYER = "block_configs"  # an object for each layer, in models found by a search for sizes
SWITCH = "enable_moe_block"  # if false, there are no experts, whatever their number


@dataclass(frozen=True, slots=True)
class ConfigFamily:
    """How the model types that begin with ``prefix`` differ from the rest."""

    prefix: str
    widths: tuple[str, ...] = ("moe_intermediate_size",)
    gated: bool = True
    one_shared: bool = False  # one shared expert of width I, which no field names
    layouts: tuple[Layout, ...] = (Layout.NK,)
    kinds: tuple[str, ...] = ("",)  # of experts in one layer: a field that is a list of so many has one value for each
    attention: tuple[str, ...] = ()  # the fields whose product is the width of experts in attention, without a gate
    zero_experts: str = ""  # the field that counts experts without weights
    note: str = ""
    refused: str = ""  # why there is nothing to build


_KN_TOO = (Layout.NK, Layout.KN)  # their checkpoints, and transformers, have w as [E, K, N]

FAMILIES = (
    *(
        ConfigFamily(prefix, DENSE_WIDTH)
        for prefix in ("mixtral", "phimoe", "granitemoe", "minimax", "olmoe", "flex_olmo", "jamba", "cohere2_moe")
    ),
    ConfigFamily("gpt_oss", DENSE_WIDTH, layouts=_KN_TOO, note="bias; gate and up interleaved"),
    ConfigFamily("openai_privacy_filter", DENSE_WIDTH, layouts=_KN_TOO, note="bias"),
    ConfigFamily("aria", DENSE_WIDTH, layouts=_KN_TOO),
    ConfigFamily("llama4", DENSE_WIDTH, one_shared=True, layouts=_KN_TOO),
    ConfigFamily("jetmoe", DENSE_WIDTH, attention=("kv_channels", "num_key_value_heads")),
    ConfigFamily("hunyuan", ("moe_intermediate_size", "intermediate_size")),
    ConfigFamily("dbrx", ("ffn_config.ffn_hidden_size",)),
    ConfigFamily("longcat", ("expert_ffn_hidden_size", "moe_intermediate_size"), zero_experts="zero_expert_num"),
    ConfigFamily("nemotron_h", gated=False),
    ConfigFamily("muse_spark", note="a norm after each expert"),
    *(ConfigFamily(prefix, kinds=("", "vision")) for prefix in ("ernie4_5_vl_moe", "ernie4_5_moe_vl")),
    ConfigFamily("doge", refused="its experts are rows of two embeddings, not matrices: no grouped GEMM computes them"),
    *(ConfigFamily(prefix) for prefix in ("qwen", "deepseek", "glm", "kimi", "dots", "mimo", "ernie4_5", "gemma")),
)


# Mistral's own params.json: no model_type, the sizes of the experts in an object "moe".
PARAMS = ConfigFamily("", ("moe.expert_hidden_dim", "hidden_dim"))


def family_of(model_type: str) -> ConfigFamily | None:
    """The family of a model type, or None; the names of the fields alone are used then."""
    return next((family for family in FAMILIES if model_type.startswith(family.prefix)), None)
