"""Numbers from outside: which ones are accepted, and how the others are refused."""

import math

import pytest

from base.validation import one_line, printable, read_real, read_whole, real, whole

HUGE = pytest.param(10**5000, id="more digits than Python prints")


def test_valid_number_has_the_right_type():
    assert whole("n", 1, 1) == 1 and whole("n", 10**30, 1) == 10**30
    assert [whole("n", n, -5, 5) for n in (-5, 5)] == [-5, 5]
    assert real("x", 1, 0, 1) == 1.0 and isinstance(real("x", 1, 0, 1), float)
    assert read_whole("n", " +12 ", 1, 12) == 12
    assert read_real("x", "1", 0, 1) == 1.0 and isinstance(read_real("x", "1", 0, 1), float)


@pytest.mark.parametrize("value", [0, 11, 1.0, True, "5", None, math.nan, math.inf, [5], HUGE])
def test_bad_whole_number_is_refused(value):
    with pytest.raises(ValueError, match=r"^n = .*, but it must be a whole number from 1 to 10$"):
        whole("n", value, 1, 10)


@pytest.mark.parametrize("value", [-0.1, 1.1, True, "0.5", None, math.nan, -math.inf, HUGE])
def test_bad_number_is_refused(value):
    with pytest.raises(ValueError, match=r"^x = .*, but it must be a number from 0 to 1$"):
        real("x", value, 0, 1)


@pytest.mark.parametrize("text", ["", "many", "1.5.0", "0", "11", "nan", "9" * 5000])
def test_bad_text_is_quoted(text):
    for read in (read_whole, read_real):
        with pytest.raises(
            ValueError, match=f"^--n = '{text[:39]}.*, but it must be .*from 1 to 10$"
        ):
            read("--n", text, 1, 10)


@pytest.mark.parametrize(
    ("check", "value", "least", "most", "line"),
    [
        (whole, 0, 1, math.inf, "n = 0, but it must be a whole number of at least 1"),
        (read_whole, "0", 1, 1000, "n = '0', but it must be a whole number from 1 to 1,000"),
        (real, math.nan, 0, 1_000_000, "n = nan, but it must be a number from 0 to 1,000,000"),
        (read_real, "x", 0.01, 1000, "n = 'x', but it must be a number from 0.01 to 1,000"),
    ],
)
def test_error_names_setting_value_and_limits(check, value, least, most, line):
    with pytest.raises(ValueError) as caught:
        check("n", value, least, most)
    assert str(caught.value) == line


@pytest.mark.parametrize("check", [whole, real, read_whole, read_real])
def test_a_value_as_long_as_a_book_is_cut_short(check):
    with pytest.raises(ValueError) as caught:
        check("n", "a word\n" * 5000, 1, 10)
    assert (
        len(str(caught.value)) < 120 and "…" in str(caught.value) and "\n" not in str(caught.value)
    )


def test_long_message_keeps_both_ends():
    """The message starts with the file and ends with the remedy. Only the text from the file, between the
    two, is shortened."""
    line = one_line("config.json:\n\tkind = " + "x\x1b[31m\u202e " * 5000 + "; download it again.")
    assert line.startswith("config.json: kind = x") and line.endswith("; download it again.")
    assert len(line) < 410 and "…" in line and line == printable(line) and "\n" not in line
    assert one_line("short") == "short" and len(one_line("y" * 400)) == 400


def test_an_exception_is_named_if_it_says_nothing():
    assert one_line(MemoryError()) == "MemoryError" and one_line(ValueError(" a\n b ")) == "a b"
    assert one_line(ValueError("\n")) == "ValueError"
