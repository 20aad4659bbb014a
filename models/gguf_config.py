"""Translate a GGUF file's metadata into the fields of a config.json, and its tensor names into Hugging Face's.

`config.py` then reads these fields like those of any other config. Settings that llama.cpp derives from
the architecture's name are derived here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from base.untrusted_files import ModelError
from base.validation import shown
from models.fields import Fields, nearest
from models.gguf_file import Gguf

# GGUF's architecture -> model_type in config.json
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "mistral3": "ministral3",
    "olmo2": "olmo2",  # also for OLMo 3
    "lfm2": "lfm2",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
}
QWEN35 = ("qwen35", "qwen35moe")
OF_EXPERTS = ("qwen3moe", "qwen35moe", "gpt-oss")
INTERLEAVED = ("llama", "granite", "mistral3")  # RoPE rotates adjacent dimensions of q and k
FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
MOST_LAYERS = 10_000
TABLE = "token_embd.weight"
FREQUENCIES = "rope_freqs.weight"  # the factors by which Llama 3.1 divides its RoPE frequencies
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
OLMO_LAYER = OF_A_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LFM2_LAYER = OF_A_LAYER | {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
QWEN35_LAYER = OF_A_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",  # this name and the next do not end in .weight
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GEMMA_LAYER = OF_A_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA4_LAYER = GEMMA_LAYER | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
}
GEMMA4_MODULES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GPT_OSS_LAYER = OF_A_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}
LAYERS = {
    "gemma3": GEMMA_LAYER,
    "olmo2": OLMO_LAYER,
    "lfm2": LFM2_LAYER,
    "gemma4": GEMMA4_LAYER,
    "gpt-oss": GPT_OSS_LAYER,
} | dict.fromkeys(QWEN35, QWEN35_LAYER)
MORE_MODULES = {"lfm2": {"token_embd_norm": "model.norm"}, "gemma4": GEMMA4_MODULES}


def architecture(file: Gguf) -> str:
    name = file.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        near = nearest(name, ARCHITECTURES)
        said = f"not served as GGUF{near and f'; {near}'}"
        raise ModelError(
            f"{file.path}: the architecture {shown(name)} is {said}. "
            f"Supported: {', '.join(ARCHITECTURES)}.",
            said,
        )
    return name


def names(file: Gguf) -> dict[str, str]:
    """Return a map from GGUF's module names to ours. {} stands for the number of the layer."""
    arch = architecture(file)
    layer = LAYERS.get(arch, OF_A_LAYER)
    modules = MODULES | MORE_MODULES.get(arch, {})
    return modules | {
        f"blk.{{}}.{theirs}": f"model.layers.{{}}.{ours}" for theirs, ours in layer.items()
    }


def is_drafting(name: str, file: Gguf) -> bool:
    """True for the tensors of Qwen 3.5's multi-token prediction: its last layers, which are not used."""
    arch = architecture(file)
    count, drafting = (
        file.fields.get(f"{arch}.{name}") for name in ("block_count", "nextn_predict_layers")
    )
    number = re.match(r"blk\.(\d{1,9})\.", name)
    if arch not in QWEN35 or not number or not isinstance(drafting, int):
        return False
    return isinstance(count, int) and int(number[1]) >= count - drafting


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Rename a tensor with the map that `names` returns, of modules and some full tensor names."""
    number = re.search(r"\.(\d{1,9})\.", name)
    layer = number[1] if number else ""
    form = name.replace(f".{layer}.", ".{}.", 1) if layer else name
    module, _, kind = form.rpartition(".")
    ours = names.get(form) or f"{names.get(module, module)}.{kind}"
    return ours.replace("{}", layer, 1)


def described(file: Gguf) -> dict[str, Any]:
    """Return the fields of the equivalent config.json."""
    arch = architecture(file)
    own = {
        name.removeprefix(f"{arch}."): value
        for name, value in file.fields.items()
        if name.startswith(f"{arch}.")
    }
    for field in FIELDS.values():
        if field not in own and (field != "feed_forward_length" or arch not in OF_EXPERTS):
            raise ModelError(f"{file.path} lacks the field {arch}.{field}; download it again.")
    raw = {name: own.get(field) for name, field in (FIELDS | OPTIONAL).items()}
    if TABLE not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor {TABLE}; download it again.")
    raw["model_type"] = ARCHITECTURES[arch]
    raw["vocab_size"] = file.tensors[TABLE].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields = Fields(file.path, own)
    _refuse(fields, arch)
    raw["rope_scaling"] = None if arch == "gemma4" else _scaling(file, fields)
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch in INTERLEAVED:
        raw["rope_traditional"] = True
    if arch in OF_A_FAMILY:
        raw |= OF_A_FAMILY[arch](fields, raw, file)
    if arch == "qwen3moe":
        raw["norm_topk_prob"] = True
    if arch == "gemma3":
        # The largest Gemma 3 scales queries by a different number, which the file does not contain
        per_head = fields.number("embedding_length") / fields.number("attention.head_count")
        head = fields.number("attention.key_length", 256)
        raw["query_pre_attn_scalar"] = per_head if own["block_count"] == 62 else head
        raw["norms_hold_one"] = True
    return raw


def _granite(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    per_head = fields.number("embedding_length") / fields.number("attention.head_count")
    own = {
        "embedding_multiplier": fields.real("embedding_scale", 1.0),
        "residual_multiplier": fields.real("residual_scale", 1.0),
        "attention_multiplier": fields.real("attention.scale", per_head**-0.5),
        "logits_scaling": fields.real("logit_scale", 1.0),
    }
    if fields.get("rope.scaling.finetuned") is False:  # Granite 4 without RoPE
        own |= {"model_type": "granitemoehybrid", "position_embedding_type": "nope"}
    return own


def _mistral3(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    """Ministral 3, or Mistral Small 3, which uses default RoPE."""
    rope = raw["rope_scaling"] or {"rope_type": "default"}
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": fields.get("rope.scaling.yarn_log_multiplier")}
        rope["llama_4_scaling_beta"] = fields.get("attention.temperature_scale")
    return {"rope_scaling": None, "rope_parameters": rope}


def _olmo(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with sliding windows."""
    if not fields.get("attention.sliding_window"):
        return {}
    own: dict[str, Any] = {"model_type": "olmo3"}
    slides = fields.get("attention.sliding_window_pattern")
    if isinstance(slides, list):
        kinds = ("full_attention", "sliding_attention")
        own["layer_types"] = [kinds[bool(each)] for each in slides]
    return own


