"""Tokens to text: the stream joins to the whole text, shows no incomplete character, holds back stop strings,
and has a constant cost per token."""

import json
import random
from collections import Counter
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import tokenizers
from checkpoints import BOS, V, make_tokenizer
from harness import check
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from nanobatch import Engine, SamplingParams, Tokenizer
from text.detokenizer import StreamingDetokenizer, without_panics
from text.tokenizer import OURS, TooLongError

BROKEN = "\ufffd"  # what a decoder shows for invalid bytes
ALPHABETS = (
    "abcdefghij KLMNOP  0123456789.,;!?'\"-_/\\{}\n\t",
    "etaoin shrdlu ",
    "中文字符很多，这里是一些。日本語のテキスト한국어",
    "éàüßñçøæÞŁžαβγδЖдиשלוםمرحباไทยမြန်မာ▁\u00a0\u200b",
    ("e\u0301", "a\u0308\u0323", "n\u0303", "क्षि", "\u0301", "각"),
    ("😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "🇯🇵", "1️⃣", "𝔘", "𓀀", "\u200d", "\ufe0f"),
    (BROKEN, BROKEN * 2, "�a", "\x00", "\x7f"),
    "".join(map(chr, range(0x4E00, 0x9FFF, 5))),
    "".join(map(chr, range(0x1F300, 0x1F650))),
)


def random_text(rng: random.Random, longest: int = 24) -> str:
    """Return characters from one to three alphabets, in random order."""
    alphabets = rng.sample(ALPHABETS, rng.randint(1, 3))
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, longest)))


def corpus() -> list[str]:
    rng = random.Random(0)
    return [random_text(rng) for _ in range(2000)]


def byte_bpe() -> tokenizers.Tokenizer:
    """Train a byte-level BPE with merges, as in Llama 3 and Qwen: a token may end in the middle of a
    character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [AddedToken(t, special=True) for t in ("<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Train a BPE over characters, as in Llama 2: '▁' for a space, and one token per byte of unknown
    characters."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizer
    counts = Counter(char for text in corpus() for char in text if char not in f"{BROKEN}\n")
    # The trainer's own limit on the alphabet breaks ties at random
    known = sorted(counts, key=lambda char: (-counts[char], char))[:110]
    trainer = trainers.BpeTrainer(vocab_size=250, max_token_length=8, show_progress=False)
    trained.train_from_iterator(
        ["".join(char for char in text if char in known) for text in corpus()], trainer
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


TOKENIZERS = {
    "bytes": cache(make_tokenizer),
    "byte BPE": cache(byte_bpe),
    "sentencepiece": cache(sentencepiece),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def stream(
    tokenizer: tokenizers.Tokenizer, ids: list[int], stops: list[str] | None = None
) -> tuple[list[str], str, StreamingDetokenizer]:
    """Push ids up to a stop string. Return the pieces, the text that was held back until the end, and the
    stream."""
    text = StreamingDetokenizer(tokenizer, stops or [])
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stop is not None:
            break
    return pieces, text.finish(ids), text


# --- pieces and the whole text --------------------------------------------------------------------


def test_tokenizers_here_are_sharp():
    """The tokenizers have tokens that end within a character, and tokens of several characters, which the
    tests below need."""
    rng = random.Random(1)
    texts = [random_text(rng) for _ in range(300)]
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        singles = [tokenizer.decode([token]) for each in ids for token in each]
        assert sum(BROKEN in single for single in singles) > 1000, name
        long = [single for single in singles if len(single) > 1]
        broken = sum(BROKEN in single for single in long)
        assert name == "bytes" or len(long) - broken > 300, name
        assert name != "byte BPE" or broken > 100


@every_tokenizer
def test_random_texts_stream_as_they_decode(name):
    """The pieces join to the whole text. (Decoding each token separately shows U+FFFD for parts of
    characters, and loses the spaces of SentencePiece.)"""
    tokenizer, rng = TOKENIZERS[name](), random.Random(2)
    for _ in range(500):
        text = random_text(rng)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        # Check the reference first
        assert whole == text.replace("▁", " " if name == "sentencepiece" else "▁")
        pieces, rest, _ = stream(tokenizer, ids)
        assert "".join(pieces) + rest == whole, (text, pieces, rest)
        assert BROKEN in text or not any(BROKEN in piece for piece in pieces), (text, pieces)


@every_tokenizer
def test_text_comes_with_the_token_that_completes_it(name):
    """Text is shown as soon as its last token arrives, not only at the end."""
    tokenizer, rng, shown = TOKENIZERS[name](), random.Random(3), 0
    letters = "etaoinshrd" if name == "sentencepiece" else "etaé中😀\n "
    for _ in range(150):
        text = "".join(rng.choices(letters, k=30))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = StreamingDetokenizer(tokenizer)
        joined = ""
        for n, token in enumerate(ids, start=1):
            joined += whole.push(token)
            decoded = tokenizer.decode(ids[:n])
            assert joined == decoded or decoded.endswith(BROKEN)
            shown += joined == decoded
        assert joined == text and whole.finish(ids) == ""
    assert shown > 1500


@every_tokenizer
def test_random_tokens_stream_as_they_decode(name):
    """Invalid UTF-8, which a model may write at a high temperature, neither raises nor gets lost."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(4)
    # An embedding is often padded beyond the ids in use
    size = tokenizer.get_vocab_size() + 8
    byte_ids = range(3, 259) if name == "sentencepiece" else range(256)
    broken = 0
    for _ in range(500):
        ids = [
            rng.choice(byte_ids) if rng.random() < 0.7 else rng.randrange(size)
            for _ in range(rng.randint(1, 12))
        ]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        broken += BROKEN in whole
        pieces, rest, _ = stream(tokenizer, ids)
        assert "".join(pieces) + rest == whole, (ids, pieces, rest)
    assert broken > 250


