"""Random checkpoints on disk in the formats of Hugging Face and mlx-lm, and mlx-lm's answers to them.

Random weights are a sharper test than trained ones, if they are scaled with care. Logits must be
*decided*: the best token ahead of the second by much more than rounding. And the answer must not
be *stuck*: in a tied checkpoint whose embedding outweighs its blocks, each token predicts itself
forever, and every engine passes. So the blocks here write more into the residual stream than the
embedding does, and the tests count distinct tokens.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kernels.device import mx
from models.config import Config, read_config
from models.weights import FUSED, GRANITE_NAMES, LFM2_NAMES

V = 272  # 256 bytes, four special tokens, and some unused ids
BOS, EOS = 256, 257
ORIGINAL = "original_max_position_embeddings"


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, so that any text round-trips. Most characters beyond
    ASCII take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<s>", "</s>", "<|user|>", "<|end|>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def make_config(**changes) -> dict:
    """Return the config.json of a small Llama. Changing a field to None removes it."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": V,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def random_weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.tensors().items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            weights[name] = (not config.norms_add or "linear_attn" in name) + 0.2 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.3 * noise
        elif name.endswith("sinks"):
            weights[name] = 2 * noise
        elif name.endswith("layer_scalar"):
            weights[name] = 1 + 0.2 * noise
        elif "embed_tokens.weight" in name:
            weights[name] = (0.02 if config.gelu else 0.35) * noise  # Gemma scales embeddings up
        elif name.endswith("conv.conv.weight"):
            weights[name] = 0.6 * noise
        else:
            gain = {"o_proj": 3.0, "out_proj": 3.0, "down_proj": 4.0, "lm_head": 3.0}.get(
                name.split(".")[-2], 1.3
            )
            weights[name] = gain / np.sqrt(shape[-1]) * noise
    return weights


def save(folder: Path, config: dict, weights: dict[str, mx.array], shards: int = 1) -> Path:
    """Write a checkpoint folder: config, tokenizer, and weights in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder
    names, index = sorted(weights), {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[n::shards]}
        mx.save_safetensors(str(folder / file), part)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def fuse(arrays: dict[str, mx.array], fused: dict[str, tuple]) -> dict[str, mx.array]:
    """Concatenate queries, keys and values, or gate and up, into one matrix, as Phi-3 and Granite store
    them."""
    whole, places = {}, {part: name for name, parts in fused.items() for part in parts}
    for name, array in arrays.items():
        *place, module, kind = name.split(".")
        name = ".".join([*place, places.get(module, module), kind])
        whole[name] = mx.concatenate([whole[name], array]) if name in whole else array
    return whole


def qwen3_5(arrays: dict[str, mx.array], is_converted: bool) -> dict[str, mx.array]:
    """Convert names and shapes to those of Hugging Face or of mlx-lm, which adds 1 to the weights of norms."""
    named = {}
    for name, array in arrays.items():
        if name.endswith("conv1d.weight") and not is_converted:
            array = array.swapaxes(1, 2)
        if is_converted and name.endswith("norm.weight") and "linear_attn" not in name:
            array = 1 + array
        if not is_converted and ".experts." in name:  # stacked, with gate and up in one tensor
            name = name.removesuffix(".weight")
            if name.endswith("up_proj"):
                continue
            if name.endswith("gate_proj"):
                up = arrays[name.replace("gate_proj", "up_proj.weight")]
                name, array = name.replace("gate", "gate_up"), mx.concatenate([array, up], axis=1)
        whole = "language_model.model." if is_converted else "model.language_model."
        named[name.replace("model.", whole, 1)] = array
    more = "language_model.mtp.fc.weight" if is_converted else "mtp.fc.weight"
    return named | {more: mx.ones(32), "model.visual.patch.weight": mx.ones(32)}


def apart(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Split the stacks of experts into a matrix for each expert."""
    whole = {}
    for name, array in arrays.items():
        place, is_stack, rest = name.partition(".experts.")
        each = (
            {f"{place}.experts.{n}.{rest}": part for n, part in enumerate(array)}
            if is_stack
            else {name: array}
        )
        whole |= each
    return whole


