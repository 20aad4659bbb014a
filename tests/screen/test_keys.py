"""Keys and mouse: each key does what the footer says, in every state of the screen."""

import re
from dataclasses import replace
from itertools import product

import pytest
from screen_stage import Stage, drawn, like_golden, on_screen, plain, show
from textual import events

import tui
from policies import POLICIES
from screen import app, commands, state, workload
from screen.draw import charts, layout, style
from screen.draw import step as steps
from screen.draw.style import BLOCKED, DECODE, HELD, PREFILL
from screen.state import State
from screen.workload import Settings
from tui import MENU


@on_screen(size=(120, 40))
async def test_a_prompt_may_contain_the_letters_of_keys(it):
    await it.press("i", *"quiz", "space", *"xbrpcq", "enter")
    assert it.stage.prompt(1) == "quiz xbrpcq"
    await it.turns(360)
    assert "1 ended" in it.text()
    assert it.state.ended[-1].text.split()[-1] in it.text()


@on_screen()
async def test_enter_fires_the_example_or_opens_the_prompt(it):
    await it.press("enter", turns=2)
    assert it.stage.prompt(1) == workload.BURST[0][0]
    await it.press("enter", *"again", "enter", turns=2)
    assert it.stage.prompt(2) == "again"
    assert it.app.focused is it.app.prompt
    await it.press(*"draft", "escape", "b", turns=2)
    assert (
        it.stage.engine.sched.submitted == 2 + 12
        and it.app.query_one(app.PromptBox).value == "draft"
    )


@on_screen(size=(120, 40))
async def test_a_wrong_command_comes_back_with_a_message(it):
    await it.press(
        "slash",
        *"set",
        "space",
        *"temperature=0.5",
        "space",
        *"max=7",
        "space",
        *"seed=3",
        "enter",
    )
    assert it.state.settings == Settings(0.5, 7, 3, burst=12)
    assert "set temperature=0.5 max=7 seed=3" in it.text() and "– tok/s" in it.text()
    it.app.hush(it.state.said)
    await it.pilot.pause()
    assert "temp 0.5 · max 7 tok · seed 3" in it.text()
    await it.press("slash", *"burst", "space", "0", "enter")
    await it.sees("from 1 to 1,000")
    assert it.app.query_one(app.PromptBox).value == "/burst 0"
    await it.press("ctrl+u", *"/nonsense", "enter")
    await it.sees("not a command")
    await it.press("escape", "c", "i")  # a refused key gets a message as well
    await it.sees("nothing has run yet")
    await it.press("ctrl+u", *"//5", "enter", turns=2)
    assert it.stage.prompt(1) == "/5"
    assert it.state.requests[1].origin.max_tokens == 7


@on_screen()
async def test_b_fires_x_cancels_one_and_X_all(it):
    await it.press("b", turns=5)
    assert it.stage.engine.sched.submitted == 12 and "queue 4" in it.text()
    await it.press("down", "down", "x", turns=2)
    assert it.state.selected == 2
    assert [r.id for r in it.state.ended if r.reason == "cancelled"] == [3]
    await it.press("X", turns=2)
    assert len(it.state.ended) == 12 and not it.state.view.busy
    await it.press("up", "up", "up", "x", turns=2)
    await it.sees("slot 7 has no request")


@on_screen()
async def test_space_pauses_and_s_steps(it):
    await it.press("b", turns=10)
    await it.press("space")
    steps = len(it.state.history)
    assert "paused" in it.text()
    await it.press("s", turns=3)
    assert len(it.state.history) == steps + 1
    # The first step after a pause commits no result yet
    await it.press("space", turns=5)
    assert len(it.state.history) == steps + 5 and "running" in it.text()
    await it.press("space")
    await it.press("left", "left", turns=0)
    assert it.state.cursor is not None
    await it.press("space")
    assert it.state.cursor is None  # after a resume, the screen follows the newest step


@on_screen(size=(120, 40))
async def test_policy_and_load_change_live(it):
    await it.press("p")
    assert it.state.view.engine.policy == "static" and "static" in it.text()
    await it.press("l")
    assert it.state.view.load == 2
    it.app.action_command("/load 4")
    await it.turns()
    assert it.state.view.load == 4 and "load 4/s" in it.text()
    await it.press("l")
    assert it.state.view.load == 0