def _lfm2(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    heads = fields.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != fields.number("block_count"):
        raise fields.refuse("lfm2.attention.head_count_kv", heads, ("a number for each layer",))
    found = {each for each in heads if each}
    if len(found) != 1:
        raise fields.refuse("lfm2.attention.head_count_kv", heads, ("0, or the same number",))
    return {
        "num_key_value_heads": found.pop(),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": raw["rms_norm_eps"],
        "block_ff_dim": raw["intermediate_size"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": fields.number("shortconv.l_cache"),
    }


def _qwen35(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    layers = fields.number("block_count")
    drafting = fields.number("nextn_predict_layers", 0, 0)
    heads, values = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    turned = fields.number("rope.dimension_count")
    if values % heads:
        choice = f"a multiple of {heads}, the number of value heads"
        raise fields.refuse("ssm.inner_size", values, (choice,))
    if drafting >= layers:
        choice = f"fewer than the {layers} layers of block_count"
        raise fields.refuse("nextn_predict_layers", drafting, (choice,))
    own = {
        "num_hidden_layers": layers - drafting,
        "full_attention_interval": fields.number("full_attention_interval", 4),
        "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
        "linear_num_key_heads": fields.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.number("ssm.state_size"),
        "linear_value_head_dim": values // heads,
        "partial_rotary_factor": turned / fields.number("attention.key_length"),
        "shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "norms_hold_one": True,
        "value_heads_tiled": True,
    }
    slow = fields.get("attention.recurrent_layers")
    if isinstance(slow, list):
        kinds = ("full_attention", "linear_attention")
        own["layer_types"] = [kinds[bool(each)] for each in slow]
    return own


def _gemma4(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    """Gemma 4. The number of key heads and the width of the MLP may be listed per layer."""
    layers = fields.number("block_count")
    slides = _listed(fields, "attention.sliding_window_pattern", layers)
    if slides[-1]:
        choice = "full attention in the last layer"
        raise fields.refuse("attention.sliding_window_pattern", slides, (choice,))
    Hkv = _listed(fields, "attention.head_count_kv", layers)
    hidden = _listed(fields, "feed_forward_length", layers)
    reusing = fields.number("attention.shared_kv_layers", 0, least=0)
    if reusing >= layers:
        raise fields.refuse("attention.shared_kv_layers", reusing, (f"0 to {layers - 1}",))
    writing = layers - reusing
    is_doubled = hidden[-1] != hidden[0]
    doubled = [hidden[0]] * writing + [(1 + is_doubled) * hidden[0]] * reusing
    if hidden != doubled:
        choice = "one number, or twice that in layers that read the keys of others"
        raise fields.refuse("feed_forward_length", hidden, (choice,))
    near = {Hkv[i] for i in range(layers) if slides[i]}
    far = {Hkv[i] for i in range(layers) if not slides[i]}
    if len(near) > 1 or len(far) > 1:
        choice = "one number for all layers with a window, and one for the others"
        raise fields.refuse("attention.head_count_kv", Hkv, (choice,))
    head = fields.number("attention.key_length")
    near_head = fields.number("attention.key_length_swa", head)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.number(name, near_head) != near_head:
            raise fields.refuse(name, fields.get(name), (f"{near_head}, the size of a head",))
    full = [i for i in range(writing) if not slides[i]]
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "num_key_value_heads": next(iter(near or far)),
        "head_dim": near_head,
        "per_layer_config": {"full": {"num_key_value_heads": far.pop(), "head_dim": head}},
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.tensors for i in full),
        "num_kv_shared_layers": reusing,
        "intermediate_size": hidden[0],
        "use_double_wide_mlp": is_doubled,
        "hidden_size_per_layer_input": fields.number(
            "embedding_length_per_layer_input", 0, least=0
        ),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.real("rope.freq_base", 1e6),
                "partial_rotary_factor": _turning_part(file),
            },
            "sliding_attention": {"rope_theta": fields.real("rope.freq_base_swa", 1e4)},
        },
    }