def as_blocks(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Interleave the rows of gate and up, and pack blocks of 32 numbers into 16 bytes."""
    found = {}
    for name, array in arrays.items():
        place, is_expert, rest = name.partition(".experts.")
        module, _, kind = rest.partition(".")
        if not is_expert or module == "up_proj":
            found |= {} if is_expert else {name: array}
            continue
        if module == "gate_proj":
            module = "gate_up_proj"
            both = [array, arrays[name.replace("gate_proj", "up_proj")]]
            array = mx.stack(both, axis=2).flatten(1, 2)
        if kind == "weight":
            array = mx.contiguous(array).view(mx.uint8)
            array = array.reshape(*array.shape[:-1], -1, 16)
        ending = {"weight": "blocks", "scales": "scales", "bias": "bias"}[kind]
        found[f"{place}.experts.{module}_{ending}"] = array
    return found


def make_checkpoint(
    folder: Path,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    quantize=None,
    shards: int = 1,
    experts_apart=False,
    blocks=False,
    **changes,
) -> Path:
    """Write a random checkpoint. `quantize(module)` returns (bits, group) for the modules to quantize, otherwise
    None; bits may be "mxfp4".

    `blocks`: experts in MXFP4 as in gpt-oss's own files.
    A layer's experts are one stack, as mlx-lm writes them, or with `experts_apart` separate tensors.
    """
    config = make_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    read = read_config(folder, True)
    arrays = {n: mx.array(w) for n, w in random_weights(read, seed).items()}
    if config["model_type"] == "lfm2":
        for theirs, ours in LFM2_NAMES.items():
            arrays = {
                name.replace(f".{ours}.", f".{theirs}."): array for name, array in arrays.items()
            }
    if config["model_type"] == "granitemoehybrid" and not quantize:  # mlx-lm converts the names
        arrays = fuse(arrays, {name: parts for name, parts in FUSED.items() if "gate" in name})
        for theirs, ours in GRANITE_NAMES.items():
            arrays = {name.replace(ours, theirs): array for name, array in arrays.items()}
    if config["model_type"].startswith("qwen3_5"):
        arrays = qwen3_5(arrays, is_converted=bool(quantize))
    elif read.fused and config["model_type"] == "phi3":
        arrays = fuse(arrays, FUSED)
    if config["model_type"] == "gpt_oss":
        arrays = {n.replace("mlp.gate.", "mlp.router."): a for n, a in arrays.items()}
    elif read.experts and (quantize or not read.delta):
        arrays = (
            apart(arrays)
            if experts_apart
            else {n.replace(".experts.", ".switch_mlp."): a for n, a in arrays.items()}
        )
    packed = {}
    for name, array in arrays.items():
        module = name.removesuffix(".weight")
        is_matrix = array.ndim > 1 and not name.endswith(".bias")
        settings = quantize(module) if quantize and is_matrix else None
        if settings is None:
            packed[name] = array.astype(dtype)
            continue
        bits, group = settings
        if bits == "mxfp4":
            parts = mx.quantize(array, group_size=group, bits=4, mode="mxfp4")
            packed |= dict(zip((name, f"{module}.scales"), parts, strict=True))
            config.setdefault("quantization", {"group_size": 32, "bits": 4, "mode": "mxfp4"})
            continue
        parts = mx.quantize(array.astype(dtype), group_size=group, bits=bits)
        packed |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=True))
        config.setdefault("quantization", {"bits": bits, "group_size": group})[module] = {
            "bits": bits,
            "group_size": group,
        }
    if blocks:
        packed = as_blocks(packed)
        config.pop("quantization")
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return save(folder, config, packed, shards)


class Reference:
    """mlx-lm on the same folder, in float32: the reference for our answers."""

    def __init__(self, folder: Path, config: dict | None = None):
        """`config` overrides fields of config.json, for example where mlx-lm uses different names."""
        import mlx_lm.utils  # imported here, because it takes a second

        self.model, _ = mlx_lm.utils.load_model(folder, model_config=config)
        self.model.set_dtype(mx.float32)
        # mlx-lm always uses longrope's long factors. We use the short ones where slots are no longer than
        # the original length, so for such slots the reference gets them in place of the long ones.
        given = json.loads((folder / "config.json").read_text()) | (config or {})
        scaling, self.short, self.bound = (
            given.get("rope_scaling") or {},
            None,
            given.get(ORIGINAL, 0),
        )
        if "short_factor" in scaling and scaling["short_factor"] != scaling["long_factor"]:
            short = scaling | {"long_factor": scaling["short_factor"]}
            self.short = Reference(folder, (config or {}) | {"rope_scaling": short})

    def of(self, length: int) -> "Reference":
        """Return the reference for sequences of up to this length."""
        return self.short if self.short and length <= self.bound else self

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each prefix, (len(tokens), V), from a single pass."""
        return np.array(self.model(mx.array([tokens]))[0])

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
        """Return the greedy continuation, and the margin by which each token won."""
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.model)
        ids, tokens, margins = list(prompt), [], []
        while len(tokens) < count:
            logits = np.array(self.model(mx.array([ids]), cache=cache)[0, -1])
            second, best = np.partition(logits, -2)[-2:]
            tokens.append(int(logits.argmax()))
            margins.append(float(best - second))
            ids = tokens[-1:]
        return tokens, margins
