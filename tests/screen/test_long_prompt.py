"""A prompt that takes minutes: the screen showed 0.00 tok/s and an empty chart all the while."""

from itertools import pairwise

import pytest
from screen_stage import Stage, at_every_size, drawn, like_golden, plain, show

from runtime.prefill_progress import PrefillProgress
from screen.draw import charts, slots, status
from screen.pages import conversation

LONG = [97] * 60_000  # a chunk of 16 tokens takes 5 ms


def a_stage() -> Stage:
    return Stage(slots=4, max_len=90_000)


@at_every_size
def test_the_screen_during_a_long_prompt_is_as_drawn(size):
    async def scenario(it):
        it.stage.engine.submit(LONG)
        await it.turns(600)
        assert "prompt tok/s" in it.text() and " 0.00 tok/s" not in it.text()
        assert "9,584/60,000 16 s" in it.text() and "reading: 9,584 of" in it.text()
        if size == (120, 40):
            assert "prompt tokens/s" in it.text()
            like_golden("long-prompt-120x40", it.text())

    show(scenario, a_stage(), size)


def test_beside_a_long_prompt_both_rates_are_told():
    stage = a_stage().load()
    stage.engine.submit(LONG)
    stage.session.obey("a short one")
    stage.turns(60)
    (line,) = plain(drawn(status.draw_status, stage.state, 200, 1))
    assert " tok/s" in line and " prompt tok/s" in line
    assert "0.00" not in line


def test_the_chart_returns_to_the_tokens_of_answers():
    stage = a_stage().load()
    stage.engine.submit(LONG)
    titles = []
    while stage.engine.has_work and len(titles) < 3_000:
        stage.turns(20)
        titles.append(plain(drawn(charts.draw_rate, stage.state, 60, 8))[0].split()[1])
        if stage.state.view.engine.output_tokens > 200:
            break
    changes = [a for a, b in pairwise(titles) if a != b]
    assert (
        titles[0] == "tokens/s" and titles[-1] == "tokens/s" and changes == ["tokens/s", "prompt"]
    )


@pytest.mark.parametrize(
    "prefill, wide, narrow",
    [
        (
            PrefillProgress(11_339, 18_813, 0, 60, 182.3, 355),
            "11,339/18,813 6 min    182",
            "6 min left",
        ),
        (PrefillProgress(101_339, 118_813, 0, 60, 182.3, 735), "13 min left    182", "13 min left"),
        (PrefillProgress(0, 18_813, 0, 60), "0/18,813      –", "18,813"),
    ],
)
def test_the_figures_of_a_slot_find_room(prefill, wide, narrow):
    text = slots.prefill_figures(prefill, (11, 9, 7))
    assert text.strip() == wide and len(text) == 27
    text = slots.prefill_figures(prefill, (11,))
    assert text.strip() == narrow and len(text) == 11


def test_a_conversation_tells_how_far_its_question_is():
    stage = a_stage().load()
    stage.session.has_chats = True
    stage.session.obey("a" * 60_000)
    stage.turns(40)
    said = "\n".join(plain(drawn(conversation.draw, stage.state, 100, 20)))
    assert "reading: 624 of 60,000 tokens, 3,200 tokens/s, about 19 s" in said
