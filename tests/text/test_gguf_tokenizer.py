"""Tokenizers in GGUF files, compared with the libraries that they come from."""

import io
import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from checkpoints import make_tokenizer
from gguf import GGUFWriter
from gguf_models import make_pair
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from base.untrusted_files import ModelError
from text.gguf_tokenizer import GgufText
from text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = 300
CORPUS = [line for line in (ROOT / "GLOSSARY.md").read_text().splitlines() if line]
CORPUS += [
    "don't they'LL we're 12345 67 3.14",
    "123123 4567 8123456 " * 20,
    "नमस्ते " * 20,  # with combining marks
    "x = [1, 2]\n\n\treturn y\r\n",
    "中文字 é à ü ß 😀😀",
]
UNREACHED = "Ġqqzebra"  # a token that no merges produce
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
OWN = ["<tool_call>", "<think>"]


def texts(seed: int, special: list[str]) -> list[str]:
    """Return random texts of corpus pieces, signs, spaces, many alphabets and special tokens."""
    dice = random.Random(seed)
    found = []
    for _ in range(TEXTS):
        pieces = []
        for _ in range(dice.randrange(1, 12)):
            line = dice.choice(CORPUS)
            start = dice.randrange(len(line))
            signs = "".join(chr(dice.choice((dice.randrange(32, 127), dice.randrange(160, 60000)))))
            spaces = dice.choice([" ", "  ", "   ", "\n", "\n\n", " \n", "\t"])
            words = line[start : start + dice.randrange(12)]
            odd = dice.choice(["e\u0301", "\u1112\u1161", " qqzebra", " 123123", "8123456", "नमस्ते"])
            pieces.append(
                dice.choice([words, words, words, odd, signs, spaces, dice.choice(special)])
            )
        text = "".join(pieces)
        if not any(0xD800 <= ord(character) < 0xE000 for character in text):
            found.append(text)
    return found


