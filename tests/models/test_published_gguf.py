"""The real GGUF files of two published models: the bits of their weights, and their tokenizers."""

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from gguf_models import Dequantized
from parity import same_bits

from models import load
from models.load import read_model
from text.gguf_tokenizer import GgufText
from text.tokenizer import Tokenizer

TEXTS = 2000


@pytest.fixture
def file(published) -> Path:
    found = published / "model.gguf"
    if not found.exists():
        pytest.skip(f"{found} is not there")
    return found


def test_a_published_file_gives_the_bits_of_its_dequantized_weights(file, monkeypatch):
    prompt = np.random.default_rng(1).integers(0, 40_000, 24).tolist()
    ours = read_model(file, activations=32)
    assert "bits in groups of 32" in ours.cost.form
    monkeypatch.setattr(load, "GgufWeights", Dequantized)
    wide = read_model(file, "float32")
    assert wide.cost.form == "float32"
    assert same_bits(ours, wide, prompt)


ALPHABETS = ((32, 127), (0xA0, 0x250), (0x300, 0x340), (0x370, 0x600), (0x900, 0x980))
ALPHABETS += ((0x3040, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAD00), (0x1F300, 0x1F700))
PIECES = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "'s",
    "'LL",
    "123",
    "4567890",
    "...",
    "<think>",
    "▁",
]


def mixed(dice: random.Random, special: list[str]) -> str:
    """Return a random text of words, numbers, signs, whitespace, many alphabets, and special tokens."""
    pieces = []
    for _ in range(dice.randrange(1, 30)):
        first, end = dice.choice(ALPHABETS)
        word = "".join(chr(dice.randrange(first, end)) for _ in range(dice.randrange(1, 6)))
        pieces.append(dice.choice([word, word, dice.choice(PIECES), dice.choice(special)]))
        pieces.append(dice.choice(["", " ", "Hello", " the", "def f(x):"]))
    return "".join(pieces)


def test_a_published_files_tokenizer_has_the_ids_of_hugging_faces(file):
    own = GgufText(file).tokenizer()
    reference = tokenizers.Tokenizer.from_file(str(file.with_name("tokenizer.json")))
    special = [token.content for token in reference.get_added_tokens_decoder().values()]
    dice = random.Random(0)
    for _ in range(TEXTS):
        text = mixed(dice, special)
        ids = reference.encode(text).ids
        assert own.encode(text).ids == ids, text
        assert own.decode(ids) == reference.decode(ids)


def test_a_published_files_chat_template_writes_what_the_folders_does(file):
    parts = Tokenizer(file, 10**6), Tokenizer(file.parent, 10**6)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    talk.append({"role": "user", "content": "What is 2 + 2?"})
    own, reference = (text.encode_chat(talk) for text in parts)
    assert own == reference
    assert parts[0].end_tokens >= parts[1].end_tokens
