"""Read a model's config.json, or the metadata of a GGUF file, into a `Config`.

A `Config` holds the differences between families as plain data, so the forward pass knows no family's
name. A setting that it cannot hold is refused with the field's name and the supported values. Next:
`weights.py` checks the tensors against the config; `load.py` makes a model of both.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from base.untrusted_files import ModelError, read_json
from base.validation import shown
from kernels.delta_net import TAPS, Heads
from models.families import FAMILIES, NORMS, Family
from models.fields import Fields, nearest
from models.gguf_config import described
from models.gguf_file import is_gguf, read_gguf
from models.rope import Rope

# A layer's matrices: output size, input size
ATTENTION = {
    "self_attn.q_proj": ("queries", "width"),
    "self_attn.k_proj": ("keys", "width"),
    "self_attn.v_proj": ("keys", "width"),
    "self_attn.o_proj": ("width", "queries"),
}
MLP = {
    "mlp.gate_proj": ("hidden", "width"),
    "mlp.up_proj": ("hidden", "width"),
    "mlp.down_proj": ("width", "hidden"),
}
DELTA_NET = {
    "linear_attn.in_proj_qkv": ("delta inputs", "width"),
    "linear_attn.in_proj_z": ("delta values", "width"),
    "linear_attn.in_proj_a": ("value heads", "width"),
    "linear_attn.in_proj_b": ("value heads", "width"),
    "linear_attn.out_proj": ("width", "delta values"),
}
CONVOLUTION = {"conv.in_proj": ("three widths", "width"), "conv.out_proj": ("width", "width")}
EXPERTS = {  # instead of one MLP: a router, and three matrices for each expert
    "mlp.gate": ("experts", "width"),
    "mlp.experts.gate_proj": ("experts", "hidden", "width"),
    "mlp.experts.up_proj": ("experts", "hidden", "width"),
    "mlp.experts.down_proj": ("experts", "width", "hidden"),
}
SHARED_EXPERT = {  # which all tokens take
    "mlp.shared_expert.gate_proj": ("shared", "width"),
    "mlp.shared_expert.up_proj": ("shared", "width"),
    "mlp.shared_expert.down_proj": ("width", "shared"),
    "mlp.shared_expert_gate": ("one", "width"),
}
# Of each layer's own input from a table: "embeddings" are its numbers of a layer
LAYER_INPUT = {
    "per_layer_input_gate": ("embeddings", "width"),
    "per_layer_projection": ("width", "embeddings"),
}
# In `text_config`; images are not supported
WITH_TEXT_PART = ("mistral3", "gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class AttentionHeads(NamedTuple):
    """The heads of a layer."""

    H: int  # queries
    Hkv: int  # keys, and as many values; 0 where a layer reads those of an earlier one
    Dh: int  # numbers in each


@dataclass(frozen=True)
class Config:
    """The shape of a model, in the notation of `llama.py`."""

    model_type: str
    layers: int
    D: int  # model width
    H: int  # query heads
    Hkv: int  # key and value heads; H / Hkv query heads share one
    Dh: int  # head size
    hidden: int  # width inside the MLP, or inside of each expert
    V: int  # vocabulary
    norm_eps: float
    max_positions: int  # the longest sequence the model was trained for
    tied: bool  # the output head is the embedding table, transposed
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str  # of queries and keys: over each "head", over their whole "width", or "" for none
    # The length of the sliding window, the token's own row included; None means full attention
    window: int | None
    rope: Rope
    whole: Collection[int] = ()  # the layers with full attention, although there is a window
    near: Rope | None = None  # of the layers with the window, if it differs
    # beta, L: queries at position p are multiplied by 1 + beta ln(1 + floor(p / L))
    growth: tuple[float, int] | None = None
    norms_at: str = "before"  # the branches, or "after" them, or "around"
    norms_add: bool = False  # the files hold what is added to 1
    unturned: Collection[int] = ()  # the layers without positions (NoPE)
    gelu: bool = False  # in the MLP, instead of SiLU
    cap: float | None = None  # soft cap of attention's scores
    head_cap: float | None = None  # and of the logits
    has_head: bool = True  # an embedding model may have none
    convolved: Collection[int] = ()  # the layers with a short convolution in place of attention
    taps: int = 0  # of it
    delta: Heads | None = None  # of the layers with a gated delta net in place of attention,
    deltas: Collection[int] = ()  # which are these
    values_tiled: bool = (
        False  # the first value head of each key head, then the second of each (GGUF)
    )
    shared_expert: int = 0  # the width inside an expert that all tokens take; 0: there is none
    gated: bool = False  # attention has an output gate, whose rows are in q_proj
    # Hkv and Dh of the layers with full attention, if layers with a window have others
    far: tuple[int, int] | None = None
    scale: float | None = (
        None  # of q k^T, if it is not 1 / sqrt(Dh); the norm of q takes the factor
    )
    v_norm: bool = False  # over each head of the values, without weights
    v_is_k: bool = False  # in layers with full attention: values are the keys before their norm
    reusing: int = 0  # of the last layers: each reads the rows of an earlier layer of its type
    reusing_hidden: int = 0  # the width inside the MLP of these
    embeddings: int = 0  # numbers that a token adds to each layer, from a table of their own
    embeddings_V: int = 0  # rows of that table
    scalars: bool = False  # what leaves a layer is multiplied by a number
    # The files may hold q, k and v as one matrix, and gate and up (`Weights.split`)
    fused: bool = False
    experts: int = 0  # per layer; 0 means one MLP for all tokens
    taken: int = 1  # experts per token
    whole_shares: bool = False  # the shares of a token's experts are normalized to 1
    limit: float | None = None  # of gate and up, in experts whose SwiGLU is clamped
    sinks: bool = False  # each query head has a logit that joins its softmax
    # Factors of modules' outputs, which are folded into their weights
    multipliers: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint must hold, with its shape before quantization."""
        D = self.D
        sizes = {
            "width": D,
            "three widths": 3 * D,
            "experts": self.experts,
            "shared": self.shared_expert,
            "one": 1,
            "embeddings": self.embeddings,
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.V, D),
            "model.norm.weight": (D,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.V, D)
        if self.delta:
            values = self.delta.Hv * self.delta.Dv
            sizes |= {"delta inputs": self.delta.inputs, "delta values": values}
            sizes |= {"value heads": self.delta.Hv}
        if self.embeddings:
            count = self.layers * self.embeddings
            shapes["model.embed_tokens_per_layer.weight"] = (self.embeddings_V, count)
            shapes["model.per_layer_model_projection.weight"] = (count, D)
            shapes["model.per_layer_projection_norm.weight"] = (self.embeddings,)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            H, Hkv, Dh = self.heads(i)
            sizes |= {"queries": H * Dh, "keys": Hkv * Dh, "hidden": self.hidden_of(i)}
            mixer = CONVOLUTION if i in self.convolved else ATTENTION
            mixer = DELTA_NET if i in self.deltas else mixer
            modules = mixer | (EXPERTS if self.experts else MLP)
            modules |= LAYER_INPUT if self.embeddings else {}
            modules |= SHARED_EXPERT if self.shared_expert else {}
            for module, sides in modules.items():
                if self.is_unused(f"{layer}{module}"):
                    continue
                shape = tuple(sizes[side] for side in sides)
                if self.gated and module.endswith("q_proj"):
                    shape = (2 * shape[0], shape[1])
                shapes[f"{layer}{module}.weight"] = shape
                if self.has_bias(module):
                    shapes[f"{layer}{module}.bias"] = shape[:-1]
            for name in self.norms.values():
                shapes[f"{layer}{name}.weight"] = (D,)
            if self.embeddings:
                shapes[f"{layer}post_per_layer_input_norm.weight"] = (D,)
            if self.scalars:
                shapes[f"{layer}layer_scalar"] = (1,)
            if self.sinks:
                shapes[f"{layer}self_attn.sinks"] = (H,)
            if i in self.convolved:
                shapes[f"{layer}conv.conv.weight"] = (D, self.taps, 1)
            elif i in self.deltas:
                shapes[f"{layer}linear_attn.conv1d.weight"] = (self.delta.inputs, TAPS, 1)
                shapes[f"{layer}linear_attn.A_log"] = (self.delta.Hv,)
                shapes[f"{layer}linear_attn.dt_bias"] = (self.delta.Hv,)
                shapes[f"{layer}linear_attn.norm.weight"] = (self.delta.Dv,)
            elif self.qk_norm:
                over_all = self.qk_norm == "width"
                shapes[f"{layer}self_attn.q_norm.weight"] = (sizes["queries"] if over_all else Dh,)
                if Hkv:
                    shapes[f"{layer}self_attn.k_norm.weight"] = (sizes["keys"] if over_all else Dh,)
        return shapes

    def has_bias(self, module: str) -> bool:
        """True if this matrix has a bias."""
        if "linear_attn" in module:
            return False
        if "mlp" in module:
            return self.mlp_bias
        return self.o_bias if "o_proj" in module else self.qkv_bias

    def factor(self, name: str) -> float:
        """The factor of the output of a tensor's module."""
        module = name.split(".")[-2]
        if module == "q_norm" and self.scale:
            return self.scale * self.heads(int(name.split(".")[2])).Dh ** 0.5
        return self.multipliers.get(module, 1)

    @property
    def norms(self) -> dict[str, str]:
        """The fields of `Layer` for its norms, and the checkpoint's names."""
        return NORMS[self.norms_at]

    def heads(self, layer: int) -> AttentionHeads:
        """The heads of a layer with attention."""
        is_far = self.far and (self.window is None or layer in self.whole)
        Hkv, Dh = self.far if is_far else (self.Hkv, self.Dh)
        return AttentionHeads(self.H, Hkv if layer < self.writing else 0, Dh)

    @property
    def writing(self) -> int:
        """The number of the first layer that reads an earlier one's rows: all from there on do."""
        return self.layers - self.reusing

    def slab_index(self, layer: int) -> int:
        """The array of the slab that a layer reads: its own, or that of the last writing layer of its
        type."""
        if layer >= self.writing:
            kind = self.positions(layer)
            layer = max(i for i in range(self.writing) if self.positions(i) == kind)
        return sum(self.row(i)[0] > 0 for i in range(layer))

    def hidden_of(self, layer: int) -> int:
        """The width inside a layer's MLP."""
        return self.hidden if layer < self.writing else self.reusing_hidden or self.hidden

    def is_unused(self, name: str) -> bool:
        """True for matrices and norms that checkpoints may hold, but a layer does without."""
        place, _, module = name.removesuffix(".weight").rpartition(".")
        if module not in ("k_proj", "v_proj", "k_norm") or not (self.reusing or self.v_is_k):
            return False
        layer = int(place.split(".")[2])
        is_far = self.window is None or layer in self.whole
        return layer >= self.writing or (self.v_is_k and module == "v_proj" and is_far)

    def row(self, layer: int) -> tuple[int, int]:
        """The row of a token in a layer, as heads and their size: keys and values, or the input of a
        convolution. A delta net has states instead, and a layer that reads another's rows has none."""
        if layer in self.deltas:
            return 0, self.Dh
        if layer in self.convolved:
            return self.D // self.Dh, self.Dh
        _, Hkv, Dh = self.heads(layer)
        return 2 * Hkv, Dh

    def positions(self, layer: int) -> tuple[Rope | None, int | None]:
        """A layer's rope, if it has positions, and its sliding window. A convolution has neither, and
        sees its taps."""
        if layer in self.convolved:
            return None, self.taps
        slides = self.window is not None and layer not in self.whole
        rope = (self.near if slides else None) or self.rope
        return None if layer in self.unturned else rope, self.window if slides else None


