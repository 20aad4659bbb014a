"""Token ids back to text, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from text.tool_parser import beginning


class StreamingDetokenizer:
    """The text of one answer as it grows: `push` takes a token and returns a piece, `finish`
    returns what is left.

    A decoder may put or drop a space between two tokens. So each token is decoded together with the
    few before it, and the text beyond theirs is new. Three kinds of tokens wait:

        b"\\xf0\\x9f"  bytes that end within a character wait until it is complete, or broken for good
        <0xF0>       byte tokens, which tokenizers made from SentencePiece have, wait until the run of them ends,
                     because one broken byte spoils how the whole run decodes
        "Hel"        text that a stop string may begin with waits until it is clear whether it does

    (`tokenizers` has a DecodeStream, which handles the first kind. With the second kind it raises,
    or shows text that the decoded whole does not have.)
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        stops: Sequence[str] = (),
        silent: frozenset[int] | None = None,
    ):
        """`silent` holds the ids of the special tokens, if the caller has them already."""
        self._tokenizer = tokenizer
        self._begun = dict.fromkeys(stops, "")  # as much of each as the text so far ends with
        self._silent = special_ids(tokenizer) if silent is None else silent
        self._falls_back = tokenizer.token_to_id("<0x00>") is not None
        self._context: list[int] = []  # the last tokens whose text is final
        self._behind = ""  # their text
        self._waiting: list[int] = []  # the tokens whose text is not
        self._held = ""  # text that is final, but may be the beginning of a stop string
        self._decoded = 0  # how many characters are final
        self.stop: str | None = None  # the stop string that has come

    @property
    def open(self) -> int:
        """So many tokens have yet to become text: they may be completed by the next one, or stay
        broken."""
        return len(self._waiting)

    def push(self, token: int) -> str:
        """The text that can be shown now, perhaps none. `stop` then says which stop string has
        come."""
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
        piece = text[len(self._behind) :]
        self._context += self._waiting[:count]
        self._behind = text
        self._waiting = self._waiting[count:]
        # Not every time, because the text of a context that only grows is known
        if len(self._context) > 16:
            self._context = self._context[-1:] if self._falls_back else self._context[-4:]
            self._behind = self._decode(self._context)
        return self._release(piece)

    def _decode(self, tokens: list[int]) -> str:
        tokens = [token for token in tokens if token not in self._silent]
        return calmly(self._tokenizer.decode, tokens, skip_special_tokens=False)

    def _complete(self) -> int:
        """How many of the waiting tokens form a text that no later token can change; not all of
        them do.

        A character has at most four bytes, so a cut is tried before each of the last four tokens.
        If the two sides of a cut decode to the same text as the whole does, the text before the cut
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
                behind = len(grown) - grown.index(stop) - len(stop)  # so many characters follow
                found.append((behind, len(stop), stop))
            # Each stop string has its own: who looked through all that is held, for each token, would
            # look through the longest stop string as often as there are others
            self._begun[stop] = beginning(stop, grown)
        if found:
            # The stop string that is complete first counts, however the text was cut into tokens
            behind, length, self.stop = max(found)
            self._held = ""
            return text[: len(text) - behind - length]
        self._held = max(self._begun.values(), key=len, default="")
        return text.removesuffix(self._held)

    def finish(self, tokens: list[int]) -> str:
        """What is left at the end: a text that did not become a stop string, and the bytes of a
        broken character."""
        if self.stop is not None:
            return ""
        shown = self._release(self._decode(tokens)[self._decoded :])
        held, self._held = self._held, ""
        return shown + held


def calmly(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function of the tokenizer. If its Rust panics, that is no Exception: it would pass all
    that catch one."""
    try:
        return function(*arguments, **options)
    except BaseException as error:
        # Ctrl-C is none, nor is the SystemExit of a signal's handler
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizer failed: {error}") from None


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    )
