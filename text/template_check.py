"""A model folder's chat template and tokenizer, tried in a child process before this process uses
them.

The problem. Both come from anywhere. A template of 30 bytes makes a text of gigabytes. A tokenizer
of 5 KB, with 40 rules that each double a letter, takes all memory at the first prompt; one with a
broken table aborts the process.

The way out. A child process renders conversations with the template, reads the tokenizer, and has
it encode and decode: the renderings, a long text, and a text of many alphabets. The system holds the
child to `LIMITS` (`trials.py`), so what exceeds them is refused when the model is loaded.

What remains. An author can hide from the trials what only a rare text brings about. Give a server
of models that you do not trust a limit of memory of its own.

Where next: `template.py`, which renders; `tokens.py`, which asks for the trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.files import LARGEST
from runtime.gguf_file import head_of, is_gguf
from runtime.validation import one_line
from text.sandbox import Allowance, BusyError, LimitError, Trials

LIMITS = Allowance(seconds=10.0, patience=30.0, memory=512 * 2**20)
LONGEST = LARGEST["chat_template.jinja"]  # a template, wherever its text lies
RENDERED = 2**20  # characters that a template may make of a trial conversation
SOME = 4096  # tokens that are decoded together
PASSED: set[bytes] = set()  # the digests of tokenizers and texts that a child has survived


def turns(count: int, content: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i in range(count)]


# A question; one with a system prompt; and a long talk, with which what grows too fast shows.
TRIALS = (
    turns(1, "What is a KV cache?"),
    [{"role": "system", "content": "Be terse."}, *turns(3, "Grüße, 中文 👩‍👩‍👧\n\n{{ 1 }}")],
    turns(101, "Some words of a turn. " * 20),
)
ALPHABETS = (range(0x20, 0x3000), range(0x4E00, 0x4F00), range(0xAC00, 0xAD00))
EMOJI = range(0x1F300, 0x1FB00)
TEXTS = (
    "Some words of a text, 12,345 of them.\n" * 2500,
    "".join(chr(point) for points in (*ALPHABETS, EMOJI) for point in points),
)


class TryOut:
    """Tries templates and tokenizers in a child process: `with TryOut() as child`."""

    def __enter__(self) -> TryOut:
        self._child = Trials("text.template_check", None, LIMITS)
        return self

    def __exit__(self, *exception) -> None:
        self._child.close()

    def template(self, source: str, trials: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
        """What is wrong with a template, in words that follow "the chat template" (empty if
        nothing is), and its renderings."""
        if len(source) > LONGEST:
            return f"is {len(source):,} characters long, more than {LONGEST:,}", []
        fault, found = self._run("template", source, list(trials))
        if fault:
            return f"{fault} for a trial conversation" if found is None else fault, []
        return found["fault"], found["texts"]

    def tokenizer(self, path: Path, texts: Sequence[str]) -> str:
        """What is wrong with a tokenizer, in words that follow "the tokenizer"; empty if nothing
        is."""
        own = head_of(path) if is_gguf(path) else path.read_bytes()
        whole = own + "\n".join(texts).encode(errors="replace")
        digest = hashlib.sha256(whole).digest()
        if digest in PASSED:
            return ""
        fault, _ = self._run("tokenizer", str(path), list(texts))
        if not fault:
            PASSED.add(digest)
        return fault

    def _run(self, *job: Any) -> tuple[str, Any]:
        """Words for a limit that was met, and what the child has found."""
        try:
            return "", self._child.run(job)
        except LimitError as error:
            return str(error), None
        except BusyError as error:
            return f"cannot be tried ({error})", ""


# --- in the child -------------------------------------------------------------------------------


def prepare(_: None) -> Callable[[list], Any]:
    jobs = {"template": render_all, "tokenizer": encode_and_decode}
    return lambda job: jobs[job[0]](*job[1:])


def render_all(source: str, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is wrong with a template, and its renderings."""
    from text.chat_template import PATIENCE, PatienceError, Template

    texts: list[str] = []
    fault = ""
    try:
        template = Template(source)
    except Exception as error:
        return {"fault": f"is broken ({one_line(error)})", "texts": texts}
    for variables in trials:
        try:
            text = template.render(variables)
        except MemoryError:
            raise
        except PatienceError:
            fault = f"takes more than {PATIENCE:g} s for a trial conversation"
            break
        except Exception:  # it refuses this conversation, and may well take others
            continue
        if len(text) > RENDERED:
            fault = f"makes {len(text):,} characters of a trial conversation"
            break
        texts.append(text)
    return {"fault": fault, "texts": texts}


def encode_and_decode(path: str, texts: Sequence[str]) -> None:
    """Only the limits of the child are of interest: what raises here does so in its parent, too,
    where it ends one request."""
    from tokenizers import Tokenizer

    if is_gguf(Path(path)):
        from text.gguf_tokenizer import GgufText

        tokenizer = gently(lambda: GgufText(Path(path)).tokenizer())
    else:
        tokenizer = gently(Tokenizer.from_file, path)
    if tokenizer is None:
        return
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in (*texts, *TEXTS):
        encoded = gently(tokenizer.encode, text)
        if encoded:
            gently(tokenizer.decode, encoded.ids)
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    for start in range(0, len(ids), SOME):
        gently(tokenizer.decode, ids[start : start + SOME], skip_special_tokens=False)


def gently(function: Callable, *arguments: Any, **options: Any) -> Any:
    """None if it raises."""
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except BaseException:  # a panic in the tokenizer's Rust is no Exception
        return None
