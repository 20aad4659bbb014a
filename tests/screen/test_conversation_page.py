"""A conversation on the screen: the model's input, the text on the screen, and that no question is lost."""

import re

from screen_stage import Show, Stage, on_screen, show
from word_engine import WordText

from screen.draw import style
from screen.draw.markdown import blocks, lines_of
from screen.workload import Settings


class TurnText(WordText):
    """Words with a chat template: each message follows the first letter of its role."""

    has_template = True

    def encode_chat(self, messages) -> list[int]:
        said = "".join(f"{message['role'][0]}:{message['content']};" for message in messages)
        self.shown.append(said)
        return [ord(letter) for letter in said]


class Talking(Stage):
    """A stage whose model supports conversations. Its answers are short, for quick tests."""

    def __init__(self, **options):
        super().__init__(**options)
        self.state.settings = Settings(max_tokens=24)

    def load_engine(self, report, clock, **options):
        engine = super().load_engine(report, clock, **options)
        engine.text.__class__ = TurnText
        engine.text.shown = self.shown = []  # each conversation, as the model receives it
        return engine


async def ended(it: Show) -> None:
    """Wait until all work is done."""
    for _ in range(400):
        await it.turns(40)
        if it.stage.session.settled:
            return
    raise AssertionError("this never ends")


async def ask(it: Show, question: str) -> None:
    it.app.prompt.put(question)
    await it.press("enter", turns=0)
    await ended(it)


def seen(it: Show) -> str:
    """Return the screen's content as one line."""
    return " ".join(it.text().split())


@on_screen((120, 40), make=Talking)
async def test_typing_opens_the_conversation(it):
    """Regression: a second question was sent without the first, so the model did not know a name in it."""
    await it.press("m", "y", turns=0)
    assert "Type a question" in it.text() and it.app.prompt.value == "my"
    await ask(it, 'Say "Ada".')
    await ask(it, "Who?")
    assert it.stage.shown == ['u:Say "Ada".;', 'u:Say "Ada".;a:Ada;u:Who?;']
    assert '❯ Say "Ada".' in it.text() and "❯ Who?" in it.text()


@on_screen((120, 40))
async def test_the_page_takes_a_question_at_once(it):
    """Regression: `o` said "Type a question", but "Tell" opened the settings and turned the load on."""
    await it.press("o", *"Tell me.", turns=0)
    assert it.app.prompt.value == "Tell me." and not it.state.view.load
    await it.press("enter", turns=0)
    await ended(it)
    assert "❯ Tell me." in it.text()
    await it.press("escape", "o", turns=0)  # among the panes `o` is a key again
    assert not it.state.chatting and it.app.focused is None
    await it.press("o", "escape", turns=0)
    assert "Type a question" not in it.text()


@on_screen((120, 40), make=Talking)
async def test_a_question_waits_and_escape_returns_it(it):
    await it.press("i", *"one", "enter", turns=4)
    await it.press(*"two", "enter", turns=1)
    assert it.stage.engine.sched.submitted == 1
    assert "❯ two" in it.text() and "waits for the answer above" in it.text()
    await it.press(*"three", "enter", turns=0)
    assert it.app.prompt.value == "three", "a refused prompt stays in the box"
    await it.press("ctrl+u", "escape", turns=3)
    assert it.state.ended[-1].reason == "cancelled" and "; stopped" in it.text()
    assert it.app.prompt.value == "two" and it.app.focused is it.app.prompt
    await it.press("enter", turns=4)
    assert it.stage.shown[-1].startswith("u:one;a:once upon")
    assert it.stage.shown[-1].endswith(";u:two;")
    await it.press(*"last", "enter", turns=0)
    await ended(it)
    assert it.stage.shown[-1].endswith(";u:last;"), "it is asked when its turn has come"
    await it.press("escape", turns=0)
    assert it.app.focused is None and it.state.chatting
    await it.press("escape", turns=0)
    assert not it.state.chatting