def write(file: Path, kind: str, tokens: list[str], types: list[int], **fields) -> Path:
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        writer.add_key_value(
            f"tokenizer.ggml.{name}", value, gguf.GGUFValueType.get_type(value), None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def alike(own: tokenizers.Tokenizer, reference: tokenizers.Tokenizer, special: list[str]) -> None:
    for text in texts(1, special):
        ids = reference.encode(text).ids
        assert own.encode(text).ids == ids, text
        assert own.decode(ids) == reference.decode(ids), text


# --- byte-level BPE -------------------------------------------------------------------------------

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {  # as in each model's tokenizer.json
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(CONTRACTIONS + r"\p{N}" + REST), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen35": [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
                r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "gpt-4o": [
        pre_tokenizers.Split(
            Regex(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(CONTRACTIONS + r"\p{N}{1,3}" + REST), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.mark.parametrize("name", CUTS)
def test_byte_level_bpe_has_the_ids_of_the_library(name, tmp_path):
    reference = tokenizers.Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.Sequence(CUTS[name])
    reference.normalizer = normalizers.NFC() if name.startswith("qwen") else None
    reference.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    reference.train_from_iterator(CORPUS, trainer)
    vocabulary = reference.get_vocab() | {UNREACHED: reference.get_vocab_size()}
    merges = [tuple(pair) for pair in json.loads(reference.to_str())["model"]["merges"]]
    reference.model = models.BPE(vocabulary, merges, ignore_merges=name in ("llama-bpe", "gpt-4o"))
    reference.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    reference.add_tokens([AddedToken(text, normalized=False) for text in OWN])
    vocabulary = reference.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [3 if token in SPECIAL else 4 if token in OWN else 1 for token in tokens]
    fields = {
        "pre": name,
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": vocabulary["<s>"],
    }
    fields |= {"add_bos_token": False}
    own = GgufText(write(tmp_path / "a.gguf", "gpt2", tokens, types, **fields)).tokenizer()
    alike(own, reference, [*SPECIAL, *OWN])


# --- SentencePiece --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepieces_bpe_has_its_own_ids(prefix, tmp_path):
    """The reference is the sentencepiece library. It splits special tokens in a text, so the texts contain
    none."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=made,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<think>"],
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    size = range(reference.get_piece_size())
    tokens = [reference.id_to_piece(n) for n in size]
    types = [type_of(reference, n) for n in size]
    scores = [reference.get_score(n) for n in size]
    fields = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": prefix}
    text = GgufText(write(tmp_path / "a.gguf", "llama", tokens, types, **fields))
    own = text.tokenizer()
    assert text.end_tokens == {2}
    for text in texts(2, [" "]):
        ids = reference.encode(text)
        assert own.encode(text).ids == [1, *ids], text
        assert own.decode(ids) == reference.decode(ids), text


def test_gemma_4s_bpe_has_merges_in_the_file(tmp_path):
    """Spaces count as letters, unknown characters become bytes, and merges never cross line ends."""
    reference = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    named = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    named += ["\n" * n for n in range(1, 5)]
    words = pre_tokenizers.Split(Regex("▁|\n+"), "merged_with_next")
    reference.pre_tokenizer = words
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=named, show_progress=False)
    reference.train_from_iterator(CORPUS, trainer)
    made = json.loads(reference.to_str())["model"]
    merges = [*map(tuple, made["merges"])]
    vocabulary = made["vocab"]
    reference.model = models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)]
    fields = {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 2, "eos_token_id": 1}
    text = GgufText(write(tmp_path / "a.gguf", "gemma4", tokens, types, **fields))
    own = text.tokenizer()
    assert text.end_tokens == {1}
    for said in texts(3, ["\n\n\n", " "]):
        ids = reference.encode(said).ids
        assert own.encode(said).ids == [2, *ids], said
        assert own.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def type_of(reference: sentencepiece.SentencePieceProcessor, n: int) -> int:
    if reference.is_byte(n):
        return 6
    if reference.is_unknown(n):
        return 2
    if reference.is_control(n):
        return 3
    return 4 if reference.id_to_piece(n) == "<think>" else 1


# --- other metadata -------------------------------------------------------------------------------


def test_a_text_begins_with_bos_where_the_file_says_so(tmp_path):
    tokens = [*make_tokenizer().get_vocab(with_added_tokens=False), "<s>"]
    for pre, says, begins in (
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        fields = {"pre": pre, "bos_token_id": 256}
        fields |= {} if says is None else {"add_bos_token": says}
        file = write(tmp_path / "a.gguf", "gpt2", tokens, [1] * 256 + [3], **fields)
        ids = GgufText(file).tokenizer().encode("Hi").ids
        assert (ids[0] == 256) == begins and len(ids) == 2 + begins


def test_answers_end_where_llama_cpp_ends_them(tmp_path):
    """The end tokens are those whose ids are in the metadata fields, and control tokens with known names."""
    names = ["a", "</s>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>"]
    types = [1, 3, 3, 3, 1, 3]
    fields = {"pre": "gpt-2", "eos_token_id": 1, "eot_token_id": 0}
    file = write(tmp_path / "a.gguf", "gpt2", names, types, **fields)
    assert GgufText(file).end_tokens == {0, 1, 2, 3, 5}


def test_the_end_of_a_message_is_no_end_in_harmony(tmp_path):
    """In gpt-oss, <|end|> ends the reasoning but not the answer."""
    names = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    fields = {"pre": "gpt-4o", "eos_token_id": 1}
    file = write(tmp_path / "a.gguf", "gpt2", names, [1, 3, 3, 3, 3], **fields)
    assert GgufText(file).end_tokens == {1, 3, 4}


def test_the_files_chat_template_is_used_with_its_own_special_tokens(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for_tools = "{{ tools | length }}"
    fields = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": for_tools}
    file, _ = make_pair(tmp_path, num_hidden_layers=1, fields=fields)
    text = Tokenizer(file, 272)
    assert text.render([{"role": "user", "content": "Hi"}]) == "<s>Hi</s>"
    assert text.render([{"role": "user", "content": "Hi"}], [{"a": 1}]) == "1"


def test_a_template_goes_through_the_sandbox(tmp_path):
    source = "{{ 'x' * 3000000 }}"
    file, _ = make_pair(tmp_path, num_hidden_layers=1, fields={"tokenizer.chat_template": source})
    text = Tokenizer(file, 272)
    assert not text.has_template
    with pytest.raises(ModelError, match=r"model\.gguf: the chat template makes 3,000,000 char"):
        text.ask("Hi")
