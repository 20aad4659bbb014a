"""Reads a model folder as Hugging Face and mlx-lm publish it, and refuses what is broken before it can do harm.

The problem. MLX loads lazily and checks little. A truncated download, a matrix of zeros or a NaN goes through in
silence and comes out as nonsense, many tokens later. A serving engine must notice it while it loads.

What this file keeps. A tensor leaves `Weights.take` only if the config implies it, its file has it in the shape that
the config implies, and its numbers are finite and not all zero. Everything else raises `ModelError`, one line with the
file, what is wrong with it, and what to do.

Where next: `load.py` turns `Config` and `Weights` into a `Model`, layer by layer, so that a checkpoint and its
converted copy are never in memory together.
"""

import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from parts.checks import one_line, real, shown
from parts.device import mx
from parts.fields import LONGEST, Fields, ModelError, check_plain, read_json, what_is

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
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # as phi3 stores them
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
CAPS = [[("attn", usual[0]), ("final", usual[1])] for usual in ((None, None), (50.0, 30.0))]  # of Gemma 3 and 2
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "U32": mx.uint32}
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
    hidden: int  # width inside the MLP
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
                ("mlp.gate_proj", self.hidden, D, self.mlp_bias),
                ("mlp.up_proj", self.hidden, D, self.mlp_bias),
                ("mlp.down_proj", D, self.hidden, self.mlp_bias),
            ):
                shapes[f"{layer}{name}.weight"] = (out, width)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (out,)
            for name in self.norms.values():
                shapes[f"{layer}{name}.weight"] = (D,)
            if self.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (q if self.qk_norm == "width" else self.Dh,)
                shapes[f"{layer}self_attn.k_norm.weight"] = (kv if self.qk_norm == "width" else self.Dh,)
        return shapes

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
    is_gemma = family in GEMMAS
    act, known = ("hidden_activation", ["gelu_pytorch_tanh"]) if is_gemma else ("hidden_act", ["silu", "swish"])
    if get(act, known[0]) not in known:
        raise fields.refuse(act, get(act), known[:1])
    for flag in ("use_bidirectional_attention", *("use_sliding_window",) * (family == "smollm3")):
        if get(flag):
            raise fields.refuse(flag, get(flag), ("false",))
    for key in ("quantization", "quantization_config"):
        if not isinstance(get(key) or {}, dict):
            raise fields.refuse(key, get(key), ("an object, as MLX writes it",))
    method = (get("quantization_config") or {}).get("quant_method")
    if method is not None and not get("quantization"):
        raise fields.refuse("quant_method", method, ("MLX affine quantization", "float16", "bfloat16", "float32"))
    mode = (get("quantization") or {}).get("mode", "affine")
    if mode != "affine":
        raise fields.refuse("quantization mode", mode, ("affine",))

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
    caps = [_cap(fields, f"{part}_logit_softcapping", usual, is_gemma) for part, usual in CAPS[family == "gemma2"]]
    return Config(
        model_type=family,
        layers=fields.number("num_hidden_layers"),
        D=D,
        H=H,
        Hkv=Hkv,
        Dh=Dh,
        hidden=fields.number("intermediate_size"),
        V=fields.number("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, real, 0),
        max_positions=max_positions,
        tied=tied,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=bool(get("attention_out_bias")) if family == "seed_oss" else attention_bias and family != "qwen2",
        mlp_bias=bool(get("mlp_bias", False)),
        qk_norm={"qwen3": "head", "gemma3_text": "head", "olmo2": "width"}.get(family, ""),
        window=window,
        whole=whole,
        rope=_rope(fields, family, Dh, max_positions),
        near=Rope("default", _near(fields)) if family == "gemma3_text" else None,
        norms_at={"olmo2": "after", **dict.fromkeys(GEMMAS, "around")}.get(family, "before"),
        norms_add=is_gemma,
        unturned=_unturned(fields) if family == "smollm3" else (),
        gelu=is_gemma,
        cap=caps[0],
        head_cap=caps[1],
        fused=family == "phi3",
        multipliers=_multipliers(fields, family, D, Dh, tied),
    )


def _unturned(fields: Fields) -> Collection[int]:
    """SmolLM3 names the layers that have positions, by a 1 or a 0 for each, or says that every nth has none."""
    layers, has = fields.number("num_hidden_layers"), fields.values.get("no_rope_layers")
    interval = fields.number("no_rope_layer_interval", 4)
    if has is None:
        return range(interval - 1, layers, interval)
    if not isinstance(has, list) or len(has) < layers or not all(value in (0, 1) for value in has):
        raise fields.refuse("no_rope_layers", has, (f"a 1 or a 0 for each of {layers} layers",))
    return frozenset(i for i in range(layers) if not has[i])


def _multipliers(fields: Fields, family: str, D: int, Dh: int, tied: bool) -> dict[str, float]:
    """What modules' outputs are multiplied by, each as a factor of the weights that it can be folded into.

    Granite multiplies q k^T by `attention_multiplier` instead of 1 / sqrt(Dh), so q takes the quotient of the two. A
    tied head is the embedding, multiplied with it: so the last norm, which nothing but the head reads, divides. Gemma
    multiplies the embedding by sqrt(D), and divides q k^T by the root of another number. Its third release has a norm
    between q_proj and q k^T, so there the norm takes the factor.
    """
    if family in GEMMAS:
        attention = fields.number("query_pre_attn_scalar", 256, real, 1e-6) ** -0.5
        module = "q_norm" if family == "gemma3_text" else "q_proj"
        return {"embed_tokens": D**0.5, module: attention * Dh**0.5, "norm": D**-0.5 if tied else 1}
    if family != "granite":
        return {}
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (fields.number(name, 1.0, real, 1e-6) for name in names)
    branches = dict.fromkeys(("o_proj", "down_proj"), residual)
    last = 1 / (logits * embedding) if tied else 1 / logits
    return {"embed_tokens": embedding, "q_proj": attention * Dh**0.5, **branches, "norm": last}


def _cap(fields: Fields, name: str, usual: float | None, is_gemma: bool) -> float | None:
    """Gemma 2 has caps if its config does not say, and none where it says null."""
    if not is_gemma or fields.values.get(name, usual) is None:
        return None
    return fields.number(name, usual, real, 1e-6)


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


# --- the files ---------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, dict]:
    """The table of contents of a safetensors file, checked against the size of the file.

    A safetensors file begins with the length N of a JSON text, in 8 bytes. After the JSON comes the data it points to:

        | N (u64) | {"model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}} | 32 bytes |
    """
    try:
        check_plain(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if what := what_is(start):
                raise ModelError(f"{path} is {what}; download it again.")
            if not 2 <= length <= min(size - 8, LONGEST):
                raise ModelError(f"{path} is not a safetensors file, or it is cut off; download it again.")
            file.seek(8)
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in entries.items():
                begin, stop = entry["data_offsets"]
                if (kind := DTYPES.get(entry["dtype"])) and stop - begin != math.prod(entry["shape"]) * kind.size:
                    raise ValueError(f"{name}: {stop - begin} bytes for the shape {entry['shape']}")
            end = 0
            for begin, stop in sorted(entry["data_offsets"] for entry in entries.values()):
                if begin != end or stop < begin:
                    raise ValueError(f"data at {begin}, where {end} is next")
                end = stop
            end += 8 + length
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} has a broken header ({one_line(error)}); download it again.") from None
    if size != end:
        what = "cut off" if size < end else "longer than its header says"
        raise ModelError(f"{path} is {what}: {size:,} bytes, expected {end:,}; download it again.")
    return entries


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read. Each comes with the tensors that the index promises in it, None if there is no index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: dict[Path, set[str] | None] = {}
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{index} has no weight_map; download it again.")
        for tensor, file in places.items():
            if not isinstance(file, str) or Path(file).name != file or len(file) > 200:
                raise ModelError(f"{index}: {tensor} is said to be in {shown(file)}; download it again.")
            files.setdefault(folder / file, set()).add(tensor)
        for file in files:
            if not file.exists():
                raise ModelError(f"{file} is missing, but {index.name} names it; download the model again.")
        return files
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ModelError(f"{folder} holds no model*.safetensors; only safetensors weights are supported.")
    return dict.fromkeys(found)


class Weights:
    """The tensors of a checkpoint. All names and shapes are checked together, the numbers of each when it is taken."""

    def __init__(self, folder: Path):
        self.entries: dict[str, dict] = {}
        self.files: dict[str, Path] = {}
        for path, promised in _weight_files(folder).items():
            entries = read_header(path)
            if promised is not None and (gone := promised - entries.keys()):
                raise ModelError(f"{path} lacks {min(gone)}, which the index names: one is stale; download both again.")
            for name, entry in entries.items():
                if entry.get("dtype") not in DTYPES:
                    raise ModelError(f"{path}: {name} is {shown(entry.get('dtype'))}. Supported: {', '.join(DTYPES)}.")
                self.entries[name], self.files[name] = entry, path
        if not self.entries:
            raise ModelError(f"{folder}: its weight files hold no tensors; download the model again.")
        self._lazy: dict[Path, dict[str, mx.array]] = {}
        self._may_be_zero = (".bias", ".biases")
        self._cuts: dict[str, tuple[str, range]] = {}  # of a part: the tensor that holds it, and its rows there

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self.entries

    def nbytes(self, config: Config, own: Config, float32: bool, has_head: bool) -> int:
        """The memory that the model will take, as float32 or as the files have it. `own` is a rank's share of it."""
        shapes = own.tensors()
        if not has_head:
            shapes.pop("lm_head.weight", None)
        if float32:
            return sum(4 * math.prod(shape) for shape in shapes.values())
        parts = {name: math.prod(shapes.get(name, (0,))) / math.prod(full) for name, full in config.tensors().items()}
        sizes = {name: math.prod(entry["shape"]) * DTYPES[entry["dtype"]].size for name, entry in self.entries.items()}
        return round(sum(n * parts.get(f"{name.rpartition('.')[0]}.weight", 1) for name, n in sizes.items()))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def split(self, config: Config) -> None:
        """Let what is stored as one tensor appear as its parts, under the names that other families give them."""
        shapes = config.tensors()
        for name in list(self.entries):
            module, _, kind = name.rpartition(".")
            place, _, fused = module.rpartition(".")
            heights = {part: shapes.get(f"{place}.{part}.weight", (0,))[0] for part in FUSED.get(fused, ())}
            entry, path, start = self.entries[name], self.files[name], 0
            if not heights or not all(heights.values()):
                continue  # whole as it is, or `check_against` finds no place for it
            if entry["shape"][:1] != [sum(heights.values())]:
                raise ModelError(
                    f"{path}: {name} has the shape {self.shape(name)}, but config.json implies "
                    f"{sum(heights.values())} rows; the two do not belong together; download both again."
                )
            for part, height in heights.items():
                own = f"{place}.{part}.{kind}"
                self.entries[own], self.files[own] = entry | {"shape": [height, *entry["shape"][1:]]}, path
                self._cuts[own] = name, range(start, start := start + height)
            del self.entries[name]

    def check_against(self, config: Config) -> None:
        """Refuse weights unless they hold every tensor that the config implies, in its shape, and no other."""
        folder = next(iter(self.files.values())).parent
        self._may_be_zero += ("norm.weight",) * config.norms_add
        if config.fused:
            self.split(config)
        last = f"model.layers.{config.layers - 1}.post_attention_layernorm.weight"
        if last not in self.entries:  # asked first, so that refusing a config with a million layers is quick
            raise ModelError(f"{folder} lacks the tensor {last}; download it again.")
        expected = config.tensors()
        for name, shape in expected.items():
            if name not in self.entries:
                raise ModelError(f"{folder} lacks the tensor {self._stored(name, config)}; download it again.")
            module = name.removesuffix(".weight")
            if f"{module}.scales" in self.entries:
                self._check_quantized(module, shape)
            elif self.shape(name) != shape:
                raise ModelError(
                    f"{self.files[name]}: {name} has the shape {self.shape(name)}, but config.json implies {shape}; "
                    "the two do not belong together; download both again."
                )
            elif self.entries[name]["dtype"] == "U32":
                raise ModelError(f"{self.files[name]}: {name} is packed, but lacks {module}.scales; download it again.")
        for name in self.entries.keys() - expected.keys():
            module, _, part = name.rpartition(".")
            if part in ("scales", "biases") and f"{module}.weight" in expected:
                continue
            if part == "inv_freq" or (config.tied and module == "lm_head"):
                continue  # old checkpoints have rope tables, and tied ones may hold the head twice
            raise ModelError(
                f"{self.files[name]}: {name} has no place in a {config.model_type} model of this config.json; "
                "use the one that came with it."
            )

    def _stored(self, name: str, config: Config) -> str:
        """What a family's files call the tensor that holds this one."""
        whole = {part: fused for fused, parts in FUSED.items() for part in parts} if config.fused else {}
        *place, module, kind = name.split(".")
        return ".".join([*place, whole.get(module, module), kind])

    def _check_quantized(self, module: str, shape: tuple[int, ...]) -> None:
        names = [f"{module}.{part}" for part in ("weight", "scales", "biases")]
        for name in names:
            if name not in self.entries:
                raise ModelError(f"{self.files[f'{module}.scales']}: {module} is quantized, but {name} is missing.")
        packed, scales, biases = (self.shape(name) for name in names)
        if len(shape) == len(packed) == len(scales) == 2 and scales[1] and shape[1] % scales[1] == 0:
            bits, group = quantization(packed, scales, shape[1])
            fits = packed == (shape[0], shape[1] * bits // 32) and scales == biases == (shape[0], shape[1] // group)
            if fits and bits in QUANTIZED_BITS:
                return
        raise ModelError(
            f"{self.files[names[0]]}: {module} has shapes {packed}, {scales}, {biases}, which no MLX quantization of "
            f"{shape} has. Supported bits: {', '.join(map(str, QUANTIZED_BITS))}."
        )

    def take(self, name: str) -> mx.array:
        """One tensor, read and checked now. It can be taken once: from here on the caller owns its memory."""
        path = self.files[name]
        if path not in self._lazy:
            try:
                self._lazy[path] = mx.load(str(path))
            except (RuntimeError, MemoryError) as error:
                raise ModelError(f"{path} cannot be read ({one_line(error)}); download it again.") from None
        name, rows = self._cuts.get(name, (name, None))
        array = self._lazy[path][name] if rows else self._lazy[path].pop(name)
        if rows:
            if rows.stop == len(array):  # its parts are taken in order, and this is the last
                del self._lazy[path][name]
            array = array[rows.start : rows.stop]
        # One pass is enough, because the largest magnitude is NaN or inf if any number is, and 0 if all of them are.
        # (Packed integers, biases and quantization offsets may well be all zero.)
        if array.dtype != mx.uint32:
            peak = mx.abs(array).max().item()
            if not math.isfinite(peak):
                raise ModelError(f"{path}: {name} holds NaN or infinity; download it again.")
            if peak == 0 and not name.endswith(self._may_be_zero):
                raise ModelError(f"{path}: {name} is all zeros; download it again.")
        return array


def quantization(packed: tuple[int, ...], scales: tuple[int, ...], width: int) -> tuple[int, int]:
    """(bits, group size) of a quantized matrix `width` numbers wide, from its shapes, whatever a config claims.

    `width` numbers of `bits` bits are packed into 32-bit words, and every `group` of them shares one scale. So a width
    of 128 in 16 words with 2 scales means 4 bits in groups of 64. Layers may differ, without further care.
    """
    return packed[1] * 32 // width, width // scales[1]
