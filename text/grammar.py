"""Grammars: an answer that is JSON of a schema, one of several texts, or what an expression says.

The problem. A program that asks for JSON wants to parse the answer. A model that is asked nicely
writes JSON most of the time. To try again is slow, and proves nothing.

The way out. Before each token a *grammar* says which tokens may come next, and the others get the
probability 0. The answer is then right by construction, whatever the model thinks of it. (It may
still be cut by `max_tokens`: then its `finish_reason` is "length".) The library `llguidance` does
the hard part. It reads the grammar, and walks down the tree of all tokens' bytes to find those that
may come next. That takes some 30 microseconds.

    {"name": "T      any token whose bytes may stand in a string, but no token with a line's end
    {"name": "Tom"   a comma, a brace or white space

When is the mask of step N+1 known? As soon as the token of step N is. Run-ahead starts step N+1
before that. So the engine starts the forward pass first, which needs no mask, and asks for the mask
when it has read the token (`Engine._run` in `nanobatch.py`).

What this file keeps. A grammar is a stranger's program, and the library cannot be interrupted. So
each one is tried first in a process that can be ended (`trials.py`): the trial makes it, and follows
it for some tokens. Only a grammar that comes through is made here. Later each answer has an account:
its grammar may take `AT_FIRST` seconds of a processor, and `A_TOKEN` more for each token. A grammar
that takes more ends its own request. What cannot be made is a ValueError of one line.

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

from runtime.validation import GrammarError, one_line, shown
from text.sandbox import STACK, Allowance, LimitError, Trials

# What the library may do for one request. Its own units; behind each is what that roughly takes.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,  # 4 ms
    # 1 ms. If there are many ways to read a text, each costs more, and a mask takes 20 ms. With more
    # tokens an honest mask needs more of them (`make`)
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # 40 MB
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# What a grammar may take of the thread that steps, in seconds of a processor. With 152,000 tokens an
# honest one takes 0.04 ms a token, and 0.6 ms at most.
AT_FIRST = 0.02
A_TOKEN = 0.001
TRIAL = Allowance(seconds=1.0, patience=5.0, memory=64 * 2**20, at_once=6)
STEPS = 64  # a trial follows a grammar for so many tokens, twice
RULES = 500  # of a grammar in Lark's notation
AT_ONCE = 2  # so many are made at a time, once they have been tried
KNOWN = 1000  # so many verdicts are remembered, then all are forgotten
# Between the parts of JSON. Without a bound, a model that likes spaces would write nothing else.
SPACE = r"[ ]|\n[ \t]{0,40}"


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher
        self._left = AT_FIRST  # seconds that this grammar may still take

    def copy(self) -> Grammar:
        """The same place, for another answer."""
        return Grammar(self._matcher.deep_copy())

    def mask(self) -> bytes:
        """Which tokens may come next: a bit for each, the lowest first."""
        self._left += A_TOKEN
        return self._charge(self._matcher.compute_bitmask)

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """The mask of the next place, and of each place behind a draft that the grammar allows, up
        to the first that it forbids. The answer stands afterwards where it stood before."""
        masks = [self.mask()]
        if not drafts:
            return masks
        # A wrong draft may lead where the library fails, and that is no fault of the answer.
        ahead = self.copy()
        ahead._left = min(self._left, A_TOKEN)
        try:
            for draft in drafts:
                if ahead.is_complete or not ahead._matcher.validate_tokens([draft]):
                    break
                ahead.accept(draft)
                masks.append(ahead.mask())
        except BaseException:  # a panic in the library's Rust is no Exception
            nothing = bytes(len(masks[0]))  # no token is finite then, and no draft is taken
            masks.append(nothing)
        return masks

    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other. None if the library cannot say so:
        then the next mask says why."""
        try:
            return self.copy()._matcher.compute_ff_tokens()
        except BaseException:  # a panic in the library's Rust is no Exception
            return []

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self._charge(self._matcher.consume_token, token)

    @property
    def is_complete(self) -> bool:
        """Can nothing follow but the answer's end?"""
        return self._matcher.is_stopped()

    def _charge(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()  # the processor's: a busy machine is not the grammar's fault
        found = function(*arguments)
        self._left -= time.thread_time() - began
        if self._matcher.is_error():
            raise GrammarError(f"it cannot go on: {reason(self._matcher.get_error())}")
        if self._left < 0:
            raise GrammarError(f"it takes more than {1000 * A_TOKEN:g} ms a token; simplify it")
        return found


class Grammars:
    """Makes the grammars of a model's requests.

    `tokenizer`: one of the library `tokenizers`. A trial has no need to import that.
    `V`: how many tokens the model's head knows. It may know more than the tokenizer.
    `end_tokens`: all of them. One that the library does not know would be forbidden for ever.
    """

    def __init__(self, tokenizer: Any, V: int, end_tokens: Collection[int]):
        self._source = tokenizer
        self._V = V
        self._end_tokens = end_tokens
        self._verdicts: dict[bytes, str] = {}  # by a grammar's hash

    @cached_property
    def _known(self) -> dict[str, Any]:
        """What the library has to know of the model's tokens."""
        ends = [id for id in sorted(self._end_tokens) if self._source.id_to_token(id) is not None]
        if not ends:
            raise ValueError("this model names no end token, and an answer could not end")
        return {"tokenizer": self._source.to_str(), "n_vocab": self._V, "eos_token": ends}

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokens(self._known)

    @cached_property
    def _trials(self) -> Trials:
        return Trials("text.grammar", self._known, TRIAL)

    def grammar(self, source: Mapping[str, Any]) -> Grammar:
        """`source`: as `SamplingParams.grammar` has it. Raises ValueError, or BusyError."""
        try:
            if fault := self._judge(source):
                raise ValueError(fault)
            return makers().submit(make, self._tokenizer, source).result()
        except ValueError as error:
            raise ValueError(f"grammar: {one_line(error, 300)}") from None

    def special(self, tokens: Iterable[int]) -> set[int]:
        """The tokens that the library takes for special: no text in a grammar matches them.

        subtle: these are not the tokenizer's own special tokens alone, but all added tokens of the
        form <...>. Qwen's <tool_call> is one, although its file says `"special": false`.
        """
        try:
            if fault := self._judge({"json": "{}"}):  # before the library reads the tokenizer here
                raise ValueError(fault)
            return {token for token in tokens if self._tokenizer.is_special_token(token)}
        except ValueError as error:
            raise ValueError(f"grammar: {one_line(error, 300)}") from None

    def _judge(self, source: Mapping[str, Any]) -> str:
        """What is wrong with a grammar; empty if nothing is. It is tried once."""
        job = dict(source)
        key = hashlib.sha256(json.dumps(job).encode()).digest()
        fault = self._verdicts.get(key)
        if fault is None:
            try:
                fault = one_line(self._trials.run(job), 300)  # it may quote all of the text
            except LimitError as error:
                fault = f"it {error} to be made and tried; simplify it"
            if len(self._verdicts) >= KNOWN:
                self._verdicts.clear()
            self._verdicts[key] = fault
        return fault


# --- in a trial ---------------------------------------------------------------------------------


def prepare(known: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    return partial(fault_of, read_tokens(known), set(known["eos_token"]))


def fault_of(tokenizer: Any, ends: Collection[int], source: Mapping[str, Any]) -> str:
    """Make a grammar and follow it: what is wrong with it; empty if nothing is."""
    try:
        made = make(tokenizer, source)
        # A token at random, and the longest of some: a blank may have 80 bytes
        for draws in (1, 8):
            follow(made.copy(), tokenizer, ends, draws)
    except (ValueError, GrammarError) as error:
        return str(error)
    except BaseException as error:  # a panic in the library's Rust is no Exception
        if isinstance(error, MemoryError):
            raise
        return f"the library failed ({one_line(error, 300)})"
    return ""


def follow(grammar: Grammar, tokenizer: Any, ends: Collection[int], draws: int) -> None:
    """An answer of random tokens, as far as a trial goes."""
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
    """A token that a mask allows."""
    bits = int.from_bytes(mask, "little")
    start = dice.randrange(bits.bit_length())
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


# --- made of what a request says ----------------------------------------------------------------


def read_tokens(known: Mapping[str, Any]) -> Any:
    """The library's view of the model's tokens."""
    from llguidance import LLTokenizer

    return LLTokenizer(**known)


def make(tokenizer: Any, source: Mapping[str, Any]) -> Grammar:
    """With its first mask: what is wrong shows there at the latest, and it takes longest."""
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
    """The grammar in the library's own notation."""
    from llguidance import LLMatcher

    [(kind, text)] = source.items()
    if kind == "json":
        try:
            schema = json.loads(text)
        except RecursionError:
            raise ValueError("the schema is nested too deep") from None
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {shown(schema)}, but it must be an object")
        # What a schema says about the form of the answer is overruled, such as its white space.
        form = {"whitespace_pattern": SPACE, "coerce_one_of": False, "lenient": False}
        return LLMatcher.grammar_from_json_schema(text, overrides=form)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in text]
        # A terminal, which is one automaton. As a rule, each choice would be a way of its own.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
    # Each rule has a colon, and no line has two rules: the library refuses it. (A line may have a
    # schema, with any number of colons.)
    rules = sum(":" in line for line in text.splitlines())
    if rules > RULES:
        raise ValueError(f"it has {rules:,} lines with a colon, but it may have at most {RULES}")
    return LLMatcher.grammar_from_lark(text)


def reason(error: str) -> str:
    """What the library says, without its own state and without the place in a text."""
    lines = error.strip().split("\n")
    if lines[0].startswith("NoExtension"):
        return "no answer can fit it"
    said = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *said])


@cache
def makers() -> ThreadPoolExecutor:
    """Two threads with large stacks, in which grammars are made.

    A grammar of 3,000 rules, each of which needs the next one, ends the process in a usual stack.
    And the threads stay: each new one may be given memory of its own, which the next does not use.
    """
    pool = ThreadPoolExecutor(AT_ONCE, "grammar")
    are_there = threading.Barrier(AT_ONCE)
    usual = threading.stack_size(STACK)  # of all threads that are started from here on
    try:
        for _ in range(AT_ONCE):
            pool.submit(are_there.wait)  # so each is given a thread of its own
    finally:
        threading.stack_size(usual)
    return pool