def read_config(folder: Path, has_head: bool) -> Config:
    """The config of a folder or GGUF file. If it does not say whether the head is tied, `has_head` (the
    weights hold an `lm_head`) decides."""
    path = folder if is_gguf(folder) else folder / "config.json"
    raw = raw_config(folder)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = f"; {near_family(name)}" if near_family(name) else ""
        said = f"{path}: model_type {shown(name)} is not served{near}. "
        raise ModelError(f"{said}Supported: {', '.join(FAMILIES)}.", near.removeprefix("; "))
    family = FAMILIES[name]
    raw |= {key: usual for key, usual in family.unsaid.items() if raw.get(key) is None}
    fields = Fields(path, raw)
    get = raw.get
    _refuse(fields, family)
    D = fields.number("hidden_size")
    H = fields.number("num_attention_heads")
    Hkv = fields.number("num_key_value_heads", H)
    if H % Hkv:
        raise ModelError(f"{path}: {H} attention heads cannot share {Hkv} key-value heads evenly.")
    if get("head_dim") is None and D % H:
        raise ModelError(
            f"{path}: hidden_size {D} is no multiple of {H} heads, and head_dim is not given."
        )
    Dh = fields.number("head_dim", D // H)
    if Dh % 2 or Dh < 4:
        raise ModelError(
            f"{path}: head_dim = {Dh}, but rotary positions turn pairs of numbers: even, and at least 4."
        )
    attention_bias = bool(get("attention_bias", False))
    max_positions = fields.number("max_position_embeddings", 2048)
    tied = bool(get("tie_word_embeddings", not has_head))
    window, whole = _window(fields, family)
    shared = {
        "model_type": name,
        "layers": fields.number("num_hidden_layers"),
        "D": D,
        "H": H,
        "Hkv": Hkv,
        "Dh": Dh,
        "hidden": fields.number(family.width),
        "V": fields.number("vocab_size"),
        "norm_eps": fields.real("rms_norm_eps", 1e-6, 0),
        "max_positions": max_positions,
        "tied": tied,
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": bool(get("mlp_bias", False)),
        "qk_norm": "",
        "window": window,
        "whole": whole,
        "rope": _rope(fields, family, Dh, max_positions),
    }
    config = Config(**shared | family.own(fields, D, Dh, tied))
    return replace(config, norms_add=False) if get("norms_hold_one") else config


def raw_config(place: Path) -> dict[str, Any]:
    """The fields of config.json, or of a GGUF file in their place. Of a model that also sees or hears,
    those of the part that reads and writes text."""
    if is_gguf(place):
        return described(read_gguf(place))
    raw = read_json(place / "config.json")
    text = raw.get("text_config")
    if raw.get("model_type") not in WITH_TEXT_PART or not isinstance(text, dict):
        return raw
    kept = ("quantization", "quantization_config", "eos_token_id", "tie_word_embeddings")
    return {key: raw[key] for key in kept if key in raw} | text


def near_family(name: object) -> str:
    """The nearest family that is served, in words: "qwen3_5 is"."""
    return nearest(name, [family.removesuffix("_text") for family in FAMILIES])


def _refuse(fields: Fields, family: Family) -> None:
    """Refuse settings that a `Config` cannot hold."""
    get = fields.get
    act, *known = family.activation
    if (get(act) or known[0]) not in known:
        raise fields.refuse(act, get(act), known[:1])
    for flag in ("use_bidirectional_attention", *family.refused):
        if get(flag) and get(flag) != "vision":  # text alone stays causal
            raise fields.refuse(flag, get(flag), ("false, or nothing",))
    for key in ("quantization", "quantization_config"):
        if not isinstance(get(key) or {}, dict):
            raise fields.refuse(key, get(key), ("an object, as MLX writes it",))
    method = (get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4") and not get("quantization"):
        known = ("MLX affine quantization", "mxfp4", "float16", "bfloat16", "float32")
        raise fields.refuse("quant_method", method, known)
    mode = (get("quantization") or {}).get("mode", "affine")
    if mode not in ("affine", "mxfp4"):
        raise fields.refuse("quantization mode", mode, ("affine", "mxfp4"))


def _window(fields: Fields, family: Family) -> tuple[int | None, Collection[int]]:
    """The length of the sliding window, if any layer has one, and the layers without it."""
    layers = fields.number("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = family.layer_types or {
            "full_attention": "full_attention",
            "sliding_attention": "sliding_attention",
        }
        if not isinstance(kinds, list) or len(kinds) < layers or not {*map(str, kinds)} <= {*known}:
            choice = f"for each of {layers} layers {' or '.join(sorted(known))}"
            raise fields.refuse("layer_types", kinds, (choice,))
        whole = frozenset(i for i in range(layers) if known[kinds[i]] == "full_attention")
    elif family.whole is not None:
        whole = family.whole(fields, layers)
    else:
        return None, ()
    if len(whole) == layers or fields.get("sliding_window", 4096) is None:
        return None, ()
    return fields.number("sliding_window", 4096), whole


def _rope(fields: Fields, family: Family, Dh: int, max_positions: int) -> Rope:
    """Configs have it as `rope_scaling` with `type` or `rope_type`, or as `rope_parameters`."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if family.two_ropes and isinstance(scaling, dict):
        full = scaling.get("full_attention")
        scaling = full if isinstance(full, dict) else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(
            f"{fields.path}: rope scaling is {shown(scaling)} where one flat object belongs."
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if isinstance(kind, str):
        kind = family.rope_types.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise fields.refuse("rope type", kind, ROPE_TYPES)
    inner = Fields(fields.path, scaling)
    theta = inner.real("rope_theta", fields.real("rope_theta", 10000.0, 1), 1)
    name = "partial_rotary_factor"
    part = inner.real(name, fields.real(name, 1.0, 0), 0)
    if kind == "proportional":
        if part > 1:
            raise fields.refuse(name, part, ("up to 1",))
        return Rope(kind, theta, factor=inner.real("factor", 1.0), part=part)
    turned = int(Dh * part)
    if part != 1 and not family.turns_a_part:
        raise fields.refuse(name, part, ("1",))
    if turned % 2 or not 4 <= turned <= Dh:
        choice = f"1, or what turns an even number, at least 4, of {Dh}"
        raise fields.refuse(name, part, (choice,))
    rope = Rope(
        kind,
        theta,
        turned=turned if turned < Dh else None,
        interleaved=bool(fields.get("rope_traditional")),
    )
    if kind == "default":
        return rope
    name = "original_max_position_embeddings"
    usual = 8192 if kind == "llama3" else max_positions
    original = fields.number(name, inner.number(name, usual))
    if kind in ("linear", "dynamic"):
        return replace(rope, factor=inner.real("factor"), original_length=max_positions)
    rope = replace(rope, original_length=original)
    if kind == "llama3":
        return replace(
            rope,
            factor=inner.real("factor"),
            low_freq_factor=inner.real("low_freq_factor", 1),
            high_freq_factor=inner.real("high_freq_factor", 4),
        )
    stretch = max_positions / original
    rope = replace(rope, factor=inner.real("factor", stretch))
    return _yarn(inner, rope) if kind == "yarn" else _longrope(inner, rope, turned // 2)


def _yarn(inner: Fields, rope: Rope) -> Rope:
    """The default gain grows with the logarithm of the factor, or is a quotient of two such terms."""
    if rope.theta == 1:
        raise inner.refuse("rope_theta", rope.theta, ("with yarn, more than 1",))
    growth = math.log(max(rope.factor, 1))
    over = inner.real("mscale", 0.0, 0)
    under = inner.real("mscale_all_dim", 0.0, 0)
    usual = 1 + 0.1 * growth
    if over and under:
        usual = (1 + 0.1 * over * growth) / (1 + 0.1 * under * growth)
    return replace(
        rope,
        rounds=bool(inner.get("truncate", True)),
        low_freq_factor=inner.real("beta_slow", 1),
        high_freq_factor=inner.real("beta_fast", 32),
        gain=inner.real("attention_factor", usual),
    )


def _longrope(inner: Fields, rope: Rope, planes: int) -> Rope:
    found = []
    for name in ("short_factor", "long_factor"):
        factors = inner.get(name)
        if not isinstance(factors, list) or len(factors) != planes:
            raise inner.refuse(name, factors, (f"a number for each of {planes} planes",))
        found.append(tuple(Fields(inner.path, {name: factor}).real(name) for factor in factors))
    short, long = found
    usual = 1.0
    if rope.factor > 1 and rope.original_length > 1:
        usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    gain = inner.real("attention_factor", usual)
    return replace(rope, short=short, long=long, gain=gain)