def _listed(fields: Fields, name: str, layers: int) -> list:
    """Return a field's value for each layer. The file may have a single value for all layers."""
    value = fields.get(name)
    values = value if isinstance(value, list) else [value] * min(layers, MOST_LAYERS)
    if len(values) != layers or not all(type(each) in (bool, int) for each in values):
        raise fields.refuse(name, value, (f"a number for each of {layers} layers",))
    return values


def _turning_part(file: Gguf) -> float:
    """Return the fraction of planes that rotate. Their factors are 1 and come first. All other factors
    are so large that those planes do not rotate."""
    factors = _factors(file)
    turning = factors.count(1.0)
    if not factors or any(each < 1e20 for each in factors[turning:]):
        raise ModelError(f"{file.path}: {FREQUENCIES} must hold ones, and then 1e30.")
    return turning / len(factors)


def _gpt_oss(fields: Fields, raw: dict[str, Any], file: Gguf) -> dict[str, Any]:
    """gpt-oss does not round YaRN's bounds, although llama.cpp does."""
    raw["rope_scaling"] = raw["rope_scaling"] and raw["rope_scaling"] | {"truncate": False}
    return {"intermediate_size": fields.number("expert_feed_forward_length")}


OF_A_FAMILY = {
    "granite": _granite,
    "mistral3": _mistral3,
    "olmo2": _olmo,
    "lfm2": _lfm2,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
} | dict.fromkeys(QWEN35, _qwen35)


# Fields that may differ from layer to layer
OF_LAYERS = {
    "lfm2": ("attention.head_count_kv",),
    "gemma4": ("attention.head_count_kv", "feed_forward_length"),
}


def _refuse(fields: Fields, arch: str) -> None:
    """Refuse settings that would need a different computation."""
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if name in OF_LAYERS.get(arch, ()):
            continue
        if isinstance(fields.get(name), list):
            raise fields.refuse(f"{arch}.{name}", fields.get(name), ("one number for all layers",))
    if fields.get("expert_count") and arch not in OF_EXPERTS:
        raise fields.refuse(f"{arch}.expert_count", fields.get("expert_count"), ("0",))
    usual = fields.number("embedding_length") // fields.number("attention.head_count")
    head = fields.number("attention.key_length", usual)
    for name in ("attention.value_length", "rope.dimension_count"):
        turns_a_part = arch in QWEN35 and name == "rope.dimension_count"
        if fields.number(name, head) != head and not turns_a_part:
            raise fields.refuse(
                f"{arch}.{name}", fields.get(name), (f"{head}, the size of a head",)
            )


def _factors(file: Gguf) -> list[float]:
    """Return the factor by which each RoPE plane is slowed; empty if the file has none."""
    tensor = file.tensors.get(FREQUENCIES)
    if tensor is None:
        return []
    if tensor.type.name != "F32" or len(tensor.shape) > 1 or tensor.nbytes > 2**20:
        raise ModelError(
            f"{file.path}: {FREQUENCIES} is {tensor.type.name} of the shape {tensor.shape}. Supported: F32, "
            "a number for each plane."
        )
    return [each for (each,) in struct.iter_unpack("<f", b"".join(tensor.read_pieces(2**20)))]


def _scaling(file: Gguf, fields: Fields) -> dict[str, Any] | None:
    length = fields.number("context_length", 2048)
    if factors := _factors(file):
        slowed = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return slowed | {"rope_type": "longrope", "original_max_position_embeddings": length}
    kind = fields.get("rope.scaling.type") or "none"
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    if kind == "none" or (kind == "linear" and not factor):
        return None
    original = fields.number("rope.scaling.original_context_length", length)
    found = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    for end in ("fast", "slow"):
        found[f"beta_{end}"] = fields.get(f"rope.scaling.yarn_beta_{end}")
    return found