def pieces_of(texts: list[str], count: int = 400) -> list[str]:
    """Return parts of texts, some of one character and some of several, as a vocabulary without training."""
    rng, pieces = random.Random(9), {" ", "a", "e"}
    while len(pieces) < count:
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        pieces.add(text[start : start + rng.choice((1, 1, 2, 3, 6))])
    return sorted(pieces)


def by_number(pieces: list[str]) -> dict[str, int]:
    return {piece: n for n, piece in enumerate(dict.fromkeys(["<unk>", *pieces]))}


def other_kinds() -> dict[str, tuple[models.Model, decoders.Decoder | None]]:
    """Return other kinds of published tokenizers, with their decoders."""
    texts = corpus()
    plain = pieces_of(texts)
    split_output = [piece.replace(" ", "▁") for piece in plain]
    words = [*(word for text in texts[:300] for word in text.split()), *plain]
    parts = [f"##{piece}" for piece in plain[::2]]
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)]
    unigram = models.Unigram(
        [("<unk>", 0.0), *((piece, -1.0 - len(piece)) for piece in dict.fromkeys(split_output))], 0
    )
    fallback = models.Unigram(
        [(piece, -2.0) for piece in by_number([*bytewise, *split_output])], 0, byte_fallback=True
    )
    spaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return {
        "Unigram": (unigram, decoders.Metaspace()),
        "Unigram with bytes": (
            fallback,
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        ),
        "WordPiece": (
            models.WordPiece(by_number(plain + parts), unk_token="<unk>"),
            decoders.WordPiece(),
        ),
        "WordLevel": (models.WordLevel(by_number(words), unk_token="<unk>"), None),
        "BPE with metaspace": (
            models.BPE(by_number(split_output), []),
            decoders.Metaspace(prepend_scheme="first"),
        ),
        "BPE with bytes": (
            models.BPE(by_number([*bytewise, *split_output]), [], byte_fallback=True),
            decoders.Sequence(spaced),
        ),
        "BPE with an end of words": (
            models.BPE(by_number([*plain, *(f"{piece}</w>" for piece in plain[::2])]), []),
            decoders.BPEDecoder("</w>"),
        ),
    }


@pytest.mark.parametrize("kind", [*other_kinds()])
def test_every_tokenizer_streams_as_it_decodes(kind):
    """Each kind treats spaces, bytes and ends of words differently, and all have added tokens."""
    model, decoder = other_kinds()[kind]
    tokenizer = tokenizers.Tokenizer(model)
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "</s>", "<|end|>")]
    )
    tokenizer.add_tokens(
        [AddedToken("<tool>"), AddedToken(" é ", normalized=False), AddedToken("中😀")]
    )
    rng, size, long = random.Random(10), tokenizer.get_vocab_size() + 5, 0
    for _ in range(150):
        some = [rng.randrange(size) for _ in range(4)]  # so that tokens repeat
        ids = [
            rng.choice(some) if rng.random() < 0.2 else rng.randrange(size)
            for _ in range(rng.randint(1, 60))
        ]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        pieces, rest, _ = stream(tokenizer, ids)
        assert "".join(pieces) + rest == whole, (ids, pieces, rest)
        long += len(whole) > 20
    assert long > 75, "there was hardly any text"


# --- stop strings ---------------------------------------------------------------------------------


