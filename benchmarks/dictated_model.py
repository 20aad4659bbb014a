"""A model with predetermined answers, for measuring prompt lookup.

The speedup of prompt lookup depends on the text. A model with random weights does not repeat its prompt,
and a small model copies it poorly. So the answers are dictated from this project's files: its code with a
name changed, its pages, and its pages repeated. Each word is a token. The model computes logits and samples
as usual, and then the sampled token is replaced, so the tokens are the same with and without draft tokens.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kernels.device import mx
from nanobatch import Engine, Handle, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
CODE = ("policies.py", "prefix.py", "kv.py", "llama.py", "sampling.py")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/server.md", "docs/correctness.md", "docs/slots.md")
NAMES = ("request", "slot", "self", "rows", "length", "array", "start", "prompt", "state")
LENGTH = 240  # tokens in each prompt and each answer


class Dictated(NamedTuple):
    prompt: list[int]
    answer: list[int]


def texts(kind: str, vocabulary: int) -> Iterator[Dictated]:
    """Yield an endless sequence of texts of a kind ("rewrite", "fresh" or "repeat"), the same in each run."""
    dice = random.Random(kind)
    files = [words_of(ROOT / name, kind) for name in (CODE if kind == "rewrite" else PAGES)]
    while True:
        words = dice.choice(files)
        first = dice.randrange(max(1, len(words) - 2 * LENGTH))
        before = words[first : first + LENGTH]
        after = words[first + LENGTH : first + 2 * LENGTH]
        if kind == "repeat":
            after = before
        elif kind == "rewrite":
            name = max(NAMES, key=before.count)
            after = [f"{name}_" if word == name else word for word in before]
        yield Dictated(ids_of(before, vocabulary), ids_of(after, vocabulary))


def words_of(path: Path, kind: str) -> list[str]:
    """Return the words of a file. Leave out the tables and commands of a page, which are repetitive."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if kind != "rewrite":
        lines = [line for line in lines if not line.startswith(("|", "!", "    ", "```", "python"))]
    return re.findall(r"\w+|[^\w\s]|\s+", "".join(lines))


def ids_of(words: list[str], vocabulary: int) -> list[int]:
    return [zlib.crc32(word.encode()) % vocabulary for word in words]


class DictatedModel:
    """Wraps an engine and replaces its sampled tokens with dictated ones."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.answers: dict[int, list[int]] = {}  # request id -> answer
        self._sample = engine.runner._sample
        engine.runner._sample = self._dictate

    def submit(self, text: Dictated) -> Handle:
        sampling = SamplingParams(max_tokens=len(text.answer), ignore_eos=True)
        handle = self.engine.submit(text.prompt, sampling)
        self.answers[handle.id] = text.answer
        return handle

    def _dictate(self, begun, picks):
        emitted, *rest = self._sample(begun, picks)
        owners = {request.slot: request.id for request in self.engine.sched.running.values()}
        slots, rows = emitted.shape
        said = [[-1] * rows for _ in range(slots)]
        for slot in begun.slots:
            answer = self.answers.get(owners.get(slot), ())
            for i, pick in enumerate(picks[slot]):
                known = pick.index < len(answer)
                said[slot][i] = answer[pick.index] if known else 0
        # The condition is always true, but keeps the sampling in the graph
        return mx.where(emitted >= -1, mx.array(said, mx.int32), emitted), *rest
