"""Check a model folder's chat template and tokenizer in a child process before using them.

Both come from an untrusted author. A template of 30 bytes can produce gigabytes of text. A tokenizer
of 5 KB, with 40 rules that each double a letter, exhausts memory at the first prompt; one with a
broken table aborts the process. So a child process renders conversations and encodes and decodes
texts within `LIMITS` (`base/sandbox.py`). A template or tokenizer that exceeds them is not used.

An author can still hide a fault that only a rare text triggers, so run a server for untrusted models
with its own memory limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from base.sandbox import BusyError, LimitError, Sandbox, SandboxLimits
from base.untrusted_files import LARGEST
from base.validation import one_line
from models.gguf_file import head_of, is_gguf

LIMITS = SandboxLimits(seconds=10.0, patience=30.0, memory=512 * 2**20)
LONGEST = LARGEST[
    "chat_template.jinja"
]  # maximum template length in characters: the file's limit in bytes
RENDERED = 2**20  # maximum length of a rendered sample conversation in characters
SOME = 4096  # tokens decoded in one call
PASSED: set[bytes] = set()  # digests of tokenizers that passed, with their texts


def turns(count: int, content: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i in range(count)]


# A question, a system prompt, and a long conversation, which reveals superlinear growth
SAMPLES = (
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


class TemplateChecker:
    """A child process that checks templates and tokenizers: `with TemplateChecker() as child`."""

    def __enter__(self) -> TemplateChecker:
        self._child = Sandbox(__name__, None, LIMITS)
        return self

    def __exit__(self, *exception) -> None:
        self._child.close()

    def template(self, source: str, samples: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
        """Return the fault of a template, phrased to follow "the chat template" (empty if it has
        none), and its renderings."""
        if len(source) > LONGEST:
            return f"is {len(source):,} characters long, more than {LONGEST:,}", []
        try:
            fault, texts = self._child.run(("template", source, list(samples)))
        except LimitError as error:
            return f"{error} for a sample conversation", []
        except BusyError as error:
            return f"cannot be checked ({error})", []
        return fault, texts

    def tokenizer(self, path: Path, texts: Sequence[str]) -> str:
        """Return the fault of a tokenizer, phrased to follow "the tokenizer"; empty if it has none."""
        own = head_of(path) if is_gguf(path) else path.read_bytes()
        whole = own + "\n".join(texts).encode(errors="replace")
        digest = hashlib.sha256(whole).digest()
        if digest in PASSED:
            return ""
        try:
            self._child.run(("tokenizer", str(path), list(texts)))
        except LimitError as error:
            return str(error)
        except BusyError as error:
            return f"cannot be checked ({error})"
        PASSED.add(digest)
        return ""


# --- in the child ---------------------------------------------------------------------------------


def prepare(_: None) -> Callable[[list], Any]:
    jobs = {"template": render_all, "tokenizer": encode_and_decode}
    return lambda job: jobs[job[0]](*job[1:])


def render_all(source: str, samples: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the fault of a template (empty if it has none) and its renderings."""
    from text.chat_template import PATIENCE, PatienceError, Template

    texts: list[str] = []
    try:
        template = Template(source)
    except Exception as error:
        return f"is broken ({one_line(error)})", []
    for variables in samples:
        try:
            text = template.render(variables)
        except MemoryError:
            raise
        except PatienceError:
            return f"takes more than {PATIENCE:g} s for a sample conversation", []
        except Exception:  # the template refuses this conversation, but may accept others
            continue
        if len(text) > RENDERED:
            return f"makes {len(text):,} characters for a sample conversation", []
        texts.append(text)
    return "", texts


def encode_and_decode(path: str, texts: Sequence[str]) -> None:
    """Encode and decode texts, and decode all tokens.

    Only the child's limits matter here. Exceptions are ignored, because in the parent process they
    would fail just one request.
    """
    from tokenizers import Tokenizer

    if is_gguf(Path(path)):
        from text.gguf_tokenizer import GgufText

        tokenizer = try_call(lambda: GgufText(Path(path)).tokenizer())
    else:
        tokenizer = try_call(Tokenizer.from_file, path)
    if tokenizer is None:
        return
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in (*texts, *TEXTS):
        encoded = try_call(tokenizer.encode, text)
        if encoded:
            try_call(tokenizer.decode, encoded.ids)
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    for start in range(0, len(ids), SOME):
        try_call(tokenizer.decode, ids[start : start + SOME], skip_special_tokens=False)


def try_call(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function. Return None if it raises."""
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except BaseException:  # a Rust panic is not an Exception
        return None