@on_screen((120, 40), make=Talking)
async def test_escape_while_paused_keeps_the_question(it):
    """Regression: the footer offered Space to resume, but Esc, which first has to leave the text box,
    discarded the question."""
    await it.press("space", "i", *"one", "enter", "escape", turns=2)
    assert it.app.focused is None and not it.state.ended
    await it.press("space", turns=0)
    await ended(it)
    assert it.state.ended[-1].reason != "cancelled"


@on_screen((120, 40), make=Talking)
async def test_several_conversations_run_at_once(it):
    await it.press("i", *"one", "enter", turns=4)
    await it.press(*"/new", "enter", *"two", "enter", turns=4)
    slots = it.state.view.engine.slots
    assert [slot.request for slot in slots[:2]] == [1, 2]
    assert "Conversation 2 of 2: two" in it.text() and it.state.selected == 1
    await it.press("ctrl+n", turns=1)
    assert "Conversation 1 of 2: one" in it.text() and it.state.selected == 0
    await it.press("escape", "escape", "n", turns=1)
    assert "Conversation 2 of 2: two" in it.text()
    await it.press("slash", *"next", "enter", turns=1)
    assert "Conversation 1 of 2: one" in it.text() and it.app.focused is None


@on_screen((120, 40), make=Talking)
async def test_system_message_and_asking_again(it):
    await it.press("i", *"/system Be brief.", "enter", turns=0)
    await ask(it, 'Say "x".')
    await it.press(*"/new", "enter", turns=0)
    await ask(it, 'Say "y".')
    await it.press("ctrl+r", turns=0)
    await ended(it)
    assert it.stage.shown == ['s:Be brief.;u:Say "x".;'] + 2 * ['s:Be brief.;u:Say "y".;']
    assert len(it.state.chats.open.turns) == 1 and "system: Be brief." in it.text()
    copied = []
    it.app.copy_to_clipboard = copied.append
    await it.press("escape", "y", turns=0)
    assert copied == ["y"]


def test_a_question_that_does_not_fit_waits_for_drop_or_new():
    """Nothing is truncated silently, and forgotten messages are marked."""
    filler = "x" * 70

    async def scenario(it):
        it.stage.obey("/set max=16")
        await it.press("i", turns=0)
        for letter in "ab":
            await ask(it, letter + filler)
        assert "tokens are left: /drop and /new make room" in seen(it)
        await ask(it, "c" + filler)
        assert "a slot holds 256, answer included: /drop forgets" in seen(it)
        assert it.app.prompt.value == "" and it.state.chats.open.waiting == "c" + filler
        await it.press(*"/drop", "enter", turns=0)
        await ended(it)
        assert it.stage.shown[-1].startswith(f"u:b{filler};a:once")
        mark = "left out: the model no longer sees this question and its answer"
        before, _, behind = it.text().partition(mark)
        assert "❯ b" not in before and "╌" not in it.text(), "no divider"
        assert behind.strip(" │\n").startswith("❯ a") and mark not in behind
        it.app.prompt.put("d" + filler)
        await it.press("enter", *"more", "enter", turns=0)
        await ended(it)
        assert it.state.chats.open.waiting == f"d{filler}\nmore", "no question is lost"
        await it.press(*"/new", "enter", turns=0)
        await ended(it)
        assert it.stage.shown[-1] == f"u:d{filler}\nmore;" and "2 of 2: dxx" in it.text()

    show(scenario, Talking(max_len=256), size=(120, 40))


@on_screen(make=Talking)
async def test_the_conversation_with_a_strip_of_the_engine(it):
    await it.press("i", turns=0)
    await ask(it, 'Say "**Three** things:\n\n1. one\n2. `two`".')
    await it.press(*"And?", "enter", turns=2)
    text = it.text()
    assert " 1 one" in text and " 2 two" in text and "❯ And?" in text
    assert re.search(r"read \d+ tokens; first token after", text)
    assert "Slots" in text and "Timeline" in text and "tok/s" in text
    talk = it.app.query_one("#talk").region
    assert talk.height >= 15 and talk.width >= 80
    await ended(it)
    read, all_, kept = re.search(
        r"read (\d+) of (\d+) tokens; (\d+) were still in slot 0", seen(it)
    ).groups()
    assert int(read) + int(kept) == int(all_) and int(kept) > 40


