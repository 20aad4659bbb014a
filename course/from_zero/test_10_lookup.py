"""Stage 10: speculative decoding, by prompt lookup. You write `draft`, `accept` and `answer` in
lookup.py.

In the drawings a token is a letter.
"""

import random

import pytest

from course.from_zero.reference import lookup
from course.from_zero.small_llama import Rows, forward, tokenizer
from kernels.device import mx


def letters(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def tokens(text: str) -> list[int]:
    return [*map(ord, text)]


@pytest.mark.about("draft")
def test_draft():
    """The draft is up to `most` tokens that followed the newest two when these last occurred."""
    texts = ("abcdab", "abxabyab", "abxxab", "aaaa", "abcabd", "ab", "a")
    found = [f"{text}: {letters(lookup.draft(tokens(text), 3))}" for text in texts]
    assert found == [
        "abcdab: cda",
        "abxabyab: yab",
        "abxxab: xxa",
        "aaaa: a",
        "abcabd: ",
        "ab: ",
        "a: ",
    ]
    assert lookup.draft(tokens("abcdab"), 0) == []


@pytest.mark.about("accept")
def test_accept():
    """Drafted tokens are accepted while the model agrees; then comes the model's own token."""
    cases = (("", "x"), ("fox", "foxy"), ("fox", "fo.y"), ("fox", "f.xy"), ("fox", ".oxy"))
    found = [f"{a!r} {b!r}: {letters(lookup.accept(tokens(a), tokens(b)))}" for a, b in cases]
    assert found == [
        "'' 'x': x",
        "'fox' 'foxy': foxy",
        "'fox' 'fo.y': fo.",
        "'fox' 'f.xy': f.",
        "'fox' '.oxy': .",
    ]


class Model:
    """A model that says `wanted` after `prompt`, nonsense otherwise, and draws its steps."""

    def __init__(self, prompt: str, wanted: str):
        self.text = tokens(prompt + wanted)
        self.prompt = len(prompt)
        self.rows: list[int] = []  # the tokens whose keys and values are kept
        self.lines: list[str] = []
        self.vain = 0

    def step(self, ids: list[int], start: int) -> list[int]:
        assert start <= len(self.rows), f"row {len(self.rows)} is skipped: {start} was written"
        assert len(self.lines) < 200, "the answer does not end"
        self.rows[start:] = ids
        ends = range(start + 1, len(self.rows) + 1)
        said = [self.text[n] if self.rows[:n] == self.text[:n] else ord("?") for n in ends]
        self.lines.append(f"row {start:>2}: {letters(ids):<8} -> {letters(said)}")
        return said

    def answer(self, most: int, max_tokens: int = 99) -> str:
        return letters(lookup.answer(self.step, self.text[: self.prompt], most, max_tokens, {46}))


@pytest.mark.about("answer")
def test_steps():
    """The newest token and its draft are processed together, and the next step starts after the last
    accepted token."""
    model = Model("owl,fox;", "owl,fix,fox. ")
    said = model.answer(4)
    assert model.lines == [
        "row  0: owl,fox; -> wl,fox;o",
        "row  8: o        -> w",
        "row  9: wl,fo    -> l,fi?",
        "row 13: i        -> x",
        "row 14: x        -> ,",
        "row 15: ,        -> f",
        "row 16: fix,f    -> o????",
        "row 17: ox;ow    -> x.???",
    ]
    assert said == "owl,fix,fox."


@pytest.mark.about("answer")
def test_ends():
    """An answer may end within a draft: at an end token or at max_tokens."""
    assert Model("ab.c", "ab. ").answer(5) == "ab."
    assert Model("abcdab", "cdabcdab. ").answer(4, max_tokens=3) == "cda"
    model = Model("abcdab", "cdabcdab. ")
    assert model.answer(9, max_tokens=6) == "cdabcd"
    assert len(model.rows) <= 6 + 6, "a row is written that no token may need"


def test_random():
    """Whatever is drafted, the answer is the same as without drafts."""
    dice = random.Random(7)
    for number in range(60):
        prompt = "".join(dice.choices("abc", k=dice.randint(1, 9)))
        wanted = "".join(dice.choices("abc", k=dice.randint(0, 20))) + ". "
        plain = Model(prompt, wanted).answer(0)
        assert (number, Model(prompt, wanted).answer(dice.randint(1, 6))) == (number, plain)
        assert plain == wanted[:-1]


def demo_answer(prompt: str, most: int) -> tuple[list[int], list[int]]:
    """Return the answer, and the number of tokens that go in at each step after the prompt."""
    rows = Rows()
    sizes = []

    def step(ids: list[int], start: int) -> list[int]:
        sizes.append(len(ids))
        return mx.argmax(forward(ids, [rows.at(start, len(ids))]), axis=-1).tolist()

    said = lookup.answer(step, tokenizer().ask(prompt), most, 60, tokenizer().end_tokens)
    return said, sizes[1:]


def test_fewer_steps():
    """The demo model's answers are the same, in fewer steps where a text repeats itself."""
    print("                                          steps      wasted rows")
    for prompt in (
        "Repeat: the owl and the fox went to the lake.",
        "Is fox in this list: owl, cat, dog, bee, hen, pig?",
        "Count from 3 to 20.",
    ):
        plain, before = demo_answer(prompt, 0)
        said, after = demo_answer(prompt, 4)
        assert said == plain
        assert len(after) < len(before)
        vain = sum(after) - len(before)
        print(f"{prompt[:38]:<38}   {len(before):>2} -> {len(after):>2}   {vain:>9}")
    rows = 8 * sum(after) / len(after)
    print(f"eight answers at once that count: {rows:.0f} rows a step, in place of 8")