@on_screen(size=(120, 40))
async def test_the_cursor_goes_back_in_time(it):
    await it.press("b", turns=400)
    await it.press("z", turns=0)  # one step per column
    newest = it.state.history[-1].step
    await it.press("left", turns=0)
    assert it.state.cursor == it.state.step.step == newest - 1
    assert f"step {newest - 1:,} " in it.text() and "End: follow" in it.text()
    assert f"◀ back at step {newest - 1:,} of {newest:,}" in it.text()
    await it.press("pageup", "comma", turns=0)
    assert it.state.step.step == newest - 42
    await it.press("home", turns=0)
    assert it.state.step.step == 1 and "▲ step 1" in it.text()
    assert "Step 1 " in it.text() and "r1 → slot 0" in it.text()
    await it.press("end")
    assert it.state.cursor is None
    for zoom in (2, 4, 8, None):
        await it.press("z", turns=0)
        assert it.state.zoom == zoom
        await it.press("end", "left", turns=0)
        wide = it.state.zoom_for(it.app.query_one("#timeline").size.width - 4)
        assert it.state.step.step == newest - wide and wide == (zoom or wide)
        # At any zoom, shift+left, comma and full stop move by a single step
        await it.press("end", "shift+left", "comma", "full_stop", turns=0)
        assert it.state.step.step == newest - 1


@on_screen(size=(120, 40))
async def test_all_panes_go_back_with_the_cursor(it):
    """Regression: only the timeline and the step pane went back. Slots, queue and answers showed the
    present."""

    state, seen = it.state, {}
    await it.press("b", turns=0)
    for _ in range(60):
        await it.turns()
        if state.history:
            slots = [(s.slot, s.request, s.used, s.output_tokens) for s in state.view.engine.slots]
            seen[state.view.engine.planned] = (
                slots,
                [r for r, _ in state.view.engine.queue],
                dict(state.requests),
            )
    it.stage.finish()
    await it.turns()
    then = 31
    state.look_at(state.index_of(then))
    # After the commit of a step, the engine has planned the next one, so its slots are one step ahead.
    rows = {s.slot: s.used for s in state.slots()}
    for slot, request, used, said in seen[then + 1][0]:
        if request is not None and state.past.cells[slot] == (DECODE, request):
            assert rows[slot] == used and said == state.slots()[slot].output_tokens
    assert sum(cell.kind == DECODE for cell in state.past.cells) >= 4
    waiting, line = state.line()
    assert [r for r, _ in line] == seen[then][1] and waiting == len(line) > 0
    # Waiting times, too, are those at the end of the step
    assert all(waited == pytest.approx(state.past.ended) for _, waited in line)
    for slot in range(8):
        owner = state.owner(slot)
        before = seen[then + 1][2][owner.id]
        if before.reason is None and before.metrics.output_tokens:
            assert (
                owner.reason is None and owner.metrics.output_tokens == before.metrics.output_tokens
            )
            assert owner.metrics.ttft_s == pytest.approx(before.metrics.ttft_s)
            assert owner.text == before.text
    began, last = charts.stretch(state)
    assert (began, last) == (state.history[0].began, state.past.ended)
    ttfts = plain(drawn(charts.draw_ttft, state, 60, 9))
    ended = sum(r.arrived + r.metrics.ttft_s <= last for r in state.requests.values())
    assert f" of {ended}, {12 - ended} still wait" in ttfts[0] and 0 < ended < 12
    it.app.hush(state.said)  # the message would disappear by itself after a while
    it.app.paint()
    await it.pilot.pause()
    assert "◀ back at step 31 of" in it.text() and "Slots at step 31" in it.text()
    like_golden("past-120x40", it.text())
    await it.press("end", turns=0)
    assert "at step 31" not in it.text() and state.slots() is state.view.engine.slots


def test_back_in_time_an_answer_is_cut_where_it_was():
    """Regression: at full speed the screen sampled the text only ten times a second, so a step in between
    showed "Of al…" instead of "Of all the".

    The expected text of each step comes from a second engine, whose screen is updated after each step."""
    story = "".join(f"{i:04}" for i in range(24))  # four characters a token
    then, stage = (Stage(prompts=[(f'"{story}"', 24)]).load() for _ in range(2))
    then.obey("/burst 1")
    seen = {}
    while not then.session.settled:
        then.turns()
        if request := then.state.requests.get(1):
            seen[request.metrics.output_tokens] = request.text
    stage.obey("/burst 1")
    for _ in range(100):
        stage.client.loop.turn()
    stage.session.refresh()  # update the view only once, at the end
    assert stage.session.settled
    said = []
    for i in range(len(stage.state.history)):
        stage.state.look_at(i)
        said.append(stage.state.owner(0).metrics.output_tokens)
        assert stage.state.owner(0).text == seen[said[-1]], stage.state.cursor
    assert sorted(set(said)) == list(range(25)), "some step was not looked at"


