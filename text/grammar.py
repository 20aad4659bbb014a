"""Grammars: constrain an answer to a JSON schema, a list of choices, a regular expression or a
grammar.

The problem. A program that asks for JSON wants to parse the answer. A model that is asked nicely
writes JSON most of the time; asking again is slow and guarantees nothing.

The solution. Before each token the grammar says which tokens may come next, and all others get
probability 0. The answer is then correct by construction. (`max_tokens` may still cut it off; then
`finish_reason` is "length".) The library llguidance does the hard part: it parses the grammar and
walks the tree of all tokens' bytes to find those that may come next, in about 30 microseconds.

    {"name": "T      any token whose bytes may be in a string, but none with a line break
    {"name": "Tom"   a comma, a brace or whitespace

The mask of step N+1 needs the token of step N, but run-ahead starts step N+1 before that token is
read. So the engine starts the forward pass, which needs no mask, and computes the mask as soon as the
token is known.

A grammar is a client's program, and llguidance cannot be interrupted. So each grammar is first
compiled and advanced by some random tokens in a sandboxed process (`base/sandbox.py`). Afterwards each
answer has a budget: `AT_FIRST` seconds of processor time, plus `A_TOKEN` per token. A grammar that
exceeds its budget fails its own request.

Where next: `sampling.py`, where the mask meets the logits.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from typing import Any

from base.sandbox import STACK, LimitError, Sandbox, SandboxLimits
from base.validation import GrammarError, one_line, shown
from text.tool_formats import as_lark

# llguidance's limits for one request, in its own units, with their approximate cost.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,  # 4 ms
    # 1 ms. In an ambiguous grammar each item costs more, and a mask takes 20 ms. With a larger
    # vocabulary, an ordinary mask needs more items (`make`)
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # 40 MB
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Seconds of processor time that a grammar may use in the engine's thread. With a vocabulary of
# 152,000, an ordinary grammar takes 0.04 ms per token, and at most 0.6 ms.
AT_FIRST = 0.02
A_TOKEN = 0.001
SANDBOX_LIMITS = SandboxLimits(seconds=1.0, patience=5.0, memory=64 * 2**20, at_once=6)
STEPS = 64  # maximum number of tokens in each of the two trial runs in the sandbox
RULES = 500  # maximum number of rules in a Lark grammar
AT_ONCE = 2  # maximum number of grammars compiled at the same time
KNOWN = 1000  # maximum number of cached verdicts; a full cache is cleared
# Whitespace in JSON. It is bounded, because some models would otherwise write it endlessly.
SPACE = r"[ ]|\n[ \t]{0,40}"


class Grammar:
    """The state of one answer's grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher
        self._left = AT_FIRST  # seconds left in its budget

    def copy(self) -> Grammar:
        """Return an independent copy, for another answer."""
        return Grammar(self._matcher.deep_copy())

    def mask(self) -> bytes:
        """Return a bitmask of the tokens that may come next, lowest bit first."""
        self._left += A_TOKEN
        return self._charge(self._matcher.compute_bitmask)

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the mask of the next token, and one after each draft token, up to the first draft
        that the grammar forbids. The state does not change."""
        masks = [self.mask()]
        if not drafts:
            return masks
        # The library may fail on a wrong draft, but that must not fail the answer
        ahead = self.copy()
        ahead._left = min(self._left, A_TOKEN)
        try:
            for draft in drafts:
                if ahead.is_complete or not ahead._matcher.validate_tokens([draft]):
                    break
                ahead.accept(draft)
                masks.append(ahead.mask())
        except BaseException:  # a Rust panic is not an Exception
            nothing = bytes(len(masks[0]))  # allows no token, so no draft is accepted
            masks.append(nothing)
        return masks

    def forced(self) -> list[int]:
        """Return the tokens that must come next. Empty if llguidance fails: the next `mask` raises
        the error."""
        try:
            return self.copy()._matcher.compute_ff_tokens()
        except BaseException:  # a Rust panic is not an Exception
            return []

    def accept(self, token: int) -> None:
        """Advance the state by this token."""
        self._charge(self._matcher.consume_token, token)

    @property
    def is_complete(self) -> bool:
        """True if only the end of the answer can follow."""
        return self._matcher.is_stopped()

    def _charge(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()  # not wall-clock time, because the machine may be busy
        found = function(*arguments)
        self._left -= time.thread_time() - began
        if self._matcher.is_error():
            raise GrammarError(f"it cannot continue: {reason(self._matcher.get_error())}")
        if self._left < 0:
            raise GrammarError(f"it takes more than {1000 * A_TOKEN:g} ms a token; simplify it")
        return found


class Grammars:
    """A compiler for the grammars of requests to one model.

    `tokenizer`: from the library `tokenizers`.
    `V`: size of the model's head, which may exceed the tokenizer's vocabulary.
    `end_tokens`: all end tokens, because llguidance forbids those that it does not know.
    """

    def __init__(self, tokenizer: Any, V: int, end_tokens: Collection[int]):
        self._source = tokenizer
        self._V = V
        self._end_tokens = end_tokens
        self._verdicts: dict[bytes, str] = {}  # hash of a grammar -> its fault

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The arguments of `read_tokens`: a description of the model's tokens for llguidance."""
        ends = [id for id in sorted(self._end_tokens) if self._source.id_to_token(id) is not None]
        if not ends:
            raise ValueError("this model names no end token, so an answer could not end")
        return {"tokenizer": self._source.to_str(), "n_vocab": self._V, "eos_token": ends}

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokens(self._known)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(__name__, self._known, SANDBOX_LIMITS)

    def grammar(self, source: Mapping[str, Any]) -> Grammar:
        """Compile a grammar in the form of `SamplingParams.grammar`. Raise ValueError or BusyError."""
        try:
            if fault := self._judge(source):
                raise ValueError(fault)
            return makers().submit(make, self._tokenizer, source).result()
        except ValueError as error:
            raise ValueError(f"grammar: {one_line(error, 300)}") from None

    def special(self, tokens: Iterable[int]) -> set[int]:
        """Return those tokens that llguidance treats as special: no text in a grammar matches them.

        subtle: besides the tokenizer's special tokens, these are all added tokens of the form <...>,
        such as Qwen's <tool_call>, although its file says `"special": false`.
        """
        try:
            # Try the tokenizer in the sandbox before llguidance reads it in this process
            if fault := self._judge({"json": "{}"}):
                raise ValueError(fault)
            return {token for token in tokens if self._tokenizer.is_special_token(token)}
        except ValueError as error:
            raise ValueError(f"grammar: {one_line(error, 300)}") from None

    def _judge(self, source: Mapping[str, Any]) -> str:
        """Return the fault of a grammar; empty if it has none. Verdicts are cached."""
        job = dict(source)
        key = hashlib.sha256(json.dumps(job).encode()).digest()
        fault = self._verdicts.get(key)
        if fault is None:
            try:
                # A fault may quote the entire grammar
                fault = one_line(self._sandbox.run(job), 300)
            except LimitError as error:
                fault = f"it {error} to be compiled and checked; simplify it"
            if len(self._verdicts) >= KNOWN:
                self._verdicts.clear()
            self._verdicts[key] = fault
        return fault


