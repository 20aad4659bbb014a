"""Everything is readable in every theme, and without colours."""

import pytest
from screen_stage import Stage, show
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from screen.draw import style
from screen.draw.style import BLOCKED, DECODE, EMPTY, HELD, PREFILL


def contrast(a: Color, b: Color) -> float:
    """Return the contrast as the web's accessibility guidelines define it: 1 is none, 21 is black on white,
    and 4.5 is easy to read."""

    def light(color: Color) -> float:
        parts = [
            x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in color.normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    return (max(light(a), light(b)) + 0.05) / (min(light(a), light(b)) + 0.05)


@pytest.mark.parametrize("name", sorted(BUILTIN_THEMES))
def test_words_can_be_read_in_every_theme(name):
    p = style.Palette.from_theme(BUILTIN_THEMES[name])
    for words, back, least in (
        (p.text, p.back, 5),
        (p.text, p.bar, 5),
        (p.muted, p.back, 3.5),
        (p.accent, p.bar, 3.5),
    ):
        assert contrast(Color.parse(words), Color.parse(back)) >= least - 0.1, (name, words, back)
    assert contrast(Color.parse(p.bad), Color.parse(p.back)) >= 3.4
    for hue in style.HUES:
        assert contrast(Color.parse(style.text_color_on(hue)), Color.parse(hue)) > 4.4


def test_prefill_can_be_seen_on_light_and_on_dark():
    """Regression: yellow was nearly invisible on white."""
    for p in (style.LIGHT, style.DARK):
        for request in range(1, 20):
            cell = p.cell(PREFILL, request)
            hue, back = (
                Color.parse(color.get_truecolor().hex) for color in (cell.color, cell.bgcolor)
            )
            assert contrast(hue, Color.parse(p.back)) > 1.8 and contrast(hue, back) > 1.25, (
                p.back,
                request,
            )


def test_without_colour_textures_tell_the_phases_apart(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(it):
        await it.press("b", turns=60)
        await it.pilot.pause()
        for line in it.app.screen._compositor.render_strips():
            for segment in line:
                for color in (segment.style.color, segment.style.bgcolor):
                    assert color is None or color.triplet is None or len(set(color.triplet)) == 1, (
                        segment
                    )
        assert {"▒", "█", "╳"} <= set(it.text())
        assert len({style.GLYPHS[kind] for kind in (PREFILL, DECODE, HELD, BLOCKED, EMPTY)}) == 5

    show(scenario, Stage(policy="static"))
