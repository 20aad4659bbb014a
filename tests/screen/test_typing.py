"""Keys keep their order, however fast they arrive, and whether or not the model is loaded."""

import os
import random

import pytest
from long_forms import number_of
from screen_stage import on_screen, show
from textual import events

from policies import POLICIES
from screen import workload

# Pieces of what people type: a key by its name, or several letters that belong together.
LETTERS = [*"abcdefgijlqx XK./019", "é", "文", "hello ", "there", "What is 3 + 4?"]
EDITS = ["backspace"] * 4 + ["ctrl+u", "ctrl+w", "ctrl+k", "delete", "home", "end", "left", "right"]
EDITS += ["ctrl+left", "shift+left", "tab", "escape", "enter", "enter", "enter", "ctrl+j"]
COMMANDS = ["burst 2", "burst 0", "set max=7", "set max=9999", "set temperature=1", "set burst=3"]
COMMANDS += ["policy static", "policy", "pause", "resume", "step 3", "slow 4", "slow +", "load 3"]
COMMANDS += ["load", "cancel all", "cancel 7", "cancel 1", "why", "compare", "race 3 serial"]
COMMANDS += ["race last", "cost", "same 2", "break nan", "nonsense", "set", "help", "json a fox"]
COMMANDS += ["budget +", "budget -", "budget 40", "budget off", "long 40", "//slash"]
KEYS = ["i", "i", "i", "slash", "b", "j", "s", "p", "c", "r", "R", "x", "X", "l", "L", "e", "z"]
KEYS += ["v", "f", "w", "B", "a", "K", "t", "g", "h", "E", "y", "d", "0", "minus", "plus", "space"]
KEYS += ["up", "down", "left", "pageup", "end", "question_mark", "escape", "enter", "1", "3"]
KEYS += ["left_square_bracket", "right_square_bracket", "i", "i", "enter", "escape"]


def typed(text: str) -> list[events.Key]:
    names = {" ": "space", "/": "slash", "?": "question_mark", "+": "plus", ".": "full_stop"}
    return [events.Key(names.get(letter, letter), letter) for letter in text]


def pressed(name: str) -> events.Key:
    letters = {"space": " ", "slash": "/", "question_mark": "?", "plus": "+", "minus": "-"}
    letters |= {"left_square_bracket": "[", "right_square_bracket": "]"}
    return events.Key(name, letters.get(name, name if len(name) == 1 else None))


def random_keys(dice: random.Random) -> list[events.Key | events.Paste]:
    """Return the keys of an impatient user."""
    out = []
    for _ in range(dice.randint(8, 16)):
        kind = dice.random()
        if kind < 0.3:
            out.append(pressed(dice.choice(KEYS)))
        elif kind < 0.45:
            out += [*typed("/" + dice.choice(COMMANDS)), pressed("enter")]
        elif kind < 0.5:
            out.append(events.Paste("one\ntwo"))
        elif kind < 0.7:
            out.append(pressed(dice.choice(EDITS)))
        else:
            out += typed(dice.choice(LETTERS))
    return out


def outcome(keys: list, loaded: bool, slowly: bool) -> dict:
    """Return the effect of the keys after the engine has received them all."""
    found = {}

    async def scenario(it):
        for event in keys:
            it.app.post_message(
                events.Key(event.key, event.character)
                if isinstance(event, events.Key)
                else events.Paste(event.text)
            )
            if slowly:
                await it.pilot.pause()
        await it.pilot.pause()
        if not loaded:
            it.stage.client.load()
        it.app.poll()
        await it.turns()
        view, sched = it.state.view, it.stage.engine.sched
        state = it.state
        known = sorted((*view.engine.requests, *view.engine.ended), key=lambda r: r.id)
        found.update(
            prompts=[str(request.origin) for request in known],
            box=(it.app.prompt.value, it.app.prompt.selection, it.app.focused is not None),
            engine=(sched.policy, sched.draining_to, sched.budget, sched.chunk),
            loop=(view.paused, view.stepping, view.slow, view.load, view.experimenting),
            record=view.record,
            faults=[fault.message for fault in state.faults],
            posted=it.stage.client.posted,
            settings=state.settings,
            chosen=(state.selected, state.zoom, state.lower, it.app.theme),
            page=it.app.page and it.app.page.name,
        )

    show(scenario, load=loaded)
    return found


def test_random_keys_do_the_same_whenever_they_come():
    """Regression: while the model was loading, `i`, "Hellp", Backspace, "o there" and Enter fired "Hellpo
    ther". With a loaded model, a letter overtook the previous key if both arrived at once."""
    typists = number_of("TYPISTS", 2)
    fired = posted = 0
    for seed in range(typists):
        keys = random_keys(random.Random(seed))
        loading = outcome(keys, loaded=False, slowly=False)
        fast = outcome(keys, loaded=True, slowly=False)
        slow = outcome(keys, loaded=True, slowly=True)
        words = f"{seed}: {' '.join(getattr(event, 'key', 'paste') for event in keys)}"
        assert fast == slow, words
        assert loading == fast, words
        fired += len(fast["prompts"])
        posted += fast["posted"]
    assert fired >= typists / 2 and posted > 2 * typists, "the keys have to do something"


