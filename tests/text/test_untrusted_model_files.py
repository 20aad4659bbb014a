"""Model folders that would use up all memory, or crash the process, at the first prompt. They are refused with
one line, or the harmful part is not used."""

import base64
import json
import sys

import pytest
import tokenizers
from checkpoints import make_tokenizer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from base.untrusted_files import ModelError
from nanobatch import Tokenizer
from text import tokenizer as tokens
from text import untrusted_model_files

no_limit_of_memory = pytest.mark.skipif(
    sys.platform == "darwin", reason="macOS does not limit a process's memory"
)
RARE = normalizers.Sequence([normalizers.Replace("ʘ", "ʘʘ") for _ in range(40)])
DECODED = decoders.Sequence([decoders.ByteLevel(), *[decoders.Replace("e", "ee")] * 30])
# The first number is the size of a table, for which the library allocates 4 GB
CHARSMAP = base64.b64encode(b"\xff\xff\xff\x7f" + bytes(64)).decode()


def with_charsmap(tokenizer: str) -> str:
    fields = json.loads(tokenizer)
    fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    return json.dumps(fields)


def hostile(name: str) -> str:
    tokenizer = make_tokenizer()
    if name == "rare":
        tokenizer.normalizer = RARE
    elif name == "decoder":
        tokenizer.decoder = DECODED
    elif name == "padding":
        tokenizer.enable_padding(length=10**10)
    return with_charsmap(tokenizer.to_str()) if name == "charsmap" else tokenizer.to_str()


@no_limit_of_memory
@pytest.mark.parametrize("name", ["rare", "decoder", "charsmap"])
def test_greedy_tokenizer_is_refused(tmp_path, monkeypatch, name):
    """Regression: 5 KB of JSON used up all memory at the first prompt, or aborted the process."""
    limits = untrusted_model_files.LIMITS._replace(seconds=1.5, memory=2**27)
    monkeypatch.setattr(untrusted_model_files, "LIMITS", limits)
    (tmp_path / "tokenizer.json").write_text(hostile(name))
    with pytest.raises(ModelError) as refused:
        Tokenizer(tmp_path, 300)
    assert "the tokenizer takes more than " in str(refused.value)
    assert len(str(refused.value)) < 400


def test_padding_is_disabled(tmp_path):
    (tmp_path / "tokenizer.json").write_text(hostile("padding"))
    assert Tokenizer(tmp_path, 300).encode("Hi") == [256, 39, 72]


def test_panicking_tokenizer_is_served(tmp_path):
    """Each prompt on which the tokenizer panics is refused with one line."""
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="cannot read this prompt"):
        Tokenizer(tmp_path, 300).encode("a" * 30 + "b")


def test_template_with_huge_output_is_refused(tmp_path):
    """Regression: a template of 30 bytes rendered 20 MB for a question, and tokenizing them took 3.4 GB."""
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text('{{ "a "*10000000 }}')
    text = Tokenizer(tmp_path, 300)
    assert "makes 20,000,000 characters for a sample conversation" in text.unfit
    assert not text.has_template and text.encode("Hi")


@no_limit_of_memory
def test_renderings_are_tokenized_in_the_check(tmp_path, monkeypatch):
    """The check tokenizes what the template renders, because the tokenizer may need too much memory for a
    character that only the template writes."""
    limits = untrusted_model_files.LIMITS._replace(seconds=1.5, memory=2**27)
    monkeypatch.setattr(untrusted_model_files, "LIMITS", limits)
    tokenizer = make_tokenizer()
    letter = "\U0001d70a"
    doubled = [normalizers.Replace(letter, letter * 2) for _ in range(40)]
    tokenizer.normalizer = normalizers.Sequence(doubled)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path, 300).encode("Hi")
    (tmp_path / "chat_template.jinja").write_text(f"{{{{ messages[0].content }}}}{letter}")
    with pytest.raises(ModelError, match="the tokenizer takes more than"):
        Tokenizer(tmp_path, 300)


def test_tokenizer_is_checked_once(tmp_path, monkeypatch):
    """A tokenizer is checked only when its model is first loaded. The demo's, which came with the program, is
    not checked."""
    monkeypatch.setattr(untrusted_model_files, "PASSED", set())
    jobs = []

    def run(child: untrusted_model_files.Sandbox, job: tuple) -> None:
        jobs.append(job[0])

    monkeypatch.setattr(untrusted_model_files.Sandbox, "run", run)
    Tokenizer(tokens.OURS, 1536)
    assert jobs == []
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        Tokenizer(tmp_path, 300)
    assert jobs == ["tokenizer"]
