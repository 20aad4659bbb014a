"""The plan of a benchmark: its parts, the rows and columns of its tables, and models with random weights.

All rows of all tables are planned before the first sample is taken, and all columns of a row measure the
same `Spec`.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from base.installation import IS_INSTALLED, ROOT
from base.validation import shown
from benchmarks.dictated_model import LENGTH
from benchmarks.peers import PEERS, environment_of
from kernels.device import mx
from models.config import read_config

PARTS = {  # part -> caption of its table
    "decode": "all rows decode, and nothing else happens",
    "closed": "users who send a prompt when the last one's answer has ended",
    "open": "prompts arrive at random; load 1 is the capacity of static batching, at load inf all come at once",
    "steps": "a decode step of nanobatch, and the time that the machine needs for it at best",
    "long": "a long prompt arrives while seven rows decode",
    "chat": "a chat's fifth turn, and a chunk of as many new tokens at the same row",
    "speculate": "dictated answers without draft tokens and with them: renamed code, pages, pages repeated",
    "same": "tokens of the peer that equal ours, up to the first difference of each answer",
}
# The policies that `open` compares. The others differ from them only with several clients or very
# different prompt lengths.
OF_ONE_CLIENT = ("continuous", "static", "serial")
# Parts that a peer can run, because they need only requests and tokens
PARTS_OF_A_PEER = "decode", "closed", "open", "long", "same"
# `speculate`: the dictated text and the number of rows
DICTATED = [("rewrite", 1), ("rewrite", 4), ("repeat", 1)]
DICTATED += [("fresh", n) for n in (1, 4, 8, 16)]
DICTATED += [("schema", 1), ("rewrite fresh", 4)]
# Parts that can be measured in processor time, because they never sleep
OF_ANY_CLOCK = "decode", "closed"
ROWS = 8  # number of rows in parts that do not vary it
CROWD = 40  # `open`: number of requests
LONGEST = 256  # `open`: maximum number of tokens in an answer; the minimum is 16
# `open`: fractions of static batching's capacity, which load inf measures first
LOADS = math.inf, 0.4, 0.6, 0.8, 1.0, 1.2
TURNS = 5  # `chat`: number of turns
CHAT = {"rows": 1, "prompt": 64, "output": 33, "length": TURNS * (64 + 33)}


class Spec(NamedTuple):
    """The settings of one sample, sent to the sample's process as JSON."""

    part: str  # a method of `Sample`
    contestant: str  # the column's engine
    folder: str
    vocabulary: int
    rows: int
    prompt: int
    output: int
    rate: float = math.inf  # open: requests per second (in a plan, the load)
    late: int = 0  # long: length of the late prompt
    length: int = 0  # length of a slot; 0: enough for the longest prompt with its answer
    # speculate: the dictated text, or "schema"; two words are for the first row and for the others
    text: str = ""
    dtype: str = "auto"
    activations: str | int = "auto"  # as for `--activations`
    speculate: str = "0"  # as for `--speculate`
    clock: str = "wall"  # as for `--clock`
    kv: str = "auto"  # as for `--kv`
    attention: str = "auto"  # as for `--attention`

    @property
    def overlap(self) -> int:
        """The number of additional tokens per answer that lets all answers run at the same time.

        Our answers start one after another, because each step prefills only a part of the prompts. Late
        in a long prompt a chunk may have only 16 tokens.
        """
        if self.part in ("closed", "open"):
            return 0
        narrow = 64 if self.prompt <= 512 else 16
        return self.rows * math.ceil(self.prompt / narrow)