@on_screen(size=(120, 40), load=False)
async def test_tab_on_a_page_while_loading(it):
    """Regression: while a page waits for the model, the prompt box is visible, and Tab led into it. The next
    keys were typed there, and were out of sight when the page appeared."""
    await it.pilot.press(*"/same 2", "enter", "tab", *"xy")
    assert it.app.page.name == "same"
    assert it.app.focused is None and it.app.prompt.value == ""


@on_screen(size=(120, 40), load=False)
async def test_text_typed_while_loading_is_in_the_box(it):
    """Regression: the text was invisible, and Ctrl-U deleted the whole prompt."""

    await it.pilot.press("i", "ctrl+u", *"Hellp", "backspace", *"o there")
    assert "❯ Hello there" in it.text() and "starting" in it.text()
    await it.pilot.press("enter")
    assert "Hello there  waits for the model" in it.text() and it.app.prompt.value == ""
    await it.pilot.press(*"/set max=7", "enter", *"second", "enter", "escape", "b", "space")
    assert "12 prompts fired" in it.text() and "max=7" not in it.text()
    await it.pilot.press("i", *"a draft")
    it.stage.client.load()
    it.app.poll()
    await it.turns(3)
    first, second, third = [it.state.requests[i].origin for i in (1, 2, 3)]
    assert (first.prompt, first.max_tokens) == ("Hello there", 320)
    assert (second.prompt, second.max_tokens) == ("second", 7)
    assert third.prompt == workload.BURST[0][0] and it.stage.engine.sched.submitted == 14
    assert it.state.view.paused and it.app.prompt.value == "a draft"
    assert it.app.focused is it.app.prompt and "waits for the model" not in it.text()


def test_toggle_keys_faster_than_the_engine():
    """Regression: pressing `space` twice before the next view paused only once; `l` and `p` had the same
    bug."""
    keys = ("space", "space", "space", "l", "l", "p", "p", "plus", "plus", "minus")
    keys += ("left_square_bracket",) * 2

    def scenario(load):
        async def type_them(it):
            await it.pilot.press(*keys)
            if load:
                it.stage.client.load()
                it.app.poll()
            await it.turns(2)
            view, sched = it.state.view, it.stage.engine.sched
            found.append((view.paused, view.load, view.slow, sched.policy.name, sched.chunk))

        return type_them

    found = []
    show(scenario(load=False))
    show(scenario(load=True), load=False)
    assert found[0] == found[1] == (True, 0.0, 16.0, [*POLICIES][2], 16)


@on_screen(size=(120, 40), load=False)
async def test_a_budget_set_while_loading_may_be_refused(it):
    await it.pilot.press("slash", *"budget 5", "enter")
    assert it.app.prompt.value == ""
    it.stage.client.load()
    it.app.poll()
    await it.turns()
    await it.sees("but here it is")
    assert it.app.prompt.value == "/budget 5" and it.stage.engine.sched.budget == 32


@on_screen(size=(120, 40), load=False)
async def test_a_tour_requested_while_loading(it):
    await it.pilot.press("T", "b", "i")
    assert "the tour has the engine" in it.text() and it.app.focused is None
    await it.pilot.press("escape", "T")
    it.stage.client.load()
    it.app.poll()
    await it.turns(3)
    assert it.state.strip and "Tour 1 of" in it.text() and it.stage.engine.sched.submitted == 0


@on_screen(load=False)
async def test_json_asked_for_while_loading_begins_paused(it):
    """Regression: `j` paused a loaded engine only, so an early answer finished before the user could press
    `s`."""
    await it.pilot.press("j")
    it.stage.client.load()
    it.app.poll()
    await it.turns(2)
    assert it.state.view.paused


@pytest.mark.parametrize("page", ["question_mark", "h", "r"])
def test_a_page_opened_while_loading(page):
    async def scenario(it):
        await it.pilot.press("b", page)
        assert it.app.page
        assert "✗ sheet" not in it.text()
        assert "starting" in it.text() or page == "question_mark"
        it.stage.client.load()
        it.app.poll()
        await it.turns(2)
        assert it.app.page and "starting" not in it.text()

    stage = show(scenario, load=False)
    assert not stage.state.tracebacks


@on_screen(load=False)
async def test_a_model_that_cannot_be_loaded_while_typing(it):
    """Regression: the prompt box had the keyboard focus while it was invisible."""

    await it.pilot.press("i", *"hello")
    it.stage.load_engine = lambda report, clock: os.stat("/no/such/model")
    it.stage.client.load()
    it.app.poll()
    await it.pilot.pause()
    assert "No such file" in it.text() and "❯" not in it.text()
    await it.pilot.press("q")
    assert it.app.return_code == 0
