"""The sampling parameters of a request. A `SamplingParams` is immutable and checked when it is created, so a
wrong setting is refused, with its name and limits, before it reaches a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from base.untrusted_files import ModelError, read_json_if_any
from base.validation import one_line, real, shown, whole

GRAMMAR = 32_768  # most characters of a schema or another grammar
SHORT_LIST = 64  # up to this top_k, only this many tokens are sorted
LIMITS = {  # for each numeric field: check, minimum, maximum
    "max_tokens": (whole, 1, math.inf),
    "temperature": (real, 0, 1_000_000),
    "top_p": (real, 0, 1),
    "top_k": (whole, 0, math.inf),
    "min_p": (real, 0, 1),
    "seed": (whole, -(2**63), 2**64 - 1),
    "repetition_penalty": (real, 0.001, 1000),
    "presence_penalty": (real, -2, 2),
    "frequency_penalty": (real, -2, 2),
    "logprobs": (whole, 0, 100),
}


ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def advised(folder: Path) -> dict[str, float]:
    """Return the default settings of a request in every program: those of `generation_config.json`, or
    else greedy.

    A small model answers most questions correctly at temperature 0, but few at 1 (docs/command-line.md).
    """
    path = folder / "generation_config.json"
    advice = read_json_if_any(path)
    found = {name: advice[name] for name in ADVICE if advice.get(name) is not None}
    if advice.get("do_sample") is False:
        found["temperature"] = 0.0
    # In transformers, an omitted temperature in this file means 1
    found.setdefault("temperature", 1.0 if advice.get("do_sample") is True else 0.0)
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    return found


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are sampled, and when its answer ends. The default is greedy."""

    max_tokens: int | None = 128  # None: up to the end of the slot
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # keep the most likely tokens, up to this total probability; 1 keeps all
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    # Keep tokens that are at least this fraction as likely as the most likely one; 0 keeps all
    min_p: float = 0.0
    seed: int | None = None  # None: random
    # Texts and token ids that end the answer, and are not part of its text
    stop: str | int | Sequence[str | int] = ()
    # Divide the logits of recent tokens by this (multiply, if negative)
    repetition_penalty: float = 1.0
    # Subtract these from the logit of each token in the answer: once, or for each occurrence
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Token id -> number to add to its logit; -1000 forbids the token
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Return the log probability of each token, and of the n most likely ones
    logprobs: int | None = None
    ignore_eos: bool = False  # continue after the model's end token
    # Return the prompt's vector instead of an answer; all other settings are ignored
    embeds: bool = False
    # Structured output: {"json": schema}, {"regex": pattern}, {"choice": texts} or {"lark": grammar in
    # Lark's notation}
    grammar: Mapping | None = None

    def __post_init__(self):
        vars(self).update(self._checked())  # not by assignment, because the class is frozen

    def _checked(self) -> dict[str, Any]:
        """Return the normalized fields. Raise ValueError with the field and its limits."""
        checked: dict[str, Any] = {}
        for name, (check, least, most) in LIMITS.items():
            value = getattr(self, name)
            is_usual = value is getattr(SamplingParams, name)  # the default
            is_none = value is None and name in ("max_tokens", "seed", "logprobs")
            if not (is_usual or is_none):
                checked[name] = check(name, value, least, most)
        if self.top_p == 0:
            raise ValueError("top_p = 0 keeps no token; it must be above 0 and at most 1")
        for name in ("ignore_eos", "embeds"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} = {shown(value)}, but it must be True or False")
        if self.embeds:  # one step after the prompt is enough; its token is dropped
            checked["max_tokens"] = 1
        checked |= self._checked_stop()
        checked["logit_bias"] = self._checked_bias()
        if self.grammar is not None:
            checked["grammar"] = self._checked_grammar()
        return checked

    def _checked_stop(self) -> dict[str, Any]:
        stops = (self.stop,) if isinstance(self.stop, (str, int)) else self.stop
        if not isinstance(stops, Sequence):
            raise ValueError(f"stop = {shown(stops)}, but it must be strings or token ids")
        for stop in stops:
            if isinstance(stop, bool) or not isinstance(stop, (str, int)) or stop == "":
                raise ValueError(
                    f"stop holds {shown(stop)}, but it must be strings that are not empty, or token ids"
                )
        return {
            "stop": tuple(stops),
            "stop_texts": [stop for stop in stops if isinstance(stop, str)],
            "stop_tokens": frozenset(stop for stop in stops if isinstance(stop, int)),
        }

    def _checked_bias(self) -> Mapping[int, float]:
        if not isinstance(self.logit_bias, Mapping) or not all(
            type(token) is int for token in self.logit_bias
        ):
            raise ValueError(
                f"logit_bias = {shown(self.logit_bias)}, but it must map token ids to numbers"
            )
        biases = {
            t: real(f"logit_bias for token {t}", b, -(10**9), 10**9)
            for t, b in self.logit_bias.items()
        }
        return MappingProxyType(biases)  # an immutable copy

    def _checked_grammar(self) -> Mapping[str, str | tuple[str, ...]]:
        """Return the grammar as an immutable text, or several."""
        forms = "{'json': schema}, {'regex': text}, {'choice': texts} or {'lark': grammar}"
        entries = [*self.grammar.items()] if isinstance(self.grammar, Mapping) else []
        if len(entries) != 1 or entries[0][0] not in ("json", "regex", "choice", "lark"):
            raise ValueError(f"grammar = {shown(self.grammar)}, but it must be {forms}")
        kind, source = entries[0]
        if kind == "json" and not isinstance(source, str):
            try:
                source = json.dumps(source, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"grammar: the schema is not JSON: {one_line(error)}") from None
        is_list = isinstance(source, Sequence) and not isinstance(source, str)
        texts = source if kind == "choice" and is_list else (source,)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"grammar = {shown(self.grammar)}, but it must be {forms}")
        size = sum(len(text) for text in texts)
        if size > GRAMMAR:
            raise ValueError(
                f"grammar has {size:,} characters, but it may have at most {GRAMMAR:,}"
            )
        if self.ignore_eos:
            raise ValueError(
                "ignore_eos cannot be combined with a grammar, which has an end; leave it out"
            )
        source = tuple(texts) if kind == "choice" else source
        return MappingProxyType({kind: source})

    @property
    def counts(self) -> bool:
        """True if a token's logit depends on whether or how often it occurs in the answer."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @cached_property
    def looks_back(self) -> bool:
        """True if sampling a token depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.counts

    @cached_property
    def group(self) -> str:
        """The sampling group (`sampling.py`). It depends only on these settings."""
        edited = self.logit_bias or self.looks_back or self.logprobs is not None
        if self.temperature == 0:
            return "edited" if edited else "greedy"
        if 0 < self.top_k <= SHORT_LIST:
            return "short list"
        return "long list" if self.top_k or self.top_p < 1 else "open"