@on_screen(size=(120, 40))
async def test_the_step_pane_says_newest_only_if_it_is(it):
    """Regression: the pane is drawn less often than the header, which gave "step 689" above "Step 663
    newest"."""

    await it.press("b", turns=30)
    for _ in range(3):
        await it.turns()
        assert "one of many" in it.text() and "newest" not in it.text()
    it.stage.obey("/slow 1000")
    await it.turns()
    for _ in range(3):
        await it.turns()
        newest = it.state.history[-1].step
        assert (
            f" step {newest} " in it.text()
            and f"── Step {newest} " in it.text()
            and "newest" in it.text()
        )


@on_screen(size=(120, 40))
async def test_g_goes_from_a_step_to_its_request_and_back(it):
    """Regression: a request named in a step could not be opened from there, and a request did not say when
    it had run."""

    state = it.state
    await it.press("g")
    await it.sees("slot 0 has had no request yet")
    await it.press("b", turns=60)
    await it.press("g")  # a running request
    assert f"r{state.owner(0).id}, open" in it.text() and "prompt tokens" in it.text()
    await it.press("escape")
    await it.turns(340)
    last = state.ended[-1]
    await it.press("f", "y")
    assert f"r{last.id}, 1 of 12 that have ended" in it.text()
    assert it.app.clipboard == last.text
    steps = [state.history[i].step for i in state.steps_of(last)]
    assert f"{steps[0]:,} to {steps[-1]:,}, in slot {last.slot}: " in it.text()
    await it.press("g", turns=0)
    assert state.cursor == steps[0] and state.selected == last.slot and "Slots at step" in it.text()
    assert (last.slot, last.id) in state.step.admitted
    await it.press("g", turns=0)
    assert state.open.id == last.id and f"r{last.id}," in it.text()
    await it.press("down", "g", "g", turns=0)
    assert state.open.id == state.ended[-2].id


def test_a_cut_step_pane_can_be_opened(stage):
    """Regression: at 80x24 the last lines of a step were missing without any indication."""
    stage.obey("/burst 20")
    stage.turns(3)
    tall = stage.lines(steps.draw_step_pane, 60, 30)
    for height in range(3, len(tall)):
        lines = stage.lines(steps.draw_step_pane, 60, height)
        assert (
            len(lines) == height and lines[-1].strip() == f"↓ {len(tall) - height + 1} more lines"
        )

    async def scenario(it):
        it.stage.obey("/burst 20")
        await it.turns(3)
        await it.press(*"v" * layout.LOWER.index("step"))
        await it.sees("more line")
        row = next(i for i, line in enumerate(it.text().splitlines()) if "more line" in line)
        await it.pilot.click(offset=(4, row))
        await it.pilot.pause()
        assert "time" in it.text() and "commit" in it.text() and "Slots" not in it.text()

    show(scenario, size=(60, 20))


@on_screen(size=(120, 40))
async def test_a_message_too_long_for_the_prompt_is_a_notice(it):
    """Regression: at 120 columns the message about a step's budget was cut off after 38 characters."""

    it.app.say("fired")
    it.app.paint()
    assert it.state.said == "fired" and not it.app.screen.query("Toast")
    words = "budget 30: at most 22 tokens of a prompt in a step"
    it.app.say(words)
    await it.sees("budget 30: at most")  # the text is wrapped
    assert len(it.app.screen.query("Toast")) == 1


def test_the_printed_parts_of_a_step_add_up(stage):
    """Regression: parts and sum were rounded separately, which could give 0.00 + 0.00 + 0.00 = 0.01."""
    stage.obey("one")
    stage.finish()
    parts = {"plan_s": 4e-6, "build_s": 4e-6, "commit_s": 4e-6, "device_s": 14.4e-6, "wait_s": 1.0}
    step = replace(stage.state.step, **parts)
    assert plain(drawn(steps.draw_time, step, 70, 9))[:2] == [
        " time     1,000.01 ms = Python 0.00 + device 0.01 + wait 1,000.00",
        " Python   plan 0.00, build 0.00, commit 0.00",
    ]