# --- in the sandbox -------------------------------------------------------------------------------


def prepare(known: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    return partial(fault_of, read_tokens(known), set(known["eos_token"]))


def fault_of(tokenizer: Any, ends: Collection[int], source: Mapping[str, Any]) -> str:
    """Compile a grammar and try it. Return its fault; empty if it has none."""
    try:
        made = make(tokenizer, source)
        # First one random token each time, then the longest of eight, because a token may be 80 spaces long
        for draws in (1, 8):
            follow(made.copy(), tokenizer, ends, draws)
    except (ValueError, GrammarError) as error:
        return str(error)
    except BaseException as error:  # a Rust panic is not an Exception
        if isinstance(error, MemoryError):
            raise
        return f"the library failed ({one_line(error, 300)})"
    return ""


def follow(grammar: Grammar, tokenizer: Any, ends: Collection[int], draws: int) -> None:
    """Advance a grammar by allowed tokens, each the longest of `draws` random tokens."""
    dice = random.Random(draws)
    for _ in range(STEPS):
        if grammar.is_complete:
            return
        mask = grammar.mask()
        tokens = [draw(mask, dice) for _ in range(draws)]
        tokens = [token for token in tokens if token not in ends]
        if not tokens:
            return
        grammar.accept(max(tokens, key=lambda token: len(tokenizer.decode_bytes([token]))))


def draw(mask: bytes, dice: random.Random) -> int:
    """Return a random token that the mask allows."""
    bits = int.from_bytes(mask, "little")
    start = dice.randrange(bits.bit_length())
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


# --- compiling ------------------------------------------------------------------------------------


def read_tokens(known: Mapping[str, Any]) -> Any:
    """Build llguidance's tokenizer."""
    from llguidance import LLTokenizer

    return LLTokenizer(**known)


def make(tokenizer: Any, source: Mapping[str, Any]) -> Grammar:
    """Compile a grammar and compute its first mask, which takes longest and reveals remaining
    errors."""
    from llguidance import LLMatcher, LLParserLimits

    items = LIMITS["step_max_items"] + tokenizer.vocab_size // 10
    limits = LLParserLimits(**LIMITS | {"step_max_items": items})
    matcher = LLMatcher(tokenizer, compiled(source), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason(matcher.get_error()))
    return Grammar(matcher)


def compiled(source: Mapping[str, Any]) -> str:
    """Translate a grammar into llguidance's own notation."""
    from llguidance import LLMatcher

    [(kind, text)] = source.items()
    if kind == "json":
        try:
            schema = json.loads(text)
        except RecursionError:
            raise ValueError("the schema is nested too deep") from None
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {shown(schema)}, but it must be an object")
        # A schema must not override the form of the answer, such as its whitespace.
        form = {"whitespace_pattern": SPACE, "coerce_one_of": False, "lenient": False}
        return LLMatcher.grammar_from_json_schema(text, overrides=form)
    text = as_lark(kind, text)
    # Count lines with a colon: each rule has one, and llguidance refuses two rules on a line. (A line may
    # contain a JSON schema with any number of colons.)
    rules = sum(":" in line for line in text.splitlines())
    if rules > RULES:
        raise ValueError(f"it has {rules:,} lines with a colon, but it may have at most {RULES}")
    return LLMatcher.grammar_from_lark(text)


def reason(error: str) -> str:
    """Return llguidance's error message without its internal state and without the position."""
    lines = error.strip().split("\n")
    if lines[0].startswith("NoExtension"):
        return "no answer can match it"
    said = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *said])


@cache
def makers() -> ThreadPoolExecutor:
    """Return a pool of two threads with large stacks that compile grammars.

    A grammar of 3,000 nested rules overflows a normal stack and kills the process. The threads are
    kept, because each new thread may get a memory arena of its own.
    """
    pool = ThreadPoolExecutor(AT_ONCE, "grammar")
    are_there = threading.Barrier(AT_ONCE)
    usual = threading.stack_size(STACK)  # applies to all threads started after this call
    try:
        for _ in range(AT_ONCE):
            pool.submit(are_there.wait)  # so that each task starts a thread
    finally:
        threading.stack_size(usual)
    return pool
