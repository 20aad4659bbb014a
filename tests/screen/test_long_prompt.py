"""A prompt that takes minutes. The screen used to show 0.00 tok/s and an empty chart until it was
prefilled."""

from screen_stage import Stage, like_golden, on_screen

from screen.draw import status
from screen.pages import conversation

LONG = [97] * 60_000  # a chunk of 16 tokens takes 5 ms


def a_stage() -> Stage:
    return Stage(slots=4, max_len=90_000)


@on_screen((120, 40), make=a_stage)
async def test_the_screen_during_a_long_prompt_is_as_drawn(it):
    it.stage.engine.submit(LONG)
    await it.turns(600)
    assert "prompt tok/s" in it.text() and " 0.00 tok/s" not in it.text()
    assert "9,584/60,000 " in it.text() and "reading: 9,584 of" in it.text()
    assert "prompt tokens/s" in it.text()
    like_golden("long-prompt-120x40", it.text())


def test_beside_a_long_prompt_both_rates_are_told():
    stage = a_stage().load()
    stage.engine.submit(LONG)
    stage.obey("a short one")
    stage.turns(450)
    (line,) = stage.lines(status.draw_status, 200, 1)
    assert " tok/s" in line and " prompt tok/s" in line
    assert "0.00" not in line


def test_a_conversation_tells_how_far_its_question_is():
    stage = a_stage().load()
    stage.session.has_chats = True
    stage.obey("a" * 60_000)
    stage.turns(450)
    said = "\n".join(stage.lines(conversation.draw, 100, 20))
    assert "reading: 7,184 of 60,000 tokens, 3,200 tokens/s, about " in said