@on_screen()
async def test_help_names_every_key_and_the_words(it):
    await it.press("question_mark")
    seen = it.text()
    assert MENU.keys[0].help in seen and "more lines" in seen
    for _ in range(9):
        await it.press("space")
        seen += it.text()
    assert not it.state.view.paused, "a pager's key paused the engine behind the page"
    for word in re.findall(r"\S+", " ".join(key.help for key in MENU.keys)):
        assert word in seen, f"{word}: the end of a line was cut off"
    for name in (*dict(MENU.words), *POLICIES):
        assert f" {name}  " in seen or f" {name} " in seen, name
    for kind in (PREFILL, DECODE, HELD, BLOCKED, style.GHOST):
        assert f"{style.NAMES[kind]} {style.GLYPHS[kind]}" in seen
    await it.press("escape")
    assert "Slots" in it.text()


@on_screen()
async def test_i_and_slash_open_the_prompt_from_every_page(it):
    """Regression: the prompt box took all keys while a page hid it, and Esc did not return to the box."""

    it.stage.obey("one")
    await it.turns(2)
    for page in ("question_mark", "t", "h", "f", "r"):
        await it.press(page, "i", *f"hi {page}", "enter", "escape", turns=2)
        assert it.app.page is None and it.app.focused is None
        newest = max(it.state.requests)
        assert it.stage.prompt(newest) == f"hi {page}" or page == "r"
        await it.press(page, "slash", turns=0)
        assert it.app.focused is it.app.prompt and it.app.prompt.value == "/"
        await it.press("escape", "question_mark", "escape", turns=0)
        assert it.app.focused is None and it.app.page is None


@on_screen()
async def test_keys_switch_and_close_pages(it):
    """Regression: with a page open, a key only closed the page, so every key had to be pressed twice. On a
    fresh screen the keys went into the prompt box."""

    for key in "Ethf":
        await it.press(key, turns=0)
        assert it.app.page.key == key and it.app.focused is None
    await it.press("escape", "b")
    it.stage.finish()
    for key, page in (
        ("t", "totals"),
        ("f", "requests"),
        ("question_mark", "help"),
        ("c", "compare"),
        ("h", "clients"),
    ):
        await it.press(key, turns=0)
        assert it.app.page.name == page
    await it.press("h", turns=0)
    assert it.app.page is None
    await it.press("question_mark", "r", turns=20)
    assert (
        it.app.page.name == "race"
        and it.state.view.experiment.name == "race"
        and "running …" in it.text()
    )
    await it.press("c", turns=0)
    assert it.app.page.name == "compare" and "simulated" in it.text()


@on_screen()
async def test_a_pause_behind_a_page_is_said_on_the_page(it):
    """Regression: Space paused the engine while a page was open, and the page did not show it."""

    await it.press("b", "t", "space")
    assert it.state.view.paused
    await it.sees("done behind this page: /pause")
    await it.press("space")
    assert not it.state.view.paused
    await it.sees("done behind this page: /resume")
    await it.press("escape", "question_mark")
    line = (
        it.text()
        .splitlines()
        .index(next(line for line in it.text().splitlines() if line.startswith(" p ")))
    )
    await it.pilot.click("#sheet", offset=(2, line))
    await it.sees("done behind this page: /policy")


@on_screen(size=(120, 40))
async def test_footer_keys_can_be_clicked_while_typing(it):
    for typing in (False, True):
        if typing:
            await it.press("i")
        await it.pilot.pause()
        line = it.text().splitlines()[-1]
        before = it.stage.engine.sched.submitted
        await it.pilot.click("#keys", offset=(line.index("b Burst") + 2, 0))
        await it.turns()
        assert it.stage.engine.sched.submitted == before + 12
        # The space between a key and its label can be clicked, too
        await it.pilot.click("#keys", offset=(line.index("? Help") + 1, 0))
        await it.turns()
        assert "Help" in it.text().splitlines()[0]
        await it.press("escape")
        await it.press("escape")


