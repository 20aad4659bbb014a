"""Streaming detokenization: token ids back to text, one token at a time.

The problem. Tokens are not characters. One emoji may take four tokens, and a stop string may begin
in the middle of one token and end in another. Yet a client wants text as soon as it is final.

The solution. A decoder may add or drop a space between two tokens, so each token is decoded together
with a few tokens before it, and the text beyond theirs is new. Three kinds of tokens wait:

    b"\\xf0\\x9f"  bytes that end within a character wait until it is complete or known to be broken
    <0xF0>       byte tokens (SentencePiece) wait until their run ends, because one broken byte changes
                 how the entire run decodes
    "Hel"        text that may be the start of a stop string waits until later text decides

(`tokenizers` has a DecodeStream, which handles the first kind. With the second kind it raises, or
returns text that differs from decoding all tokens at once.)

The invariant: the pieces join to the text of all tokens decoded at once. No piece ends within a
character, and no part of a stop string is ever shown. The cost of a token does not depend on the length
of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from base.strings import beginning


class StreamingDetokenizer:
    """The incremental detokenizer of one answer. `push` takes a token and returns new text; `finish`
    returns the rest."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        stops: Sequence[str] = (),
        silent: frozenset[int] | None = None,
    ):
        """`silent`: ids of tokens that are never shown; by default the special tokens."""
        self._tokenizer = tokenizer
        # Stop string -> its longest prefix at the end of the text
        self._begun = dict.fromkeys(stops, "")
        self._silent = special_ids(tokenizer) if silent is None else silent
        self._falls_back = tokenizer.token_to_id("<0x00>") is not None
        self._context: list[int] = []  # the last tokens whose text is final
        self._context_text = ""  # the text of the context
        self._waiting: list[int] = []  # the tokens after the context, whose text is not final
        self._held = ""  # final text that may be the start of a stop string
        self._decoded = 0  # number of final characters
        self.stop: str | None = None  # the stop string that ended the answer

    @property
    def open(self) -> int:
        """The number of tokens whose text is not final. The next token may complete them."""
        return len(self._waiting)

    def push(self, token: int) -> str:
        """Add a token and return the text that can be shown now, which may be empty. Set `stop` if a
        stop string is complete."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._silent:
            return ""
        self._waiting.append(token)
        if self._falls_back and len(name) == 6 and name.startswith("<0x"):
            return ""
        text = self._decode(self._context + self._waiting)
        count = len(self._waiting)
        if text.endswith("\ufffd") and not self._falls_back:
            count = self._complete()
            if count == 0:
                return ""
            text = self._decode(self._context + self._waiting[:count])
        piece = text[len(self._context_text) :]
        self._context += self._waiting[:count]
        self._context_text = text
        self._waiting = self._waiting[count:]
        # Shorten the context only now and then, because its text must then be decoded again
        if len(self._context) > 16:
            self._context = self._context[-1:] if self._falls_back else self._context[-4:]
            self._context_text = self._decode(self._context)
        return self._release(piece)

    def _decode(self, tokens: list[int]) -> str:
        tokens = [token for token in tokens if token not in self._silent]
        return without_panics(self._tokenizer.decode, tokens, skip_special_tokens=False)

    def _complete(self) -> int:
        """Return the number of waiting tokens whose text no later token can change; never all of them.

        A character has at most four bytes, so try a cut before each of the last four tokens. If the
        two sides of a cut decode to the same text as all tokens together, the text before the cut
        is final, broken or not.
        """
        text = self._decode(self._waiting)
        for count in range(len(self._waiting) - 1, max(len(self._waiting) - 5, 0), -1):
            if self._decode(self._waiting[:count]) + self._decode(self._waiting[count:]) == text:
                return count
        return 0

    def _release(self, piece: str) -> str:
        self._decoded += len(piece)
        text = self._held + piece
        found = []
        for stop, begun in self._begun.items():
            grown = begun + piece
            if stop in grown:
                # Number of characters after the stop string
                after = len(grown) - grown.index(stop) - len(stop)
                found.append((after, len(stop), stop))
            # Kept per stop string, because searching the held text again for each token would take time
            # proportional to its length and to the number of stop strings
            self._begun[stop] = beginning(stop, grown)
        if found:
            # The stop string that ends first wins, regardless of token boundaries
            after, length, self.stop = max(found)
            self._held = ""
            return text[: len(text) - after - length]
        self._held = max(self._begun.values(), key=len, default="")
        return text.removesuffix(self._held)

    def finish(self, tokens: list[int]) -> str:
        """Return the rest: text that did not become a stop string, and bytes of a broken character.

        `tokens`: all tokens of the answer.
        """
        if self.stop is not None:
            return ""
        shown = self._release(self._decode(tokens)[self._decoded :])
        held, self._held = self._held, ""
        return shown + held


def without_panics(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function of the tokenizer, and raise its Rust panics as RuntimeError.

    A panic is not an Exception, so no handler would catch it.
    """
    try:
        return function(*arguments, **options)
    except BaseException as error:
        # Ctrl-C and the SystemExit of a signal handler are not panics
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizer failed: {error}") from None


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    )