def expected(text: str, stops: list[str]) -> tuple[str, bool, int]:
    """Return the text to show, whether a stop string occurs, and the number of characters up to its end, by
    brute force."""
    for end in range(1, len(text) + 1):
        # Of the stop strings that are complete here, the longest one starts first
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True, end
    return text, False, len(text)


def byte_names() -> list[str]:
    """Return for each byte the character that represents it in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


class Pieces:
    """A tokenizer with a token for every range of one text's bytes, so that the text can be split anywhere."""

    def __init__(self, text: str):
        names = "".join(byte_names()[byte] for byte in text.encode())
        self.length = len(names)
        spans = [
            (start, end)
            for start in range(self.length)
            for end in range(start + 1, self.length + 1)
        ]
        vocab = {
            piece: n for n, piece in enumerate(sorted({names[start:end] for start, end in spans}))
        }
        self.ids = {(start, end): vocab[names[start:end]] for start, end in spans}
        self.tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=names[0]))
        self.tokenizer.decoder = decoders.ByteLevel()

    def cut(self, places: tuple[int, ...]) -> list[int]:
        return [self.ids[span] for span in pairwise((0, *places, self.length))]


def random_stops(rng: random.Random, text: str, alphabet: str) -> list[str]:
    """Return one to four stop strings: parts of the text, parts with an ending that does not occur, and
    random strings."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        start, length = rng.randrange(len(text)), rng.randint(1, 5)
        part = text[start : start + length]
        other = "".join(rng.choice(alphabet) for _ in range(length))
        stops.append(
            rng.choice((part, part + rng.choice(alphabet), other + rng.choice(alphabet) * 2))
        )
    return stops


def all_cuts(rng: random.Random, length: int) -> list[tuple[int, ...]]:
    """Return every way to split a short text into tokens. A longer text is split at each single place, at all
    places, and at some random ones."""
    places = range(1, length)
    if length <= 7:
        return [cut for count in range(length) for cut in combinations(places, count)]
    some = [tuple(sorted(rng.sample(places, rng.randint(2, length - 2)))) for _ in range(30)]
    return [(), *((place,) for place in places), tuple(places), *some]


def test_stop_string_cut_at_every_place():
    """A stop string is found wherever it is split into tokens, and no part of it is shown."""
    rng = random.Random(7)
    cases = stopped_cases = cut_stops = 0
    for _ in range(120):
        alphabet = rng.choice(("ab", "abc", "a\n ", "aé", "é中", "a😀", "🇩🇪👩", "ab<|>"))
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 10)))
        stops = random_stops(rng, text, alphabet)
        shown, stops_here, end = expected(text, stops)
        begin, end = len(shown.encode()), len(text[:end].encode())
        whole_characters = {len(text[:n].encode()) for n in range(len(text) + 1)}
        pieces = Pieces(text)
        for cut in all_cuts(rng, pieces.length):
            places = (*cut, pieces.length)
            out, rest, streamed = stream(pieces.tokenizer, pieces.cut(cut), stops)
            case = (text, stops, cut, out, shown)
            assert "".join(out) + rest == shown, case
            assert (streamed.stop is not None) == stops_here, case
            in_time = next(each for each in places if each >= end and each in whole_characters)
            assert not stops_here or places[len(out) - 1] <= in_time, case
            cases += 1
            stopped_cases += stops_here
            cut_stops += stops_here and any(begin < place < end for place in cut)
    assert cases > 3_000 and cases - stopped_cases > 600
    assert stopped_cases > 2_000 and cut_stops > 1_500


def test_cost_is_independent_of_stop_string_length():
    """Regression: 16 stop strings of 1,000 characters took 5 ms a token, in the thread that steps for all
    requests. This test counts how often a text is compared with a stop string."""

    class Counted(str):
        looks = 0
        __hash__ = str.__hash__

        def startswith(self, text):
            Counted.looks += 1
            return str.startswith(self, text)

    stops = [Counted("a" * 999 + "b"), Counted("ab" * 499 + "ac"), Counted("b" * 999 + "c")]
    stream = StreamingDetokenizer(make_tokenizer(), stops)
    text = "ab" * 2500 + "a" * 5000
    *tokens, last = make_tokenizer().encode(text + "b", add_special_tokens=False).ids
    said = "".join(map(stream.push, tokens))
    assert said == text[:-999] and 10_000 < Counted.looks < 100_000
    stream.push(last)
    assert stream.stop == stops[0]


@every_tokenizer
def test_stop_strings_with_a_real_tokenizer(name):
    """With a real tokenizer, merges, spaces and byte tokens decide where a text is split."""
    tokenizer, rng, stopped = TOKENIZERS[name](), random.Random(8), 0
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids)
        stops = random_stops(rng, whole, text)
        shown, stops_here, _ = expected(whole, stops)
        out, rest, streamed = stream(tokenizer, ids, stops)
        assert "".join(out) + rest == shown, (text, stops, out, shown)
        assert (streamed.stop is not None) == stops_here, (text, stops)
        stopped += stops_here
    assert 90 < stopped < 270


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("say END now", ["END"], "say "),
        # A partial match ("aba" at 0) overlaps the real one, two characters later
        ("ababac", ["abac"], "ab"),
        ("xabcx", ["abcx", "bc"], "xa"),  # the first one to be complete, although it starts later
        ("xabcx", ["bc", "abc"], "x"),  # both end at the same character: the one that starts first
        ("aaaa", ["aaa"], ""),
        ("the en", ["end"], "the en"),  # not a stop string after all
        ("\n\n", ["\n\n"], ""),
        ("a👍🏽b", ["🏽"], "a👍"),
    ],
)
def test_stop_strings_by_hand(text, stops, shown):
    """The tests above compare with `expected`, and these cases check `expected` itself."""
    assert expected(text, stops)[:2] == (shown, text != shown)
    pieces = Pieces(text)
    ids = pieces.cut(tuple(range(1, pieces.length)))
    out, rest, streamed = stream(pieces.tokenizer, ids, stops)
    assert "".join(out) + rest == shown and (streamed.stop is not None) == (text != shown)


# --- cost -----------------------------------------------------------------------------------------

ENDLESS = {
    "text": "The quick brown fox, 中文 and 😀.\n",
    "text with a stop string that is always about to come": "a",
    "broken characters": b"\xff",
}


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: list[int], **options) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **options)

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


def endless_ids(name: str, kind: str) -> list[int]:
    tokenizer, text = TOKENIZERS[name](), ENDLESS[kind]
    if isinstance(text, bytes):
        byte = "<0xFF>" if name == "sentencepiece" else byte_names()[text[0]]
        return [tokenizer.token_to_id(byte)]
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ENDLESS)
@every_tokenizer
def test_token_costs_the_same_late_as_early(name, kind):
    """The stream does not decode the whole answer again for each token, which would make long answers
    quadratic."""
    tokenizer, ids = Counted(TOKENIZERS[name]()), endless_ids(name, kind)
    text = StreamingDetokenizer(tokenizer, ["a" * 40 + "b"])
    for n in range(1000):
        text.push(ids[n % len(ids)])
    assert tokenizer.decoded < 60 * 1000


# --- BOS ------------------------------------------------------------------------------------------


def make_text(folder: Path, adds_bos: bool, **config) -> Tokenizer:
    tokenizer = make_tokenizer()
    if not adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder, tokenizer.get_vocab_size())


@pytest.mark.parametrize(
    "bos", ["<s>", {"content": "<s>", "lstrip": False, "__type": "AddedToken"}]
)
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("begins_with_bos", [True, False])
def test_prompt_has_one_bos(tmp_path, begins_with_bos, adds_bos, bos):
    """A text copied from a rendered template starts with `<s>`. With two of them, the prompt is unlike
    anything that a model was trained on.

    If neither the text nor the tokenizer adds one, the prompt has none: models such as Qwen are trained
    without it.
    """
    text = make_text(tmp_path, adds_bos, bos_token=bos)
    ids = text.encode("<s>Hé" if begins_with_bos else "Hé")
    assert ids.count(BOS) == (begins_with_bos or adds_bos)
    assert ids[ids.count(BOS) :] == make_tokenizer().encode("Hé", add_special_tokens=False).ids
    assert len(text.encode("")) == adds_bos and text.encode("<s>") == [BOS]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_only_a_leading_bos_is_dropped(tmp_path, adds_bos):
    """Only the first BOS is dropped: a few-shot prompt may start each example with `<s>`."""
    text = make_text(tmp_path, adds_bos, bos_token="<s>")
    assert text.encode("a<s>b<s><s>").count(BOS) == 3 + adds_bos
    # Without a BOS in the config, none is removed
    assert make_text(tmp_path, adds_bos).encode("<s><s>a").count(BOS) == 2 + adds_bos


# --- tokenizers that fail late --------------------------------------------------------------------

WORDS = {"hello": 0, "world": 1}
FAIL_AT_ENCODE = {
    "WordLevel without its [UNK]": models.WordLevel(WORDS, unk_token="[UNK]"),
    "Unigram without unk_id": models.Unigram([("hello", -1.0), ("world", -1.0)]),
    "a regex that never ends, which panics": models.BPE(WORDS, []),
}


def late_failure(folder: Path, name: str) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(FAIL_AT_ENCODE[name])
    if "regex" in name:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, V)


@pytest.mark.parametrize("name", FAIL_AT_ENCODE)
def test_unreadable_prompt_is_refused_alone(parts, tmp_path, name, capfd):
    """The tokenizer raises a bare Exception, which no caller catches, or panics, which is not even an
    Exception. Both are reported as a ValueError."""
    text = late_failure(tmp_path, name)
    with Engine(parts[0], text, slots=2, max_len=64) as engine:
        alone = (
            engine.submit([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).result().tokens
        )
        neighbour = engine.submit([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        with pytest.raises(
            ValueError, match=r"cannot read this prompt \(.+\); rephrase it"
        ) as caught:
            engine.submit("a" * 30 + "b")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        assert neighbour.result().tokens == alone
        check(engine)
    assert capfd.readouterr().err.count("panicked") == ("panics" in name), (
        "so this was the panic that it is meant to be"
    )


def panicking() -> tokenizers.Tokenizer:
    """Return a tokenizer whose decoder panics at an empty token: at token 1 immediately, and at token 2,
    which is held back as a byte, only at the end of the answer."""
    vocabulary = {"hello": 0, "": 1, "<0x41>": 2, "<0x00>": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="hello"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("<0x41>", ""), decoders.Strip("w", 3, 3)]
    )
    return tokenizer


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_system_exit_is_no_panic(ending):
    """Regression: if SIGTERM arrived while the tokenizer ran, its handler's SystemExit became the error of
    one request, and was lost."""

    def interrupted(*arguments, **options):
        raise ending(143)

    with pytest.raises(ending):
        without_panics(interrupted, [1])


def test_undecodable_token_ends_its_request_alone(parts, tmp_path):
    """Regression: a panic while a cancelled request's last text was decoded escaped from `cancel`, because it
    is not an Exception."""
    panicking().save(str(tmp_path / "tokenizer.json"))
    with Engine(parts[0], Tokenizer(tmp_path, V), slots=2, max_len=128) as engine:

        def says(token: int, count: int) -> SamplingParams:
            return SamplingParams(max_tokens=count, logit_bias={token: 1e6}, ignore_eos=True)

        for token, count in ((1, 1), (2, 4)):  # number of tokens up to the panic
            failing, neighbour = (
                engine.submit([5, 6], says(token, 4)),
                engine.submit([5, 6], says(0, 4)),
            )
            result = failing.result()
            assert (result.finish_reason, result.tokens) == ("error", [token] * count)
            assert "index out of bounds" in result.error and "\n" not in result.error
            assert (
                neighbour.result().text == "hellohellohellohello"
                and neighbour.finish_reason == "length"
            )
            check(engine)
        cancelled = engine.submit([5, 6], says(2, 50))
        while not cancelled.tokens:
            engine.step()
        cancelled.cancel()
        assert cancelled.finish_reason == "cancelled"
        assert engine.submit([5, 6], says(0, 4)).result().finish_reason == "length"
        check(engine)
        closed = engine.submit([5, 6], says(2, 50))
        while not closed.tokens:
            engine.step()
    assert closed.finish_reason == "cancelled"


def test_prompt_of_unknown_tokens_is_refused(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "fox": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    text = Tokenizer(tmp_path, 2)
    assert text.ask("fox") == [1]
    with pytest.raises(ValueError, match="covers no character of '你好'") as caught:
        text.ask("你好")
    assert "\n" not in str(caught.value)


def test_oversized_prompt_is_refused_after_a_part(monkeypatch):
    """Regression: 4 MB of text were tokenized, which takes 1.4 GB, before they were refused. Test 300
    random texts and limits."""
    monkeypatch.setattr("text.tokenizer.FIRST", 64)
    text = Tokenizer(OURS, 1536)
    dice = random.Random(1)
    pieces = ["the fox ", "lantern", " ", "Zürich ", "中", "}{", "aaaa", "\n", "<|end|>"]
    refused = 0
    for _ in range(300):
        long = "".join(dice.choices(pieces, dice.choices(range(1, 10), k=9), k=dice.randrange(900)))
        room = dice.choice((4, 16, 64, 256))
        whole = text.encode(long)
        try:
            assert text.encode(long, room) == whole
        except TooLongError as error:
            assert room <= error.tokens <= len(whole)
            refused += 1
        else:
            assert len(long) <= max(64, 8 * room) or len(whole) <= 3 * room
    assert 50 < refused < 250, refused
