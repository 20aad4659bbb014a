"""What a model folder's config.json says, in our own words, and what of it cannot be served.

The problem. Each family of models writes its config in its own way, leaves other things unsaid, and changes with each
release of transformers. A field that is read wrongly comes out as nonsense, many tokens later.

What this file keeps. A `Config` holds all that a family changes, as plain data: the forward pass knows no family's
name. What it has no place for is refused by the field's name, with what is supported.

Where next: `weights.py`, which holds the tensors against the config; `load.py`, which makes a model of both.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.checks import real, shown
from parts.fields import Fields, ModelError, read_json

# The families, and what a config.json may leave unsaid where Llama's means something else (docs/models.md).
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
    "gemma2": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gemma3_text": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0},
}
GEMMAS = ("gemma2", "gemma3_text")
NORMS = {  # by where they stand around a branch: what a layer's norms are to `forward`, and what the files call them
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attn_after": "post_attention_layernorm", "mlp_after": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    },
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEMO = Path(__file__).resolve().parent.parent / "demo" / "model"


# --- the config --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """How positions become angles (`rope_frequencies` in `ops.py`)."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    short: tuple[float, ...] = ()  # by what each plane's turn is slowed, for prompts up to the original length
    long: tuple[float, ...] = ()  # and for longer ones
    gain: float = 1.0  # what is turned becomes longer by this
    turned: int | None = None  # how many numbers of a head turn, from the first; None means all
    interleaved: bool = False  # neighbours are a plane, not number i and number i + Dh/2

    def follows(self, length: int) -> bool:
        """Do a sequence's positions turn by its own length, because it is so long?"""
        return self.type in ("dynamic", "longrope") and length > self.original_length

    def shares(self, length: int) -> int:
        """Which prompts have the same rows where they begin alike: those with the same number; with 0 none has."""
        return 1 if not self.follows(length) else 2 if self.type == "longrope" else 0

    def length(self, prompt: int, row: int) -> int:
        """The length that says how a token in this row turns.

        With longrope it is the prompt's: then a sequence has one set of factors from its first token to its last. With
        `dynamic` it grows with each new token.
        """
        return prompt if self.type == "longrope" else max(prompt, row + 1)

    def order(self, Dh: int) -> list[int]:
        """Where each number of a head comes from, so that number i and number i + Dh/2 are a plane.

        The planes that do not turn stand behind those that do. This is done to the rows of q and k while they are
        loaded. A product of q and k does not depend on the order of their numbers.
        """
        turned = Dh if self.turned is None else self.turned
        step, other = (2, 1) if self.interleaved else (1, turned // 2)
        firsts = [step * i for i in range(turned // 2)] + list(range(turned, (turned + Dh) // 2))
        seconds = [i + other for i in firsts[: turned // 2]] + list(range((turned + Dh) // 2, Dh))
        return firsts + seconds


@dataclass(frozen=True)
class Config:
    """What `config.json` says about the shape of the model, in the names of the glossary in `nanobatch.py`."""

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
    window: int | None  # how many rows attention looks back on, the token's own included; None means all
    rope: Rope
    whole: Collection[int] = ()  # the layers that look back on all rows although there is a window
    near: Rope | None = None  # of the layers that have the window, where their positions turn in a way of their own
    norms_at: str = "before"  # the branches, or "after" them, or "around"
    norms_add: bool = False  # the files hold what is added to 1
    unturned: Collection[int] = ()  # the layers in which attention knows no positions
    gelu: bool = False  # in the MLP, instead of SiLU
    cap: float | None = None  # what attention's scores come near to, and never exceed
    head_cap: float | None = None  # and the logits
    fused: bool = False  # the files hold q, k and v as one matrix, and gate and up (`Weights.split`)
    experts: int = 0  # MLPs of a layer, of which each token takes some; 0 means one MLP for all tokens
    taken: int = 1  # how many a token takes
    whole_shares: bool = False  # the shares of those that it takes add up to 1
    multipliers: dict[str, float] = field(default_factory=dict)  # of modules' outputs: folded into their weights

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, with its shape before any quantization."""
        D, q, kv = self.D, self.H * self.Dh, self.Hkv * self.Dh
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.V, D), "model.norm.weight": (D,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.V, D)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, out, width, bias in (
                ("self_attn.q_proj", q, D, self.qkv_bias),
                ("self_attn.k_proj", kv, D, self.qkv_bias),
                ("self_attn.v_proj", kv, D, self.qkv_bias),
                ("self_attn.o_proj", D, q, self.o_bias),
                *self._mlp(),
            ):
                each = (self.experts,) if "experts" in name else ()
                shapes[f"{layer}{name}.weight"] = (*each, out, width)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (out,)
            for name in self.norms.values():
                shapes[f"{layer}{name}.weight"] = (D,)
            if self.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (q if self.qk_norm == "width" else self.Dh,)
                shapes[f"{layer}self_attn.k_norm.weight"] = (kv if self.qk_norm == "width" else self.Dh,)
        return shapes

    def _mlp(self) -> list[tuple[str, int, int, bool]]:
        """The matrices of a layer's MLP, or of all its experts: (name, out, in, has a bias)."""
        place, bias = ("mlp.experts", False) if self.experts else ("mlp", self.mlp_bias)
        sizes = {
            "gate_proj": (self.hidden, self.D),
            "up_proj": (self.hidden, self.D),
            "down_proj": (self.D, self.hidden),
        }
        router = [("mlp.gate", self.experts, self.D, False)] if self.experts else []
        return router + [(f"{place}.{name}", *size, bias) for name, size in sizes.items()]

    @property
    def norms(self) -> dict[str, str]:
        """What a layer's norms are to `forward`, and what the checkpoint calls them."""
        return NORMS[self.norms_at]

    def positions(self, layer: int) -> tuple[Rope | None, int | None]:
        """How attention treats positions in a layer: how they turn, if it knows them, and how far it looks back."""
        slides = self.window is not None and layer not in self.whole
        rope = (self.near if slides else None) or self.rope
        return None if layer in self.unturned else rope, self.window if slides else None


def read_config(folder: Path, has_head: bool) -> Config:
    """The config of a folder. `has_head` (the weights hold an `lm_head`) decides about tying if the config does not."""
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise Fields(path, raw).refuse("model_type", family, FAMILIES)
    raw |= {key: usual for key, usual in FAMILIES[family].items() if raw.get(key) is None}
    get, fields = raw.get, Fields(path, raw)
    _refuse(fields, family)
    D, H = fields.number("hidden_size"), fields.number("num_attention_heads")
    Hkv = fields.number("num_key_value_heads", H)
    if H % Hkv:
        raise ModelError(f"{path}: {H} attention heads cannot share {Hkv} key-value heads evenly.")
    if get("head_dim") is None and D % H:
        raise ModelError(f"{path}: hidden_size {D} is no multiple of {H} heads, and head_dim is not given.")
    Dh = fields.number("head_dim", D // H)
    if Dh % 2 or Dh < 4:
        raise ModelError(f"{path}: head_dim = {Dh}, but rotary positions turn pairs of numbers: even, and at least 4.")
    attention_bias = bool(get("attention_bias", False))
    max_positions = fields.number("max_position_embeddings", 2048)
    tied = bool(get("tie_word_embeddings", not has_head))
    window, whole = _window(fields, family)
    own = OWN[family](fields, D, Dh, tied) if family in OWN else {}
    return Config(
        model_type=family,
        layers=fields.number("num_hidden_layers"),
        D=D,
        H=H,
        Hkv=Hkv,
        Dh=Dh,
        hidden=fields.number("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        V=fields.number("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, real, 0),
        max_positions=max_positions,
        tied=tied,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=bool(get("attention_out_bias")) if family == "seed_oss" else attention_bias and family != "qwen2",
        mlp_bias=bool(get("mlp_bias", False)),
        window=window,
        whole=whole,
        rope=_rope(fields, family, Dh, max_positions),
        **{"qk_norm": "", **own},
    )


def _refuse(fields: Fields, family: str) -> None:
    """Refuse what a field says if there is no place for it in a `Config`."""
    get = fields.values.get
    act, known = ("hidden_activation", ["gelu_pytorch_tanh"]) if family in GEMMAS else ("hidden_act", ["silu", "swish"])
    if get(act, known[0]) not in known:
        raise fields.refuse(act, get(act), known[:1])
    flags = {"smollm3": ["use_sliding_window"], "qwen3_moe": ["use_sliding_window", "mlp_only_layers"]}
    for flag in ("use_bidirectional_attention", *flags.get(family, ())):
        if get(flag):
            raise fields.refuse(flag, get(flag), ("false, or nothing",))
    for key in ("quantization", "quantization_config"):
        if not isinstance(get(key) or {}, dict):
            raise fields.refuse(key, get(key), ("an object, as MLX writes it",))
    method = (get("quantization_config") or {}).get("quant_method")
    if method is not None and not get("quantization"):
        raise fields.refuse("quant_method", method, ("MLX affine quantization", "float16", "bfloat16", "float32"))
    mode = (get("quantization") or {}).get("mode", "affine")
    if mode != "affine":
        raise fields.refuse("quantization mode", mode, ("affine",))


def _gemma(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Gemma multiplies the embedding by sqrt(D), and divides q k^T by the root of a number that it names.

    Its third release has a norm between q_proj and q k^T, so there the norm takes the factor. The second has caps if
    its config does not say, and none where it says null.
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
    return {"multipliers": scaled, "norms_at": "around", "norms_add": True, "gelu": True, **caps, **third}


def _granite(fields: Fields, D: int, Dh: int, tied: bool) -> dict[str, Any]:
    """Granite's four multipliers, each as a factor of the weights that it can be folded into.

    Attention multiplies q k^T by `attention_multiplier` instead of 1 / sqrt(Dh), so q takes the quotient of the two. A
    tied head is the embedding, multiplied with it: so the last norm, which nothing but the head reads, divides.
    """
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (fields.number(name, 1.0, real, 1e-6) for name in names)
    branches = dict.fromkeys(("o_proj", "down_proj"), residual)
    last = 1 / (logits * embedding) if tied else 1 / logits
    return {"multipliers": {"embed_tokens": embedding, "q_proj": attention * Dh**0.5, **branches, "norm": last}}


def _experts(fields: Fields, *_) -> dict[str, Any]:
    """Qwen3's mixture of experts; transformers' fifth release writes their number under another name."""
    if fields.number("decoder_sparse_step", 1) != 1:
        raise fields.refuse("decoder_sparse_step", fields.values["decoder_sparse_step"], ("1, experts in all layers",))
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    experts, taken = fields.number(name, 128), fields.number("num_experts_per_tok", 8)
    if taken > experts:
        raise fields.refuse("num_experts_per_tok", taken, (f"1 to {experts}, as many as there are",))
    whole = bool(fields.values.get("norm_topk_prob"))
    return {"qk_norm": "head", "experts": experts, "taken": taken, "whole_shares": whole}


def _unturned(fields: Fields) -> Collection[int]:
    """SmolLM3 names the layers that have positions, by a 1 or a 0 for each, or says that every nth has none."""
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


def _window(fields: Fields, family: str) -> tuple[int | None, Collection[int]]:
    """The length of the sliding window, if any layer has one, and the layers that have none."""
    raw, layers = fields.values, fields.number("num_hidden_layers")
    kinds, whole = raw.get("layer_types"), ()
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or len(kinds) < layers or not set(map(str, kinds)) <= known:
            raise fields.refuse("layer_types", kinds, (f"for each of {layers} layers {' or '.join(sorted(known))}",))
        whole = frozenset(i for i in range(layers) if kinds[i] == "full_attention")
    elif family in GEMMAS:  # every second layer, or every sixth, has none
        every = 2 if family == "gemma2" else fields.number("sliding_window_pattern", 6)
        whole = range(every - 1, layers, every)
    elif family in ("qwen2", "qwen3"):  # the first have none
        whole = range(
            min(layers, fields.number("max_window_layers", 28, least=0) if raw.get("use_sliding_window") else layers)
        )
    elif family != "mistral" and not (family == "phi3" and raw.get("sliding_window") is not None):
        return None, ()
    if len(whole) == layers or raw.get("sliding_window", 4096) is None:
        return None, ()
    return fields.number("sliding_window", 4096), whole


def _near(fields: Fields) -> float:
    """The theta of Gemma 3's layers that have a window. Since transformers' fifth release it stands with the rope's."""
    nested = fields.values.get("rope_parameters")
    nested = nested.get("sliding_attention") if isinstance(nested, dict) else None
    usual = fields.number("rope_local_base_freq", 1e4, real, 1)
    return Fields(fields.path, nested if isinstance(nested, dict) else {}).number("rope_theta", usual, real, 1)


def _rope(fields: Fields, family: str, Dh: int, max_positions: int) -> Rope:
    """There are three spellings: `rope_scaling` with `type` or with `rope_type`, and `rope_parameters` with all."""
    raw = fields.values
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if family == "gemma3_text" and isinstance(scaling, dict) and isinstance(scaling.get("full_attention"), dict):
        scaling = scaling["full_attention"]
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(f"{fields.path}: rope scaling is {shown(scaling)} where one flat object belongs.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):  # what its first configs call it
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise fields.refuse("rope type", kind, ROPE_TYPES)
    inner = Fields(fields.path, scaling)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0, real, 1), real, 1)
    part = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0, real, 0), real, 0)
    turned = int(Dh * part)
    if part != 1 and (family != "phi3" or turned % 2 or not 4 <= turned <= Dh):
        ways = "1" if family != "phi3" else f"1, or what turns an even number, at least 4, of {Dh}"
        raise fields.refuse("partial_rotary_factor", part, (ways,))
    common = {"turned": turned if turned < Dh else None, "interleaved": bool(raw.get("rope_traditional"))}
    if kind == "default":
        return Rope(kind, theta, **common)
    name, usual = "original_max_position_embeddings", 8192 if kind == "llama3" else max_positions
    common["original_length"] = (fields if raw.get(name) is not None else inner).number(name, usual)
    if kind == "longrope":
        return _longrope(inner, theta, turned // 2, max_positions, common)
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = max_positions / common["original_length"]
    factor = inner.number("factor", check=real, least=1e-6)
    if kind == "llama3":
        low, high = (inner.number(f"{end}_freq_factor", usual, real, 1e-6) for end, usual in (("low", 1), ("high", 4)))
        return Rope(kind, theta, factor, low, high, **common)
    if kind == "yarn":
        return _yarn(inner, theta, factor, common)
    return Rope(kind, theta, factor, **common | {"original_length": max_positions})


def _yarn(inner: Fields, theta: float, factor: float, common: dict) -> Rope:
    """Where its gain is not given, it grows with the logarithm of the factor, or is the quotient of two such."""
    if not inner.values.get("truncate", True):
        raise inner.refuse("truncate", False, ("true",))
    if theta == 1:
        raise inner.refuse("rope_theta", theta, ("with yarn, more than 1",))
    slow, fast = (inner.number(f"beta_{end}", usual, real, 1e-6) for end, usual in (("slow", 1), ("fast", 32)))
    scales = [inner.number(name, 0.0, real, 0) for name in ("mscale", "mscale_all_dim")]
    over, under = (1 + 0.1 * scale * math.log(max(factor, 1)) for scale in (scales if all(scales) else (1, 0)))
    return Rope("yarn", theta, factor, slow, fast, gain=_gain(inner, over / under), **common)


def _longrope(inner: Fields, theta: float, planes: int, max_positions: int, common: dict) -> Rope:
    short, long = (inner.values.get(f"{name}_factor") for name in ("short", "long"))
    for name, factors in (("short", short), ("long", long)):
        if not isinstance(factors, list) or len(factors) != planes:
            raise inner.refuse(f"{name}_factor", factors, (f"a number for each of {planes} planes",))
        for factor in factors:
            Fields(inner.path, {f"{name}_factor": factor}).number(f"{name}_factor", check=real, least=1e-6)
    original = common["original_length"]
    factor = inner.number("factor", max_positions / original, real, 1e-6)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return Rope("longrope", theta, factor, short=(*short,), long=(*long,), gain=_gain(inner, usual), **common)


def _gain(inner: Fields, usual: float) -> float:
    return inner.number("attention_factor", usual, real, 1e-6)
