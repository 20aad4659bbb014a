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

What this file keeps. A grammar is made while the caller that submits the request waits for it, and
never by the thread that steps. What it may take is bounded: the size of its text (`parts/api/settings.py`),
and below the library's work for it, as a whole and for each token. A grammar that cannot be made is
a ValueError of one line. One that fails later ends its own request.

Where next: `sampling.py`, where the mask meets the logits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import cache, cached_property
from queue import SimpleQueue
from typing import Any

from tokenizers import Tokenizer

from parts.checks import one_line, shown

# What the library may do for one request. Its own units; behind each is what that roughly takes.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,  # 4 ms
    "step_max_items": 20_000,  # 1 ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # 40 MB
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
RULES = 500  # of a grammar in Lark's notation
STACK = 128 * 2**20  # the library walks down a grammar by recursion
SECONDS = 5.0  # so long the making of a grammar may take
AT_ONCE = 2  # so many may be made at a time
# Between the parts of JSON. Without a bound, a model that likes spaces would write nothing else.
SPACE = r"[ ]|\n[ \t]{0,40}"


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def mask(self) -> bytes:
        """Which tokens may come next: a bit for each, the lowest first."""
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Can nothing follow but the answer's end?"""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot go on: {reason(self._matcher.get_error())}")


class Grammars:
    """Makes the grammars of a model's requests.

    `V`: how many tokens the model's head knows. It may know more than the tokenizer.
    `end_tokens`: all of them. One that the library does not know would be forbidden for ever.
    """

    def __init__(self, tokenizer: Tokenizer, V: int, end_tokens: Collection[int]):
        self._source = tokenizer
        self._V = V
        self._end_tokens = end_tokens

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        ends = [id for id in sorted(self._end_tokens) if self._source.id_to_token(id) is not None]
        if not ends:
            raise ValueError("this model names no end token, and an answer could not end")
        return LLTokenizer(self._source.to_str(), n_vocab=self._V, eos_token=ends)

    def grammar(self, source: Mapping[str, Any]) -> Grammar:
        """`source`: as `Sampling.grammar` has it."""
        try:
            tokenizer = self._tokenizer  # made once; this time is not the grammar's
            return in_a_maker(lambda: self._make(source, tokenizer))
        except ValueError as error:
            raise ValueError(f"grammar: {one_line(error, 300)}") from None
        except BaseException as error:  # a panic in the library's Rust is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"grammar: the library failed ({one_line(error, 300)})") from None

    def _make(self, source: Mapping[str, Any], tokenizer: Any) -> Grammar:
        """With its first mask: what is wrong shows there at the latest, and it takes longest."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
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
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
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


def in_a_maker(function: Callable[[], Any]) -> Any:
    """Call a function in one of the threads that make grammars, and wait for it, but not for long.

    The library cannot be interrupted, and a `multipleOf` may keep it busy for half a minute.
    """
    result: Future = Future()
    makers().put((function, result))
    try:
        return result.result(SECONDS)
    except TimeoutError:
        if result.cancel():  # it has not begun
            raise ValueError("others take too long to be made; try later") from None
        raise ValueError(f"it takes longer than {SECONDS:.0f} s to be made; simplify it") from None


@cache
def makers() -> SimpleQueue:
    """What is put here is made by one of two threads with large stacks.

    A grammar of 3,000 rules, each of which needs the next one, ends the process in a usual stack.
    And they stay: each new thread may be given memory of its own, which the next one does not use.
    """
    jobs: SimpleQueue = SimpleQueue()
    usual = threading.stack_size(STACK)  # of all threads that are started from here on
    try:
        for _ in range(AT_ONCE):
            threading.Thread(target=make, args=(jobs,), name="grammar", daemon=True).start()
    finally:
        threading.stack_size(usual)
    return jobs


def make(jobs: SimpleQueue) -> None:
    while True:
        function, result = jobs.get()
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
        del function, result  # else they would be kept until the next one comes
