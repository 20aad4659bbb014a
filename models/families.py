"""How each model family differs from Llama: one record per family in `FAMILIES`, at the end.

A record yields plain data, the fields of a `Config`. The only other files that know families by name are
`gguf_config.py` and, for multimodal models, `config.py`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernels.delta_net import TAPS, Heads
from kernels.library import ORDER
from models.fields import Fields
from models.rope import Rope

# The norms before or after a layer's two branches: field of `Layer` -> name in the checkpoint
NORMS = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attn_after": "post_attention_layernorm", "mlp_after": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True)
class Family:
    """A family's differences from Llama. `Family()` is Llama itself (docs/models.md)."""

    # Defaults of config fields, where they differ from Llama's.
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    # (fields, D, Dh, tied) -> fields of `Config` that this family sets.
    own: Callable[[Fields, int, int, bool], dict[str, Any]] = lambda *_: {}
    # If some layers have a sliding window: (fields, layers) -> the layers with full attention.
    whole: Callable[[Fields, int], Collection[int]] | None = None
    # The field that names the activation, and its supported values.
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    # The field that holds the hidden width of the MLP.
    width: str = "intermediate_size"
    # Fields that must be false, because the feature they enable is not implemented.
    refused: tuple[str, ...] = ()
    # The family's names of rope types -> the usual names.
    rope_types: Mapping[str, str] = field(default_factory=dict)
    # True if RoPE may rotate only a part of each head (partial_rotary_factor).
    turns_a_part: bool = False
    # True if layers with a sliding window have a different rope.
    two_ropes: bool = False
    # The family's names of layer types, in `layer_types` -> the usual names.
    layer_types: Mapping[str, str] = field(default_factory=dict)


# --- layers with full attention ------------------------------------------------------------------


def _none(fields: Fields, layers: int) -> Collection[int]:
    return ()


def _all(fields: Fields, layers: int) -> Collection[int]:
    return range(layers)


def _first(fields: Fields, layers: int) -> Collection[int]:
    """Qwen's layers all have full attention; with use_sliding_window, only the first ones do."""
    if not fields.get("use_sliding_window"):
        return range(layers)
    return range(min(layers, fields.number("max_window_layers", 28, least=0)))


def _every_second(fields: Fields, layers: int) -> Collection[int]:
    return range(1, layers, 2)


def _every_fourth(fields: Fields, layers: int) -> Collection[int]:
    return range(3, layers, 4)


def _every_sixth(fields: Fields, layers: int) -> Collection[int]:
    every = fields.number("sliding_window_pattern", 6)
    return range(every - 1, layers, every)


# --- config fields of single families ------------------------------------------------------------


def _cap(fields: Fields, name: str, usual: float | None) -> float | None:
    """Return a soft cap; None if the config says null."""
    if fields.get(name, usual) is None:
        return None
    return fields.real(name, usual)


def _gemma2(
    fields: Fields,
    D: int,
    Dh: int,
    tied: bool,
    scaled: str = "q_proj",
    caps: tuple[float | None, float | None] = (50.0, 30.0),
) -> dict[str, Any]:
    """Gemma 2 multiplies the embedding by sqrt(D), and divides q k^T by sqrt(query_pre_attn_scalar).

    A tied head shares the embedding's matrix and therefore its factor. To undo it, the inverse is
    folded into the last norm, whose output goes only to the head.

    `scaled`: the module into whose weights the factor of q k^T is folded.
    `caps`: default soft caps of scores and logits.
    """
    attn, final = caps
    return {
        "multipliers": {
            "embed_tokens": D**0.5,
            "norm": D**-0.5 if tied else 1,
            scaled: fields.real("query_pre_attn_scalar", 256) ** -0.5 * Dh**0.5,
        },
        "norms_at": "around",
        "norms_add": True,
        "gelu": True,
        "cap": _cap(fields, "attn_logit_softcapping", attn),
        "head_cap": _cap(fields, "final_logit_softcapping", final),
    }


