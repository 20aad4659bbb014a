"""Small GGUF files, written by the `gguf` package, and next to each a folder with the same weights in float32.

Tensor names come from the package's own table. K-quants, which it cannot create, are random bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import make_config, make_tokenizer, random_weights, save
from gguf import GGMLQuantizationType as Kind
from parity import GEMMA4, GPT_OSS, GRANITE, LFM2, MINISTRAL, QWEN3_5, QWEN3_5_MOE

from kernels.delta_net import Heads
from kernels.device import mx
from models.config import read_config
from models.gguf_file import GgufTensor
from models.gguf_weights import GgufWeights
from models.weights import Tensor

# Keys and values of the same size, as llama.cpp requires
DELTA_HEADS = {
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "granite": {"model_type": "granite", **GRANITE},
    "mistral3": {
        "model_type": "ministral3",
        "head_dim": 64,
        "rope_theta": None,
        "rope_parameters": MINISTRAL
        | {"rope_theta": 10000.0, "original_max_position_embeddings": 16},
    },
    "olmo2": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "lfm2": {"model_type": "lfm2", **LFM2, "block_ff_dim": 256},
    "qwen35": {**QWEN3_5, **DELTA_HEADS},
    "qwen35moe": {
        **QWEN3_5_MOE,
        **DELTA_HEADS,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "head_dim": 64,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        **GPT_OSS,
        "num_hidden_layers": 2,
        "num_local_experts": 3,
        "head_dim": 64,
        "intermediate_size": 256,
        "rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": False},
    },
}
PLAIN = (
    ".mlp.gate.",
    "conv.conv",
    "conv1d",
    "shared_expert_gate",
    ".bias",
)  # matrices that are not quantized
MULTIPLIED = ("embed_tokens.", "model_projection")  # the loader folds a factor into these
SMALL = {"hidden_size": 256, "intermediate_size": 256}  # multiples of a K-quant block
# Byte offsets of a block's float16 numbers
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def packed(weight: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Quantize a weight: (rows, width) -> the bytes of this type."""
    if kind.name not in HALVES:
        return gguf.quantize(weight, kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*weight.shape[:-1], weight.shape[-1] // block, nbytes)
    data = rng.integers(0, 256, shape, dtype=np.uint8)
    size = float(weight.std()) / {"Q4_K": 250, "Q5_K": 500, "Q6_K": 1300}[kind.name]
    for at, factor in zip(
        HALVES[kind.name], (1, {"Q4_K": 8, "Q5_K": 16}.get(kind.name)), strict=False
    ):
        numbers = (size * factor * (0.5 + rng.random(shape[:-1]))).astype(np.float16)
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return data.reshape(*weight.shape[:-1], -1)


def make_pair(
    folder: Path,
    kind: str = "Q8_0",
    arch: str = "llama",
    seed: int = 0,
    fields: dict[str, Any] | None = None,
    more: dict[str, np.ndarray] | None = None,
    change: Callable[[str, np.ndarray], np.ndarray | None] = lambda name, data: data,
    **changes,
) -> tuple[Path, Path]:
    """Write model.gguf, and a folder with the tensors as `gguf.dequantize` decodes them.

    `fields`: metadata that replaces the usual values; None removes a field. `change` receives the bytes of
    each tensor before it is written; returning None omits the tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(**{**SMALL, **FAMILIES[arch], **changes})
    (folder / "config.json").write_text(json.dumps(config))
    c = read_config(folder, True)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, arch)
    settings = write_config(writer, config, c)
    write_tokenizer(writer)
    for name, value in (fields or {}).items():
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    rng = np.random.default_rng(seed)
    names = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(names[arch], c.layers)
    weights = {}
    for name, weight in random_weights(c, seed).items():
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            weight = weight[..., 0]
        named = name.replace("dt_bias", "dt_proj.bias")
        named += ".weight" * name.endswith(("layer_scalar", "sinks"))
        theirs = name_map.get_name(named, try_suffixes=(".weight", ".bias"))
        if arch == "lfm2" and name == "model.norm.weight":
            theirs = "token_embd_norm.weight"
        is_plain = weight.ndim == 1 or any(part in name for part in PLAIN)
        own = Kind.F32 if is_plain else Kind[kind]
        if arch == "gpt-oss" and not is_plain and ".experts." in name:
            own = Kind.MXFP4
        if arch == "gemma4" and any(part in name for part in MULTIPLIED):
            own = Kind.F32
        heads = {"q_proj": c.H, "k_proj": c.Hkv}.get(name.split(".")[-2])
        if arch not in ("llama", "granite", "mistral3"):
            heads = None
        if heads:
            weight = weight.reshape(heads, 2, c.Dh // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        is_added = c.norms_add and name.endswith("norm.weight") and "linear_attn" not in name
        stored = weight + 1 if is_added else weight
        if "linear_attn" in name:
            stored = with_heads(stored, name, c.delta, value_heads(c.delta))
        if name.endswith("A_log"):
            stored = -np.exp(stored)
        if name.endswith("shared_expert_gate.weight"):
            stored = stored[0]
        data = packed(stored, own, rng)
        is_plain = own in (Kind.F32, Kind.F16)
        written = change(theirs, data.copy())
        if written is not None:
            writer.add_tensor(theirs, written, raw_dtype=None if is_plain else own)
        wide = gguf.dequantize(data, own).astype(np.float32)
        if name.endswith("A_log"):
            wide = np.array(mx.log(mx.array(-wide)))
        if "linear_attn" in name:
            wide = with_heads(wide, name, c.delta, np.argsort(value_heads(c.delta)))
        wide = weight if is_added else wide.reshape(weight.shape)
        if heads:
            wide = wide.reshape(heads, c.Dh // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        if arch != "gpt-oss":
            name = name.replace(".experts.", ".switch_mlp.")
        weights[name] = mx.array(np.ascontiguousarray(wide))
    for name, data in (settings | (more or {})).items():
        written = change(name, data)
        if written is not None:
            writer.add_tensor(name, written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, save(folder / "wide", config, weights)


def value_heads(heads: Heads) -> np.ndarray:
    """Return llama.cpp's order: the first value head of each key head, then the second of each."""
    return np.arange(heads.Hv).reshape(heads.Hk, -1).T.flatten()


def with_heads(weight: np.ndarray, name: str, heads: Heads, order: np.ndarray) -> np.ndarray:
    """Reorder the value heads in one of a delta net's tensors."""
    values = (order[:, None] * heads.Dv + np.arange(heads.Dv)).flatten()
    keys = 2 * heads.Hk * heads.Dk
    if "qkv" in name or "conv1d" in name:
        return weight[np.concatenate([np.arange(keys), keys + values])]
    if "out_proj" in name:
        return weight[:, values]
    if "norm" in name:
        return weight
    return weight[values if "_z" in name else order]


class Dequantized(GgufWeights):
    """The weights of a GGUF file, each tensor as `gguf.dequantize` decodes it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.tensors = {
            name: Tensor(path, tensor.name, mx.float32, self.file.tensors[tensor.name].shape)
            for name, tensor in self.tensors.items()
            if not name.endswith((".scales", ".biases"))
        }

    def read_tensor(self, name: str, as_codes: bool = False) -> mx.array:
        stored: GgufTensor = self.file.tensors[self.tensors[name].name]
        data = np.frombuffer(b"".join(stored.read_pieces(2**24)), np.uint8)
        kind = Kind[stored.type.name]
        wide = gguf.dequantize(data.view(np.float32) if kind == Kind.F32 else data, kind)
        return mx.array(wide.reshape(stored.shape))


def write_granite(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def write_mistral3(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write_olmo3(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_sliding_window_pattern([kind[0] == "s" for kind in config["layer_types"]])


def write_qwen35(writer: gguf.GGUFWriter, config: dict) -> None:
    heads = config["linear_num_value_heads"]
    turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def write_lfm2(writer: gguf.GGUFWriter, config: dict) -> None:
    heads = config["num_key_value_heads"]
    writer.kv_data[0].pop("lfm2.attention.head_count_kv")
    writer.add_head_count_kv([heads * (kind != "conv") for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])


def write_gemma4(writer: gguf.GGUFWriter, config: dict) -> dict[str, np.ndarray]:
    for name in ("head_count_kv", "key_length", "value_length"):
        writer.kv_data[0].pop(f"gemma4.attention.{name}")
    slides = [kind[0] == "s" for kind in config["layer_types"]]
    reusing = config["num_kv_shared_layers"]
    near, far = config["head_dim"], config["global_head_dim"]
    heads = config["num_key_value_heads"]
    far_heads = config.get("num_global_key_value_heads")
    writer.add_head_count_kv(
        [heads if each else far_heads for each in slides] if far_heads else heads
    )
    for add, size in (
        (writer.add_key_length, far),
        (writer.add_value_length, far),
        (writer.add_rope_dimension_count, far),
        (writer.add_key_length_swa, near),
        (writer.add_value_length_swa, near),
        (writer.add_rope_dimension_count_swa, near),
    ):
        add(size)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(reusing)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["use_double_wide_mlp"]:
        hidden = config["intermediate_size"]
        count = len(slides) - reusing
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        writer.add_feed_forward_length([hidden] * count + [2 * hidden] * reusing)
    turning = far // 8  # of the far // 2 planes
    factors = [1.0] * turning + [1e30] * (far // 2 - turning)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def write_gpt_oss(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


OWN_FIELDS = {
    "gemma4_text": write_gemma4,
    "gpt_oss": write_gpt_oss,
    "granite": write_granite,
    "ministral3": write_mistral3,
    "olmo3": write_olmo3,
    "lfm2": write_lfm2,
    "qwen3_5_text": write_qwen35,
    "qwen3_5_moe_text": write_qwen35,
}


def write_config(writer: gguf.GGUFWriter, config: dict, c) -> dict[str, np.ndarray]:
    """Write the config, and return the tensors that contain settings."""
    more = {}
    writer.add_context_length(c.max_positions)
    writer.add_block_count(c.layers)
    writer.add_embedding_length(c.D)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(c.H)
    writer.add_head_count_kv(c.Hkv)
    writer.add_key_length(c.Dh)
    writer.add_value_length(c.Dh)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    if c.window:
        writer.add_sliding_window(c.window)
    if own := OWN_FIELDS.get(config["model_type"]):
        more = own(writer, config) or {}
    if c.experts:
        writer.add_expert_count(c.experts)
        writer.add_expert_used_count(c.taken)
        writer.add_expert_feed_forward_length(c.hidden)
    return more


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Write the byte-level tokenizer of `make_tokenizer`."""
    vocabulary = make_tokenizer().get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.get)
    unused = 272 - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"<unused{n}>" for n in range(unused))])
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 256) + [5] * unused)
    writer.add_token_merges(["a b"][:0])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