@on_screen()
async def test_mouse_clicks_and_wheel(it):
    await it.press("b", turns=60)
    await it.pilot.click("#slots", offset=(5, 2 + 4))
    assert it.state.selected == 4
    await it.pilot.click("#timeline", offset=(4 + 10, 3))
    zoom = it.state.zoom_for(76)
    assert it.state.cursor == it.state.history[10 * zoom].step
    assert it.state.selected == 2  # the click was on the third line of the timeline
    await it.press("end")
    timeline = it.app.query_one("#timeline")
    timeline.post_message(events.MouseScrollUp(timeline, 5, 5, 0, -1, 0, False, False, False))
    await it.pilot.pause()
    assert it.state.cursor is not None


@on_screen()
async def test_every_action_is_in_the_command_palette(it):
    titles = [command.title for command in it.app.get_system_commands(it.app.screen)]
    assert all(any(title.startswith(key.label) for title in titles) for key in MENU.keys)
    await it.press("ctrl+p")
    assert it.app.screen is not it.app.screen_stack[0]
    await it.press("escape")


@pytest.mark.parametrize("broken", [True, False])
def test_a_model_that_cannot_be_loaded_gives_exit_code_2(broken, capsys):
    """Regression: the exit code was 0 although the model could not be loaded."""
    view = state.View(stage="failed", error="x is cut off") if broken else state.View(stage="ready")
    assert tui.failed(State(view=view)) == (2 if broken else 0)
    assert capsys.readouterr().err == ("nanobatch: x is cut off\n" if broken else "")


@pytest.mark.parametrize(
    ("keys", "load"),
    [
        ("q", True),
        ("ctrl+c", False),
        ("b space q", True),
        ("question_mark ctrl+q", False),
        ("r q", True),
    ],
)
def test_the_screen_can_be_left_in_every_state(keys, load):
    async def scenario(it):
        await it.pilot.press(*keys.split())
        assert it.app.return_code == 0

    show(scenario, load=load)


@on_screen(size=(120, 40))
async def test_help_and_quit_are_commands(it):
    """Regression: only keys could open the help or quit."""

    await it.press("slash", *"help", "enter")
    await it.sees("Help: keys")
    await it.press("escape", turns=0)
    assert it.app.focused is it.app.prompt
    await it.press("slash", *"helpp", "enter")
    await it.sees("/quit")
    # The message used to say that /quit is not a command, in front of a list that contains it
    await it.press("ctrl+u", *"/quit", "space", *"now", "enter")
    assert it.app.return_code == 0


def test_cancelling_what_is_not_there_says_so(stage):
    """Regression: `/cancel 99999` claimed to have cancelled the request."""
    stage.obey("one")
    stage.obey("/cancel 1")  # the view has not been updated yet
    stage.turns(2)
    assert [r.reason for r in stage.state.ended] == ["cancelled"]
    for order, words in (
        ("/cancel 99999", "r99999 is not known"),
        ("/cancel 1", r"r1 has ended already \(cancelled\)"),
    ):
        with pytest.raises(ValueError, match=words):
            stage.obey(order)


def test_max_is_cut_to_the_slot(stage):
    """Regression: the prompt box kept showing 100,000 tokens with slots of 512. A temperature may be anything
    that sampling accepts."""
    assert stage.obey("/set max=100000") == "max=512: a slot holds no more"
    assert stage.state.settings.max_tokens == 512
    assert stage.obey("/set max=512 temperature=500") == "set max=512 temperature=500"


def test_P_saves_a_picture_of_any_page(tmp_path, monkeypatch):
    """Regression: the palette's screenshot failed without a downloads folder, and did not name the page."""
    monkeypatch.chdir(tmp_path)

    async def scenario(it):
        it.stage.obey("/resume")
        await it.press("t", "P", turns=0)
        await it.sees("Saved screenshot")
        (picture,) = tmp_path.iterdir()
        text = picture.read_text().replace("\u00a0", " ")
        assert picture.suffix == ".svg" and "<svg" in text
        assert "nanobatch: Totals (words, continuous)" in text

    show(scenario, size=(120, 40))


@on_screen()
async def test_escape_clears_a_command_but_not_a_prompt(it):
    """Regression: `/set …` stayed in the box."""

    await it.press("e", turns=0)
    assert it.app.query_one(app.PromptBox).value.startswith("/set temperature=default")
    await it.press("escape", turns=0)
    assert it.app.query_one(app.PromptBox).value == "" and it.app.focused is None
    await it.press("i", *"draft", "escape", turns=0)
    assert it.app.query_one(app.PromptBox).value == "draft"