def _gemma3(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """As Gemma 2, but a norm after q_proj would cancel a factor in its weights, so the factor of q k^T is
    folded into that norm. Layers with a window have their own theta."""
    own = _gemma2(fields, D, Dh, tied, scaled="q_norm", caps=(None, None))
    near = _near_rope(fields, fields.real("rope_local_base_freq", 1e4, 1))
    return own | {"near": near, "qk_norm": "head"}


def _near_rope(fields: Fields, theta: float) -> Rope:
    """Return the rope of layers with a window. Since transformers 5 its theta is in `rope_parameters`."""
    near = _rope_parameters(fields).get("sliding_attention")
    if isinstance(near, dict):
        theta = Fields(fields.path, near).real("rope_theta", theta, 1)
    return Rope("default", theta)


def _rope_parameters(fields: Fields) -> Fields:
    given = fields.get("rope_parameters")
    return Fields(fields.path, given if isinstance(given, dict) else {})


def _far(fields: Fields, v_is_k: bool) -> tuple[int, int]:
    """Return (Hkv, Dh) of the layers with full attention.

    Since transformers 5 they are in `per_layer_config`, whose entries must all be the same.
    """
    H = fields.number("num_attention_heads")
    Hkv = fields.number("num_key_value_heads")
    own = {"head_dim": fields.number("global_head_dim", 512)}
    if v_is_k:
        own["num_key_value_heads"] = fields.number("num_global_key_value_heads", Hkv)
    listed = fields.get("per_layer_config")
    if isinstance(listed, dict) and listed:
        own, *others = listed.values()
        if not isinstance(own, dict) or any(other != own for other in others):
            raise fields.refuse("per_layer_config", listed, ("the same for all listed layers",))
    far = Fields(fields.path, own)
    Hkv, Dh = far.number("num_key_value_heads", Hkv), far.number("head_dim")
    if H % Hkv or Dh % 2:
        raise fields.refuse("heads of full attention", (Hkv, Dh), (f"a divisor of {H}, even",))
    return Hkv, Dh


def _gemma4(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Gemma 4. q k^T is not scaled, because q and k are normalized. Heads are larger in layers with
    full attention. The last layers reuse the keys and values of earlier layers. Each layer has its own
    embedding of each token."""
    layers = fields.number("num_hidden_layers")
    reusing = fields.number("num_kv_shared_layers", 0, least=0)
    if reusing >= layers:
        raise fields.refuse("num_kv_shared_layers", reusing, (f"0 to {layers - 1}",))
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds[layers - 1 : layers] == ["sliding_attention"]:
        raise fields.refuse("layer_types", kinds, ("full_attention in the last layer",))
    v_is_k = bool(fields.get("attention_k_eq_v"))
    embeddings = fields.number("hidden_size_per_layer_input", 256, least=0)
    hidden = fields.number("intermediate_size")
    theta = 1e4
    return {
        "multipliers": {
            "embed_tokens": D**0.5,
            "norm": D**-0.5 if tied else 1,
            "per_layer_model_projection": D**-0.5,
            "per_layer_projection_norm": 2**-0.5,
        },
        "norms_at": "around",
        "gelu": True,
        "head_cap": _cap(fields, "final_logit_softcapping", None),
        "near": _near_rope(fields, theta),
        "qk_norm": "head",
        "v_norm": True,
        "scale": 1.0,
        "far": _far(fields, v_is_k),
        "v_is_k": v_is_k,
        "reusing": reusing,
        "reusing_hidden": hidden * (2 if fields.get("use_double_wide_mlp") else 1),
        "embeddings": embeddings,
        "embeddings_V": fields.number("vocab_size_per_layer_input", 262_144),
        "scalars": True,
    }


def _granite(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Granite's four multipliers, folded into weights.

    Attention multiplies q k^T by `attention_multiplier` instead of 1 / sqrt(Dh), so q_proj gets the
    ratio of the two. A tied head shares the embedding's matrix and therefore its factor. To undo it,
    the inverse is folded into the last norm, whose output goes only to the head.
    """
    embedding = fields.real("embedding_multiplier", 1.0)
    attention = fields.real("attention_multiplier", 1.0)
    residual = fields.real("residual_multiplier", 1.0)
    logits = fields.real("logits_scaling", 1.0)
    return {
        "multipliers": {
            "embed_tokens": embedding,
            "q_proj": attention * Dh**0.5,
            "o_proj": residual,
            "down_proj": residual,
            "norm": 1 / (logits * embedding) if tied else 1 / logits,
        }
    }


def _granite4(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Granite 4 without Mamba layers and experts. Its MLP has its own names and width, and gate and up
    are one matrix. mlx-lm's conversions use Llama's names."""
    layers = fields.number("num_hidden_layers")
    kind = fields.get("position_embedding_type", "rope")
    if kind not in ("rope", "nope", None):
        raise fields.refuse("position_embedding_type", kind, ("rope", "nope"))
    own = _granite(fields, D, Dh, tied)
    hidden = fields.number("shared_intermediate_size", fields.get("intermediate_size"))
    unturned = range(layers) if kind == "nope" else ()
    return own | {"fused": True, "hidden": hidden, "unturned": unturned}


def _ministral3(fields: Fields, *_) -> dict[str, Any]:
    """Ministral 3 scales up queries at far positions, so that attention over more rows stays sharp."""
    inner = _rope_parameters(fields)
    beta = inner.real("llama_4_scaling_beta", 0.0, 0)
    if not beta:
        return {}
    return {"growth": (beta, inner.number("original_max_position_embeddings"))}


def _olmo3(fields: Fields, *_) -> dict[str, Any]:
    """OLMo 3: layers with a window have the default rope, and the others have the scaled rope."""
    inner = _rope_parameters(fields)
    near = _near_rope(fields, inner.real("rope_theta", fields.real("rope_theta", 10000.0, 1), 1))
    return {"qk_norm": "width", "norms_at": "after", "near": near}


def _lfm2(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """LFM2 has short convolutions in most layers. Its config holds the width of the MLP before the
    adjustment below."""
    layers = fields.number("num_hidden_layers")
    kinds = fields.get("layer_types")
    attending = fields.get("full_attn_idxs", [*range(layers)])
    if isinstance(kinds, list):
        attending = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if not isinstance(attending, list) or not all(i in range(layers) for i in attending):
        raise fields.refuse("full_attn_idxs", attending, (f"numbers of {layers} layers",))
    if D % Dh:
        raise fields.refuse("head_dim", Dh, (f"a divisor of {D}",))
    hidden = fields.number("block_ff_dim", fields.number("intermediate_size"))
    if fields.get("block_auto_adjust_ff_dim", True):
        hidden = int(2 * hidden / 3)
        hidden = int(fields.real("block_ffn_dim_multiplier", 1.0) * hidden)
        step = fields.number("block_multiple_of", 256)
        hidden = step * -(-hidden // step)
    return {
        "hidden": hidden,
        "norm_eps": fields.real("norm_eps", 1e-5, 0),
        "qk_norm": "head",
        "convolved": frozenset(range(layers)) - {*attending},
        "taps": fields.number("conv_L_cache", 3),
    }


def _experts(fields: Fields, *_) -> dict[str, Any]:
    """Qwen 3's mixture of experts. Since transformers 5 their number is called num_local_experts."""
    step = fields.number("decoder_sparse_step", 1)
    if step != 1:
        raise fields.refuse("decoder_sparse_step", step, ("1, experts in all layers",))
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    experts = fields.number(name, 128)
    taken = fields.number("num_experts_per_tok", 8)
    if taken > experts:
        choice = f"1 to {experts}, the number of experts"
        raise fields.refuse("num_experts_per_tok", taken, (choice,))
    whole = bool(fields.get("norm_topk_prob"))
    return {"qk_norm": "head", "experts": experts, "taken": taken, "whole_shares": whole}


def _qwen3_5(fields: Fields, *_) -> dict[str, Any]:
    """Qwen 3.5 has a gated delta net in three out of four layers, and attention with an output gate in the
    others."""
    layers = fields.number("num_hidden_layers")
    every = fields.number("full_attention_interval", 4)
    kinds = fields.get("layer_types")
    deltas = [i for i in range(layers) if (i + 1) % every]
    if isinstance(kinds, list):
        deltas = [i for i, kind in enumerate(kinds[:layers]) if kind == "linear_attention"]
    if layers - 1 in deltas:  # the check for finite rows reads the rows of the last layer
        raise fields.refuse(
            "layer_types", "linear_attention", ("full_attention in the last layer",)
        )
    taps = fields.number("linear_conv_kernel_dim", TAPS)
    if taps != TAPS:
        raise fields.refuse("linear_conv_kernel_dim", taps, (f"{TAPS}",))
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads = Heads(*(fields.number(f"linear_{name}") for name in names))
    if heads.Hv % heads.Hk:
        choice = f"a multiple of {heads.Hk} key heads"
        raise fields.refuse("linear_num_value_heads", heads.Hv, (choice,))
    if heads.Dv % ORDER:
        raise fields.refuse("linear_value_head_dim", heads.Dv, (f"a multiple of {ORDER}",))
    tiled = bool(fields.get("value_heads_tiled"))
    own = {"delta": heads, "deltas": frozenset(deltas), "values_tiled": tiled}
    return own | {"qk_norm": "head", "norms_add": True, "gated": True}


def _gpt_oss(fields: Fields, *_) -> dict[str, Any]:
    """gpt-oss has an attention sink per query head, biases everywhere, and a clamped SwiGLU in experts."""
    bias = bool(fields.get("attention_bias", True))
    own = _experts(fields) | {"qk_norm": "", "whole_shares": True, "mlp_bias": True}
    limit = fields.real("swiglu_limit", 7.0)
    alpha = fields.real("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise fields.refuse("swiglu_alpha", alpha, (f"{SWIGLU_ALPHA}",))
    return own | {"qkv_bias": bias, "o_bias": bias, "limit": limit, "sinks": True}


def _qwen3_5_moe(fields: Fields, *sizes) -> dict[str, Any]:
    """Qwen 3.5 with experts, one of which is shared by all tokens."""
    own = _experts(fields) | _qwen3_5(fields, *sizes)
    return own | {"shared_expert": fields.number("shared_expert_intermediate_size")}


def _smollm3(fields: Fields, *_) -> dict[str, Any]:
    """SmolLM3 has layers without RoPE: those with a 0 in no_rope_layers, or every nth layer."""
    layers = fields.number("num_hidden_layers")
    interval = fields.number("no_rope_layer_interval", 4)
    has = fields.get("no_rope_layers")
    if has is None:
        return {"unturned": range(interval - 1, layers, interval)}
    if not isinstance(has, list) or len(has) < layers or not all(value in (0, 1) for value in has):
        raise fields.refuse("no_rope_layers", has, (f"a 1 or a 0 for each of {layers} layers",))
    return {"unturned": frozenset(i for i in range(layers) if not has[i])}


def _seed_oss(fields: Fields, *_) -> dict[str, Any]:
    return {"o_bias": bool(fields.get("attention_out_bias"))}


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA4_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
SWIGLU_ALPHA = 1.702  # gpt-oss's value, built into `clamped_swiglu`
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
QWEN3_5 = Family(
    unsaid={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    refused=("num_experts",),
    layer_types={"full_attention": "full_attention", "linear_attention": "full_attention"},
    whole=_all,
    turns_a_part=True,
    own=_qwen3_5,
)
GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
GEMMA4 = Family(
    unsaid={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "rope_parameters": GEMMA4_ROPE,
    },
    activation=GEMMA_ACTIVATION,
    whole=lambda fields, layers: {*_every_sixth(fields, layers), layers - 1},
    two_ropes=True,
    refused=("enable_moe_block", "rope_traditional", "attention_bias"),
    own=_gemma4,
)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(whole=_none),
    "qwen2": Family(whole=_first, own=lambda *_: {"qkv_bias": True, "o_bias": False}),
    "qwen3": Family(
        unsaid={"head_dim": 128},
        whole=_first,
        own=lambda *_: {"qk_norm": "head"},
    ),
    "granite": Family(own=_granite),
    "granitemoehybrid": Family(
        unsaid={"tie_word_embeddings": True},
        refused=("num_local_experts",),
        layer_types={"attention": "full_attention"},
        whole=_all,
        own=_granite4,
    ),
    "ministral3": Family(
        unsaid={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": MINISTRAL_ROPE,
        },
        whole=_none,
        own=_ministral3,
    ),
    "phi3": Family(
        unsaid={
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        whole=_none,
        rope_types={"su": "longrope", "yarn": "longrope"},  # names in the first Phi-3 configs
        turns_a_part=True,
        own=lambda *_: {"fused": True},
    ),
    "olmo2": Family(
        unsaid={"rms_norm_eps": 1e-5},
        own=lambda *_: {"qk_norm": "width", "norms_at": "after"},
    ),
    "olmo3": Family(
        unsaid={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        whole=_every_fourth,
        two_ropes=True,
        own=_olmo3,
    ),
    "lfm2": Family(
        unsaid={
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "intermediate_size": 12288,
            "max_position_embeddings": 128_000,
        },
        refused=("conv_bias",),
        layer_types={"full_attention": "full_attention", "conv": "full_attention"},
        whole=_all,
        own=_lfm2,
    ),
    "smollm3": Family(
        unsaid={"rope_theta": 2_000_000.0},
        refused=("use_sliding_window",),
        own=_smollm3,
    ),
    "seed_oss": Family(unsaid={"attention_bias": True, "head_dim": 128}, own=_seed_oss),
    "gemma2": Family(
        unsaid={"head_dim": 256, "tie_word_embeddings": True},
        activation=GEMMA_ACTIVATION,
        whole=_every_second,
        own=_gemma2,
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": replace(  # Gemma 4 12B
        GEMMA4,
        unsaid={**GEMMA4.unsaid, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
    ),
    "gpt_oss": Family(
        unsaid={
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": GPT_OSS_ROPE,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        whole=_every_second,
        own=_gpt_oss,
    ),
    "qwen3_moe": Family(
        unsaid={"moe_intermediate_size": 768},
        width="moe_intermediate_size",
        refused=("use_sliding_window", "mlp_only_layers"),
        own=_experts,
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
        unsaid={
            **QWEN3_5.unsaid,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        width="moe_intermediate_size",
        refused=("mlp_only_layers",),
        own=_qwen3_5_moe,
    ),
    "gemma3_text": Family(
        unsaid={
            "head_dim": 256,
            "rope_theta": 1_000_000.0,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
        activation=GEMMA_ACTIVATION,
        whole=_every_sixth,
        two_ropes=True,
        own=_gemma3,
    ),
}
