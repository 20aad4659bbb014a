"""Build a tokenizer of the library `tokenizers` from the metadata of a GGUF file.

"gpt2" is byte-level BPE: the file contains tokens and merges, and names the pre-tokenizer that splits
a text into words. "llama" is SentencePiece's BPE: tokens have scores, from which the merges follow.
"gemma4" is the same, but with merges in the file. The file comes from an untrusted author, so its
tokenizer is checked in a child process (`untrusted_model_files.py`) before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from base.untrusted_files import ModelError
from base.validation import shown
from models.gguf_file import read_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)  # token types
MODELS = ("gpt2", "llama", "gemma4")
PREFIX = "tokenizer.ggml."
SPACE = "\u2581"  # SentencePiece's space
# Control tokens that end an answer even if no field names them
END_OF_TURN = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>"}
END_OF_TURN |= {"<|endoftext|>", "<|end_of_text|>", "<turn|>", "<|return|>", "<|call|>"}
END_OF_TURN |= {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}  # code models end a file with these


class WordSplit(NamedTuple):
    """A pre-tokenizer: how a text is split into words before merging."""

    pattern: str = ""  # empty: GPT-2's pattern
    digits: bool = False  # split each digit off as a separate word
    composed: bool = False  # normalize the text to NFC first
    whole: bool = False  # a word that is a token skips the merges
    bos: bool = False  # a text begins with BOS, unless the file says otherwise


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def pattern(number: str, letters: str = r"\p{L}") -> str:
    """Return a pattern for contractions, letters, numbers, punctuation, line breaks and spaces.

    `letters`: the characters of a word.
    """
    return (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{number}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def capitals(after: str, number: str) -> str:
    """Return a pattern that also starts a new word where a capital follows a lowercase letter.

    `after`: a pattern for what may follow a word.
    `number`: a pattern for numbers.
    """
    before, big, small = (
        r"[^\r\n\p{L}\p{N}]?",
        r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
        r"\p{Ll}\p{Lm}\p{Lo}\p{M}",
    )
    return (
        rf"{before}[{big}]*[{small}]+{after}|{before}[{big}]+[{small}]*{after}|{number}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


LLAMA = WordSplit(pattern(r"\p{N}{1,3}"), whole=True, bos=True)
WORDS = {
    "gpt-2": WordSplit(),
    "smollm": WordSplit(digits=True),
    "qwen2": WordSplit(pattern(r"\p{N}"), composed=True),
    "qwen35": WordSplit(pattern(r"\p{N}", r"\p{L}\p{M}"), composed=True),
    "deepseek-r1-qwen": WordSplit(pattern(r"\p{N}")),
    "llama-bpe": LLAMA,
    "llama3": LLAMA,
    "llama-v3": LLAMA,
    "lfm2": LLAMA,
    "falcon3": LLAMA,
    "pixtral": LLAMA,
    "tekken": WordSplit(capitals("", r"\p{N}"), whole=True, bos=True),
    "gpt-4o": WordSplit(capitals(f"{CONTRACTIONS}?", r"\p{N}{1,3}"), whole=True),  # gpt-oss
    "dbrx": WordSplit(pattern(r"\p{N}{1,3}")),  # OLMo 2 and 3, Granite 4
    "smaug-bpe": WordSplit(pattern(r"\p{N}{1,3}")),  # models made from Llama 3
    "refact": WordSplit(digits=True),  # Granite
    "starcoder": WordSplit(digits=True),
}


class GgufText:
    """The tokenizer, chat template and end tokens in a file's metadata."""

    def __init__(self, path: Path):
        self.path = path
        self.file = read_gguf(path)
        self.fields = self.file.fields
        kind = self.fields.get(f"{PREFIX}model")
        if kind not in MODELS:
            raise self._refuse("model", kind, MODELS)
        self.is_bytewise = kind == "gpt2"
        self.has_merges = kind != "llama"
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int)
        if self.is_bytewise:
            name = self.fields.get(f"{PREFIX}pre")
            if not isinstance(name, str) or name not in WORDS:
                raise self._refuse("pre", name, WORDS)
            self.words = WORDS[name]
        if not self.has_merges:
            self.scores = self._list("scores", float)

    def _refuse(self, name: str, value: Any, known: Iterable[str]) -> ModelError:
        said = f"{PREFIX}{name} = {shown(value)} is not supported. Supported: {', '.join(known)}."
        return ModelError(f"{self.path}: {said}", f"tokenizer {shown(value)} not supported")

    def _list(self, name: str, kind: type) -> list:
        """Return a field that has a value for each token."""
        found = self.fields.get(f"{PREFIX}{name}")
        is_list = isinstance(found, list) and found and all(type(each) is kind for each in found)
        if not is_list or (name != "tokens" and len(found) != len(self.tokens)):
            raise ModelError(
                f"{self.path}: {PREFIX}{name} is not a list with a value for each token; "
                "take another file of this model."
            )
        return found

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer. With broken tables the library may raise any exception."""
        made = self._bytewise() if self.is_bytewise else self._sentencepiece()
        kinds = list(zip(self.tokens, self.types, strict=True))
        special = [AddedToken(text, special=True) for text, kind in kinds if kind == CONTROL]
        made.add_special_tokens(special)
        # Added tokens with SPACE are matched in normalized text, where SPACE has replaced spaces
        own = [text for text, kind in kinds if kind == USER_DEFINED]
        if not self.is_bytewise and self.has_merges:  # the merges do not yield runs of line breaks
            own += [text for text in self.tokens if text and not text.strip("\n")]
        made.add_tokens([AddedToken(text, normalized=SPACE in text) for text in own])
        is_usual = self.words.bos if self.is_bytewise else True
        bos = self._special("bos")
        if self.fields.get(f"{PREFIX}add_bos_token", is_usual) and bos is not None:
            name = self.tokens[bos]
            made.post_processor = processors.TemplateProcessing(
                single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)]
            )
        return made

    @property
    def _numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def _merges(self) -> list[tuple[str, ...]]:
        if not self.has_merges:
            return merges_of(self.tokens, self.types, self.scores)
        return [tuple(merge.split(" ", 1)) for merge in self.fields.get(f"{PREFIX}merges") or ()]

    def _bytewise(self) -> Tokenizer:
        words = self.words
        made = Tokenizer(models.BPE(self._numbers, self._merges, ignore_merges=words.whole))
        if words.composed:
            made.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Digits(individual_digits=True)] * words.digits
        if words.pattern:
            steps.append(pre_tokenizers.Split(Regex(words.pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.pattern))
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> Tokenizer:
        types = self.types
        made = Tokenizer(
            models.BPE(
                self._numbers,
                self._merges,
                unk_token=self.tokens[types.index(UNKNOWN)] if UNKNOWN in types else None,
                fuse_unk=True,
                byte_fallback=BYTE in types,
            )
        )
        before = [normalizers.Replace(" ", SPACE)]
        after = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.fields.get(f"{PREFIX}add_space_prefix", not self.has_merges):
            before.insert(0, normalizers.Prepend(SPACE))
            after.append(decoders.Strip(" ", 1, 0))
        made.normalizer = normalizers.Sequence(before)
        made.decoder = decoders.Sequence(after)
        return made

    def _special(self, name: str) -> int | None:
        number = self.fields.get(f"{PREFIX}{name}_token_id")
        if number is not None and not (type(number) is int and 0 <= number < len(self.tokens)):
            raise ModelError(
                f"{self.path}: {PREFIX}{name}_token_id = {shown(number)}, but there are "
                f"{len(self.tokens)} tokens; take another file of this model."
            )
        return number

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer: those in the file's fields, and those in `END_OF_TURN`."""
        named = {self._special(name) for name in ("eos", "eot", "eom")}
        known = {
            number
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == CONTROL and token in END_OF_TURN
        }
        if {"<|return|>", "<|call|>"} <= {*self.tokens}:  # Harmony, where <|end|> ends a message
            known -= {self._numbers.get("<|end|>")}
        return frozenset(named - {None} | known)

    @property
    def config(self) -> dict[str, Any]:
        """The special tokens and chat templates, in the form of a tokenizer_config.json."""
        config: dict[str, Any] = {"chat_template": self.fields.get("tokenizer.chat_template")}
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        for name, theirs in names.items():
            number = self._special(theirs)
            if number is not None:
                config[f"{name}_token"] = self.tokens[number]
        for_tools = self.fields.get("tokenizer.chat_template.tool_use")
        if isinstance(for_tools, str):
            config["chat_template"] = [
                {"name": "default", "template": config["chat_template"]},
                {"name": "tool_use", "template": for_tools},
            ]
        return config


def merges_of(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by descending score."""
    numbers = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == NORMAL
    }
    found = []
    for token, number in numbers.items():
        for cut in range(1, len(token)):
            left, right = numbers.get(token[:cut]), numbers.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]