@on_screen((120, 40), make=Talking)
async def test_thoughts_are_dim_and_folded_when_they_are_over(it):
    """The pane's title has the question, too, so only the lines below the question count."""

    def below() -> str:
        return it.text().split("❯")[1].partition("\n")[2]

    await it.press("i", turns=0)
    await ask(it, 'Say "<think>It is a sum.</think>Four."')
    assert "▸ thought: 4 words" in below() and "It is a sum." not in below()
    it.app.action_command("/thoughts")
    await it.pilot.pause()
    assert below().count("It is a sum.") == 1
    await ask(it, "And?")
    assert "a:Four.;" in it.stage.shown[-1]


@on_screen((80, 24), make=Talking)
async def test_the_conversation_goes_back_in_time_and_scrolls(it):
    it.stage.obey("/set max=240")
    await it.press("i", turns=0)
    await ask(it, "one")
    await ask(it, "two")
    assert "❯ one" not in it.text()
    await it.press(*["pageup"] * 9, turns=0)
    assert "❯ one" in it.text() and " 0 lines above, " in it.text()
    await it.press(*["pagedown"] * 9, "escape", "left", turns=0)
    assert it.state.cursor and it.state.chatting
    for _ in range(300):
        it.state.move(-1)
    it.app.paint()
    await it.pilot.pause()
    now = it.state.chats.open.turns[-1].request.text
    assert now[-40:] not in " ".join(it.text().split())
    await it.press("escape", turns=0)
    assert it.state.cursor is None and it.state.chatting


# --- Markdown -----------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script> <b>x</b>",
    "[a](javascript:alert(1)) [b](http://x.y/z) ![i](http://z.z/p.png) <http://a.b>",
    "&#27;[31m &#x202e;abc \x1b]8;;http://x\x07y \u202e",
    "[ref]: http://hidden.example",
    "```\nunclosed",
    "> " * 60 + "deep",
    "".join("  " * i + "* x\n" for i in range(60)),
    "x" * 100_000,
    "| a | b |\n|---|---|\n| 1 |\n" * 50,
    "#" * 90,
    "*" * 5_000,
    "`" * 5_001,
    "[" * 3_000,
    "1. " * 500,
    "```python\n" + "((((" * 500,
    "",
    "\n\n \n",
]


def written(text: str, width: int = 60, grows: bool = False) -> list[str]:
    lines = lines_of(text, width, style.DARK, style.DARK.text, grows)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_links_of_an_answer_do_not_open_and_nothing_is_hidden():
    seen = 0
    for text in HOSTILE:
        for line in lines_of(text, 40, style.LIGHT, style.LIGHT.text, False):
            for segment in line:
                assert style.clean(segment.text) == segment.text
                assert not (segment.style and (segment.style.link or segment.style.meta))
                seen += 1
    assert seen > 1000
    text = " ".join(written(" ".join(HOSTILE[:4])))
    for part in ("<script>alert(1)</script>", "<b>x</b>", "b (http://x.y/z)", "p.png"):
        assert part in text, text
    assert "".join(written(HOSTILE[5])).endswith("deep")
    assert sum("x" in line for line in written(HOSTILE[6], 200)) == 60
    assert written(HOSTILE[3]) == [" [ref]: http://hidden.example"]


def test_a_growing_answer_is_drawn_like_the_whole():
    text = "# Head\n\nTwo\nlines.\n\n* a\n* b\n\n  more of b\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n\n2. two"
    whole = written(text)
    assert [line.strip() for line in whole if line.strip()] == (
        ["Head", "Two", "lines.", "• a", "• b", "more of b", "x = 1", "y = 2", "1 one", "2 two"]
    )
    assert blocks(text)[3].startswith("```python") and len(blocks(text)) == 6
    for end in range(len(text)):
        complete = blocks(text[:end])[:-1]
        assert complete == blocks(text)[: len(complete)], text[:end]
