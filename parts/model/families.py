"""What one family of models has and another has not: the fields that it leaves unsaid, and those
that it alone has.

The problem. Each family writes its config in its own way, and means something else by what is not
there.

What this file keeps. A family is a line in `FAMILIES` and at most one function in `OWN`. What they
yield is plain data, fields of a `Config`: neither the forward pass nor loading knows a family's
name.

Where next: `config.py`, which reads what all families share.
"""

from collections.abc import Callable, Collection
from typing import Any

from parts.checks import real
from parts.model.fields import Fields
from parts.model.rope import Rope

# The families, and what a config.json may leave unsaid where Llama's means something else
# (docs/models.md).
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "granite": {},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "olmo2": {"rms_norm_eps": 1e-5},
    "smollm3": {"rope_theta": 2_000_000.0},
    "seed_oss": {"attention_bias": True, "head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gemma3_text": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
    },
}
GEMMAS = ("gemma2", "gemma3_text")
# By where they stand around a branch: what a layer's norms are to `forward`, and what the files
# call them
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


def _gemma(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Gemma multiplies the embedding by sqrt(D), and divides q k^T by the root of a number that it
    names.

    Its third release has a norm between q_proj and q k^T, so there the norm takes the factor. The
    second has caps if its config does not say, and none where it says null.
    """
    is_third, caps = fields.values["model_type"] == "gemma3_text", {}
    for name, part, usual in (("cap", "attn", 50.0), ("head_cap", "final", 30.0)):
        field, usual = f"{part}_logit_softcapping", None if is_third else usual
        has_cap = fields.values.get(field, usual) is not None
        caps[name] = fields.number(field, usual, real, 1e-6) if has_cap else None
    attention = fields.number("query_pre_attn_scalar", 256, real, 1e-6) ** -0.5 * Dh**0.5
    scaled = {"embed_tokens": D**0.5, "norm": D**-0.5 if tied else 1}
    third = {"near": Rope("default", _near(fields)), "qk_norm": "head"} if is_third else {}
    scaled["q_norm" if is_third else "q_proj"] = attention
    return {
        "multipliers": scaled,
        "norms_at": "around",
        "norms_add": True,
        "gelu": True,
        **caps,
        **third,
    }


def _granite(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Granite's four multipliers, each as a factor of the weights that it can be folded into.

    Attention multiplies q k^T by `attention_multiplier` instead of 1 / sqrt(Dh), so q takes the
    quotient of the two. A tied head is the embedding, multiplied with it: so the last norm, which
    nothing but the head reads, divides.
    """
    names = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    embedding, attention, residual, logits = (
        fields.number(name, 1.0, real, 1e-6) for name in names
    )
    branches = dict.fromkeys(("o_proj", "down_proj"), residual)
    last = 1 / (logits * embedding) if tied else 1 / logits
    return {
        "multipliers": {
            "embed_tokens": embedding,
            "q_proj": attention * Dh**0.5,
            **branches,
            "norm": last,
        }
    }


def _experts(fields: Fields, *_) -> dict[str, Any]:
    """Qwen3's mixture of experts; transformers' fifth release writes their number under another
    name."""
    if fields.number("decoder_sparse_step", 1) != 1:
        raise fields.refuse(
            "decoder_sparse_step",
            fields.values["decoder_sparse_step"],
            ("1, experts in all layers",),
        )
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    experts, taken = fields.number(name, 128), fields.number("num_experts_per_tok", 8)
    if taken > experts:
        raise fields.refuse(
            "num_experts_per_tok", taken, (f"1 to {experts}, as many as there are",)
        )
    whole = bool(fields.values.get("norm_topk_prob"))
    return {"qk_norm": "head", "experts": experts, "taken": taken, "whole_shares": whole}


def _unturned(fields: Fields) -> Collection[int]:
    """SmolLM3 names the layers that have positions, by a 1 or a 0 for each, or says that every nth
    has none."""
    layers, has = fields.number("num_hidden_layers"), fields.values.get("no_rope_layers")
    interval = fields.number("no_rope_layer_interval", 4)
    if has is None:
        return range(interval - 1, layers, interval)
    if not isinstance(has, list) or len(has) < layers or not all(value in (0, 1) for value in has):
        raise fields.refuse("no_rope_layers", has, (f"a 1 or a 0 for each of {layers} layers",))
    return frozenset(i for i in range(layers) if not has[i])


# What a family's `Config` has beside what all have.
OWN: dict[str, Callable[..., dict[str, Any]]] = {
    "qwen3": lambda *_: {"qk_norm": "head"},
    "granite": _granite,
    "phi3": lambda *_: {"fused": True},
    "olmo2": lambda *_: {"qk_norm": "width", "norms_at": "after"},
    "smollm3": lambda fields, *_: {"unturned": _unturned(fields)},
    "gemma2": _gemma,
    "qwen3_moe": _experts,
    "gemma3_text": _gemma,
}


def sliding_window(fields: Fields, family: str) -> tuple[int | None, Collection[int]]:
    """The length of the sliding window, if any layer has one, and the layers that have none."""
    raw, layers = fields.values, fields.number("num_hidden_layers")
    kinds, whole = raw.get("layer_types"), ()
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or len(kinds) < layers or not set(map(str, kinds)) <= known:
            raise fields.refuse(
                "layer_types", kinds, (f"for each of {layers} layers {' or '.join(sorted(known))}",)
            )
        whole = frozenset(i for i in range(layers) if kinds[i] == "full_attention")
    elif family in GEMMAS:  # every second layer, or every sixth, has none
        every = 2 if family == "gemma2" else fields.number("sliding_window_pattern", 6)
        whole = range(every - 1, layers, every)
    elif family in ("qwen2", "qwen3"):  # the first have none
        whole = range(
            min(
                layers,
                fields.number("max_window_layers", 28, least=0)
                if raw.get("use_sliding_window")
                else layers,
            )
        )
    elif family != "mistral" and not (family == "phi3" and raw.get("sliding_window") is not None):
        return None, ()
    if len(whole) == layers or raw.get("sliding_window", 4096) is None:
        return None, ()
    return fields.number("sliding_window", 4096), whole


def _near(fields: Fields) -> float:
    """The theta of Gemma 3's layers that have a window. Since transformers' fifth release it stands
    with the rope's."""
    nested = fields.values.get("rope_parameters")
    nested = nested.get("sliding_attention") if isinstance(nested, dict) else None
    usual = fields.number("rope_local_base_freq", 1e4, real, 1)
    return Fields(fields.path, nested if isinstance(nested, dict) else {}).number(
        "rope_theta", usual, real, 1
    )
