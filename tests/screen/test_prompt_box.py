"""The prompt box: it stays open, grows with its text, and recalls earlier prompts."""

import stat

from screen_stage import Stage, on_screen, show
from textual import events

from cli.terminal_chat import History


@on_screen()
async def test_the_box_stays_open_after_enter(it):
    """Regression: each question needed `i` again, and text typed without it was lost."""

    await it.press("i", *"one", "enter", *"two", "enter", turns=3)
    assert [it.stage.prompt(1), it.stage.prompt(2)] == ["one", "two"]
    await it.press(*"/pause", "enter", *"b", turns=1)
    assert it.state.view.paused and it.app.prompt.value == "b"
    await it.press("ctrl+u", "escape", "slash", *"resume", "enter", turns=1)
    assert not it.state.view.paused and it.app.focused is None


@on_screen()
async def test_up_and_down_recall_prompts(it):
    box = it.app.prompt
    await it.press("i", *"one", "enter", *"two", "enter", *"dra", turns=0)
    for key, value in (
        ("up", "two"),
        ("up", "one"),
        ("up", "one"),
        ("down", "two"),
        ("down", "dra"),
        ("down", "dra"),
    ):
        await it.press(key, turns=0)
        assert box.value == value, key
    await it.press("up", "enter", "up", turns=1)
    assert it.stage.prompt(3) == box.value == "two"


@on_screen()
async def test_ctrl_j_or_a_backslash_begins_another_line(it):
    for number, keys in enumerate((["ctrl+j"], ["alt+enter"], ["backslash", "enter"]), start=1):
        await it.press("i", "ctrl+u", *"one", *keys, *"two", turns=0)
        assert it.app.prompt.value == "one\ntwo"
        await it.press("up", "end", *keys, turns=0)
        assert it.app.prompt.value == "one\n\ntwo"
        await it.press("enter", "escape", turns=1)
        assert it.stage.prompt(number) == "one\n\ntwo"


@on_screen()
async def test_a_multiline_prompt_is_visible_and_editable(it):
    before = it.app.prompt.region
    await it.press("i", "ctrl+u", *"first", "ctrl+j", *"second", turns=0)
    it.app.post_message(events.Paste(" x\r\n\x1b[31mthird"))
    await it.pilot.pause()
    assert it.app.prompt.region.height == 3 and it.app.prompt.region.bottom == before.bottom
    assert all(line in it.text() for line in ("first ", "second x", "␛[31mthird"))
    await it.press("up", "up", *"!", turns=0)
    assert it.app.prompt.value.startswith("first!")
    await it.press("escape", turns=0)
    assert it.app.prompt.region == before, "it covers panes only while it is used"
    await it.press("i", "enter", "up", turns=1)
    assert it.stage.prompt(1) == it.app.prompt.value == "first!\nsecond x\n␛[31mthird"


def test_the_history_is_private_and_saved_at_once(tmp_path):
    file = tmp_path / "state" / "history"
    one = History(file)
    other = History(file)
    one.add("first")
    other.add("second\nline")
    other.add("second\nline")
    one.add("  ")
    assert History(file).questions == ["first", "second\nline"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)] == [0o600, 0o700]


def test_commands_are_recalled_but_not_saved(tmp_path):
    """The screen and `ask.py --chat` share one history file, but neither supports the other's commands."""
    history = History(tmp_path / "history")
    for line in ("/burst 24", "Why?"):
        history.add(line)
    assert history.questions == ["/burst 24", "Why?"]
    assert History(tmp_path / "history").questions == ["Why?"]


def test_the_history_is_bounded_and_may_be_broken(tmp_path):
    file = tmp_path / "history"
    file.write_bytes(b"".join(b"%d\n" % i for i in range(1500)) + b"\xff\n")
    questions = History(file).questions
    assert len(questions) == 1000 and questions[-2:] == ["1499", "�"]
    assert file.read_bytes().count(b"\n") == 1000
    History(tmp_path).add("a folder is no file")
    History(None).add("kept nowhere")


def test_saved_prompts_are_recalled(tmp_path):
    stage = Stage()
    History(tmp_path / "history").add("of yesterday")
    stage.earlier = History(tmp_path / "history")

    async def scenario(it):
        await it.press("i", "up", "enter", turns=2)
        assert it.stage.prompt(1) == "of yesterday"

    show(scenario, stage)
