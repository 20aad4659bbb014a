"""Which characters reach the terminal unchanged, and how the others are shown."""

import pytest
from screen_stage import plain

from screen.draw import style
from screen.draw.canvas import Canvas
from screen.draw.style import clean

# Unicode's property Default_Ignorable_Code_Point, which Python does not provide. `style.py` derives it
# from categories and names; this table is the reference.
IGNORABLE = (
    (0xAD, 0xAD),
    (0x34F, 0x34F),
    (0x61C, 0x61C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)


def test_what_draws_nothing_is_shown_as_such():
    """U+E0100, U+061C, U+FFF9, U+115F and U+3164 used to reach the terminal, because our lists lacked them."""
    codes = [code for first, last in IGNORABLE for code in range(first, last + 1)]
    codes += [0xFFF9, 0xFFFA, 0xFFFB, 0x2028, 0x2029, 0xD800, 0xDFFF, 0xFFFE, 0x1FFFF, 0x80, 0x9B]
    for code in codes:
        assert clean(f"a {chr(code)}b") == f"a <U+{code:04X}>b"
    assert len(codes) > 4000


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("\x1b[2J\x07\x7f", "␛[2J␇␡"),
        ("a\tb\r\nc", "a    b\nc"),
        # Terminals disagree on the width of joined characters
        ("👩‍👩‍👧 and 🏳️‍🌈", "👩👩👧 and 🏳🌈"),
        ("❤️ 1️⃣ ☎︎", "❤ 1⃣ ☎"),
        ("👋🏽 🇩🇪", "👋🏽 🇩🇪"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u062e"),  # Persian
        ("\u0915\u094d\u200d\u0937", "\u0915\u094d\u0937"),  # Hindi
        ("👩\u200d", "👩"),  # the rest has not arrived yet
        ("a\u200db", "a<U+200D>b"),
        ("👩\u200d\u200d👩", "👩<U+200D><U+200D>👩"),
        ("❤\ufe0f\ufe0f", "❤<U+FE0F>"),
        ("\ufe0fx", "<U+FE0F>x"),
        ("🏴\U000e0067\U000e007f", "🏴<U+E0067><U+E007F>"),  # invisible letters
        ("e\u0301 ü 日本 ן \u06dd", "e\u0301 ü 日本 ן \u06dd"),
        ("\U0001fae8 \U0001fadf", "\U0001fae8 \U0001fadf"),  # newer than Python 3.11
    ],
)
def test_ordinary_text_stays(text, drawn):
    assert clean(text) == drawn
    assert clean(drawn) == drawn


@pytest.mark.parametrize("rare", [(), (style.FAILED,)])
def test_the_legend_of_the_timeline_is_whole_at_120_columns(rare):
    """Regression: with "used 100 %", or after a failed step, the last glyphs had no labels."""
    on = Canvas(style.DARK, 73, 10)
    usual = (style.PREFILL, style.DECODE, style.BLOCKED, style.HELD, style.GHOST, style.EMPTY)
    kinds = (*rare, *usual)
    on.heading("Timeline", "used 100 %", on.legend(*kinds))
    (line,) = plain(on.lines)
    assert line.endswith("▒prefill █decode ╳blocked ┈held ▚ghost ·free ──")
    assert ("✗failed" if rare else "used 100 %") in line