def crowd_lengths(longest: int) -> list[int]:
    """Return the answers' lengths in an open loop, the same for all contestants."""
    draw = random.Random(2)
    return [draw.randint(max(1, longest // 16), longest) for _ in range(CROWD)]


@dataclass(frozen=True)
class Contestant:
    """A column of the tables: an engine and the environment in which it is measured."""

    name: str
    engine: str  # `Spec.contestant`: a peer, or "nanobatch" and a policy
    # Environment variables added for the column's processes
    environment: Mapping[str, str] = field(default_factory=dict)
    # Another checkout whose bench.py takes the samples; None for this one
    checkout: Path | None = None
    dtype: str = "auto"
    activations: str | int = "auto"  # as for `--activations`
    speculate: str = "0"  # as for `--speculate`


FLOAT = "float"  # this checkout with 32-bit activations
WIDENED = "widened"  # this checkout with all weights converted to float32 when they are loaded


def our_column(policy: str, speculate: str = "0") -> Contestant:
    """Return the column of this checkout, with the BLAS of the user's environment. Draft tokens are off
    unless `--speculate` turns them on, because the peers use none."""
    name = f"nanobatch {policy}"
    return Contestant(
        name if speculate == "0" else f"{name}, speculate {speculate}", name, speculate=speculate
    )


def read_rivals(names: str, policy: str) -> list[Contestant]:
    """Parse `--vs`. Return its columns."""
    each = dict.fromkeys(names.split(",")) if names else ()
    return [read_rival(name, policy) for name in each]


def read_rival(name: str, policy: str) -> Contestant:
    """Parse a name in `--vs`: "float", "widened", a peer, or the folder of another checkout or of modules
    that replace ours. A peer or folder may be followed by @ and a value of NANOBATCH_BLAS."""
    ours = f"nanobatch {policy}"
    if name == WIDENED:
        return Contestant(name, ours, dtype="float32")
    if name == FLOAT:
        return Contestant(name, ours, activations=32)
    rival, _, blas = name.partition("@")
    if blas and rival == "llama.cpp":
        raise ValueError(f"--vs: llama.cpp has its own matrix product; leave out @{shown(blas)}")
    environment = {"NANOBATCH_BLAS": blas} if blas else environment_of(rival)
    if rival in PEERS:
        return Contestant(name, rival, environment)
    checkout = Path(rival).expanduser().absolute()
    if rival and (checkout / "bench.py").is_file():
        # Python must put the checkout's own folder first on the path
        return Contestant(name, ours, {"PYTHONSAFEPATH": ""} | environment, checkout)
    core = [path.name for path in Path(ROOT).glob("*.py") if not IS_INSTALLED]
    if rival and any(file.name in core for file in checkout.glob("*.py")):
        # A folder with modules that replace ours
        path = os.pathsep.join([str(checkout), ROOT])
        return Contestant(name, ours, {"PYTHONSAFEPATH": "1", "PYTHONPATH": path} | environment)
    raise ValueError(
        f"--vs: {shown(rival)} is neither {' nor '.join((*PEERS, FLOAT, WIDENED))} nor a folder that holds "
        "a bench.py or a module such as llama.py"
    )


class Setup(NamedTuple):
    """A row of a table and the columns in which it is measured."""

    x: str  # the row's name, such as "rows 8"
    spec: Spec  # complete except for the contestant
    columns: list[Contestant]


def make_plan(
    parts: Sequence[str],
    rows: Sequence[int],
    usual: Spec,
    ours: Contestant,
    rivals: Sequence[Contestant],
) -> list[Setup]:
    """Return all setups of these parts."""
    return [
        Setup(x, usual._replace(part=part, **change), columns_of(part, ours, rivals))
        for part in parts
        for x, change in lines_of(part, rows).items()
    ]


def columns_of(part: str, ours: Contestant, rivals: Sequence[Contestant]) -> list[Contestant]:
    """Return the columns of a part's table. The first is ours, except in `same`; the others show their ratio to it."""
    of_all = part in PARTS_OF_A_PEER
    able = [rival for rival in rivals if of_all or rival.engine not in PEERS]
    if part == "open":
        policies = map(our_column, OF_ONE_CLIENT)
        return [ours, *(column for column in policies if column != ours), *able]
    if part == "speculate":
        policy = ours.engine.split()[1]
        return [our_column(policy), our_column(policy, "auto")]
    if part == "same":
        return [rival for rival in able if rival.engine in PEERS]
    return [ours, *able]


def lines_of(part: str, rows: Sequence[int]) -> dict[str, dict]:
    """Return the rows of a part's table: name -> changes to the default spec."""
    return {
        "decode": {f"rows {n}": {"rows": n} for n in rows},
        "closed": {f"users {n}": {"rows": n} for n in rows},
        "open": {f"load {load}": {"output": LONGEST, "rate": load} for load in LOADS},
        "long": {"prompt 2000": {"late": 2000, "output": 256}},
        "chat": {f"turn {TURNS}": CHAT},
        "speculate": {
            f"{text} rows {n}": {"rows": n, "text": text, "length": 2 * LENGTH}
            for text, n in DICTATED
        },
    }.get(part, {f"rows {ROWS}": {}})


def capacity(records: Sequence[dict]) -> float:
    """Return the requests per second of static batching, measured when all arrive at once."""
    rates = [
        record["figures"]["total tokens/s"]
        for record in records
        if record["x"] == "load inf" and record["contestant"] == "nanobatch static"
    ]
    return statistics.median(rates) / statistics.mean(crowd_lengths(LONGEST))


SHAPES = {  # width, layers, heads, KV heads, MLP width, vocabulary
    "15m": (288, 6, 6, 6, 768, 32_000),
    "smollm2-135m": (576, 30, 9, 3, 1536, 49_152),
    "1b": (2048, 16, 32, 8, 8192, 128_256),
}
GROUP = 64
FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def make_model(folder: Path, shape: str, bits: int = 32) -> Path:
    """Create a model folder: random weights, a tied head, and a tokenizer with a text for each id.

    `bits` per weight: 32 is float32; 16 is bfloat16; 8 and 4 are packed in groups of 64, with scales and
    offsets in bfloat16.
    """
    from tokenizers import Tokenizer, decoders, models

    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        **dict(zip((*FIELDS, "vocab_size"), SHAPES[shape], strict=True)),
    }
    if bits < 16:
        config["quantization"] = {"bits": bits, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(
        models.BPE(vocab={f"Ġ{i}": i for i in range(config["vocab_size"])}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    mx.random.seed(0)  # all processes must create the same weights
    shapes = read_config(folder, has_head=False).tensors()
    dtype = mx.float32 if bits == 32 else mx.bfloat16
    weights = {}
    for name, size in shapes.items():
        is_norm = len(size) == 1
        weights[name] = (mx.ones(size) if is_norm else 0.02 * mx.random.normal(size)).astype(dtype)
        if bits < 16 and not is_norm:
            module = name.removesuffix(".weight")
            weight, scales, biases = mx.quantize(weights[name], group_size=GROUP, bits=bits)
            weights |= {name: weight, f"{module}.scales": scales, f"{module}.biases": biases}
        mx.eval(weights)  # tensor by tensor: a large model would not fit in memory in float32
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    del weights
    mx.clear_cache()  # the samples need the memory
    return folder