@on_screen(size=(120, 40))
async def test_a_letter_that_is_no_key_begins_a_prompt(it):
    """Regression: the letter was refused, with the advice to press `i` first."""

    assert "press i to type" in it.text()
    await it.press(*"my name", "enter", turns=2)
    assert it.stage.prompt(1) == "my name"
    assert it.app.focused is it.app.prompt
    await it.press("escape", turns=0)
    assert "temp 0" in it.text() and "press i to type · temp" not in it.text()


@on_screen()
async def test_tab_completes_commands_and_arguments(it):
    for typed, becomes in (
        ("/po", "/policy "),
        ("/policy st", "/policy static"),
        ("/race static ser", "/race static serial"),
        ("/p", "/p"),
        ("/set te", "/set temperature="),
        ("/nonsense", "/nonsense"),
        ("a prompt", "a prompt"),
    ):
        it.app.prompt.put(typed)
        await it.press("i", "tab", turns=0)
        assert it.app.prompt.value == becomes and it.app.focused is it.app.prompt
        await it.press("escape", turns=0)
    it.app.prompt.put("/p")
    await it.press("i", "tab", turns=0)
    assert "/policy /pause" in it.text()


def test_the_help_names_every_command(stage):
    obeyed = set(commands.RUN)
    assert obeyed | {"quit", *MENU.pages} == set(MENU.commands)
    assert set(MENU.arguments) < set(MENU.commands)
    others = ["help", "quit", "compare", "why", "cancel", "again", "drop", "talk", "tour"]
    for name in MENU.commands.keys() - others:
        stage.obey(f"/{name} {MENU.commands[name]}")


@on_screen()
async def test_page_down_scrolls_the_help_by_a_page(it):
    await it.press("question_mark")
    last = it.text().splitlines()[-2]
    await it.press("pagedown")
    assert last in it.text().splitlines()[1:3]
    await it.press("end")
    assert "more line" not in it.text() and "commands" in it.text() + last
    await it.press("home")
    assert last == it.text().splitlines()[-2]


@on_screen()
async def test_a_small_screen_shows_the_requested_pane(it):
    """Regression: at 80x24 neither an answer nor a plan was visible until the user found `v`."""

    assert "b fires a burst" in it.text() and "v leads to them" in it.text()
    await it.press("i", *"quiz", "enter", "escape", turns=30)
    assert "Answers" in it.text() and "slot 0 r1" in it.text()
    await it.press("space", "s", turns=2)
    assert "admitted" in it.text() and "v View" in it.text()
    await it.press("space", turns=2)
    assert "Timeline" in it.text()
    await it.press("v", "space", turns=2)
    assert "Answers" in it.text() and "admitted" not in it.text()


@pytest.mark.parametrize(("looks_on", "runs"), [(True, False), (True, True), (False, False)])
def test_json_begins_paused_for_a_user(stage, looks_on, runs, monkeypatch):
    """Regression: the request finished in a quarter of a second, before the user could press `s`. A plain
    log is not paused, because nobody could resume it."""
    asked = []
    if runs:
        stage.obey("/burst 2")
        stage.turns(2)
    monkeypatch.setattr(stage.client, "fire", asked.extend)  # the word engine has no grammars
    stage.session.stays = looks_on
    stage.obey("/json")
    stage.turns(1)
    assert asked[0].schema
    assert stage.state.view.paused == (looks_on and not runs)


def test_every_click_leads_to_what_is_there(stage):
    """Regression: a click on the number of ended requests called an action that had been removed. No line
    is longer than its page."""
    for order in ("/same 9", "/break client"):
        stage.obey(order)
        stage.turns()
        stage.finish()
    stage.obey("/burst 12")
    stage.turns(60)
    stage.state.offer = "New here?"
    panes = app.panes_of(MENU).values()
    pictures = [*panes, *(page.draw for page in MENU.pages.values())]
    clicks = set()
    for draw, width in product(pictures, (80, 200)):
        for line in drawn(draw, stage.state, width, 30):
            clicks |= {segment.style.meta.get("do") for segment in line if segment.style}
            if draw not in panes:
                assert sum(segment.cell_length for segment in line) <= width, line
    clicks -= {None}
    assert len(clicks) > 40
    for click in clicks:
        name, _, rest = click.partition("(")
        assert hasattr(app.Screen, f"action_{name}"), click
        assert name != "page" or rest.strip("()'") in MENU.pages, click
