"""`bench.py --parts quality`: the cost of rounding, as the perplexity of a text that comes with Python and
the share of positions whose likeliest token is the same as with float arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from benchmarks.peers import LlamaCpp, obstacle
from kernels.delta_net import Places
from kernels.device import device_lock, device_stream, mx
from kv import Slab, Window
from llama import forward
from models.config import read_config
from models.delta_net import states_of
from models.load import ModelReader, read_model
from models.memory import rows_of_layers, slab_shape
from text.tokenizer import Tokenizer

SPAN = 1000  # tokens in a window; each window starts without context
CHUNK = 100


class Quality(NamedTuple):
    nll: np.ndarray  # (tokens,): negative log-likelihood given the preceding tokens
    likeliest: np.ndarray  # (tokens,): the likeliest token

    @classmethod
    def from_logits(cls, logits: np.ndarray, targets: np.ndarray) -> Quality:
        rows = np.arange(len(targets))
        logits = logits.astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        nll = np.log(np.exp(logits).sum(axis=-1)) - logits[rows, targets]
        return cls(nll, logits.argmax(axis=-1))


def ours(folder: Path, ids: np.ndarray, **how) -> Iterator[Quality]:
    """Yield the quality of each chunk with our model. `how`: arguments of `read_model`."""
    with device_lock, device_stream():
        model = read_model(folder, **how)
        shape = slab_shape(model.config, 1, SPAN + CHUNK, 128)
        for at in range(0, len(ids) - CHUNK, CHUNK):
            if at % SPAN == 0:
                slab = Slab(*shape, model.kv_dtype, rows_of_layers(model.config))
                slab.states = states_of(model, Places(slots=1, checkpoints=0, log=1))
            start = at % SPAN
            move = (0, start - 1, 0, start + CHUNK - 1) if start else (-1, 0, 0, CHUNK - 1)
            window = Window(slab, [0], [start], CHUNK, [move])
            state = forward(model, mx.array(ids[at : at + CHUNK]), [window], range(CHUNK))
            yield Quality.from_logits(np.array(model.head(state)), ids[at + 1 : at + CHUNK + 1])


def theirs(folder: Path, ids: np.ndarray) -> Iterator[Quality]:
    """Yield the quality of each chunk with llama.cpp."""
    with closing(LlamaCpp(str(folder), 1, SPAN)) as peer:
        for at in range(0, len(ids) - CHUNK, CHUNK):
            logits = peer.logits(ids[at : at + CHUNK].tolist(), at % SPAN)
            yield Quality.from_logits(logits, ids[at + 1 : at + CHUNK + 1])


def show(folder: Path, tokens: int = 4000) -> None:
    """Measure and print the table. Each row takes seconds to minutes."""
    text = Tokenizer(folder, read_config(folder, has_head=False).V)
    ids = np.array(text.encode("\n\n".join(topics[name] for name in sorted(topics))))[: tokens + 1]
    ways = {
        "`--activations 32`": ours(folder, ids, activations=32),
        "and `--kv float32`": ours(folder, ids, activations=32, kv="float32"),
    }
    with suppress(ValueError):  # the model has no weights of 8 bits or fewer
        ModelReader(folder, activations=8)
        ways["`--activations 8`"] = ours(folder, ids, activations=8)
    if not obstacle("llama.cpp"):
        ways["llama.cpp"] = theirs(folder, ids)
    print(f"{folder}: {len(ids) - 1:,} tokens of pydoc_data.topics, {SPAN:,} at a time\n")
    print("| | perplexity | likeliest token as in float |")
    print("|---|---:|---:|")
    usual = None
    for name, parts in ways.items():
        nll, likeliest = map(np.concatenate, zip(*parts, strict=True))
        usual = likeliest if usual is None else usual
        same = (likeliest == usual).mean()
        print(f"| {name} | {np.exp(nll.mean()):.3f} | {same:.1%} |", flush=True)
