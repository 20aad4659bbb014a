"""A conversation in a server's page, in a real browser (see test_browser.py).

Some answers come from an engine that repeats the prompt (`tests/lib/parrot.py`). Where only the drawing
matters, a stand-in replaces the server's answer.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from browsers import PHONE, in_place_everywhere, needs_browser, shows, until
from parrot import Parrot
from recordings import HOSTILE, TEXTS
from servers import Server
from waiting import wait_for

import tui
from cli.terminal_chat import Conversation
from engine import prefill_progress as progress
from engine.registry import Log
from nanobatch import SamplingParams
from screen.workload import Settings

ROOT = Path(__file__).parents[2]
pytestmark = needs_browser
STOPPED = "document.querySelector('[data-chat-part=stop]').hidden"
# The height of the conversation below the visible part
BELOW = (
    "((log) => log.scrollHeight - log.scrollTop - log.clientHeight)(document.querySelector('.log'))"
)
# Right after an answer the page may not know the slot yet, so it says "a slot".
FACTS = re.compile(
    r"read ([\d,]+) of ([\d,]+) tokens; ([\d,]+) were still in (?:its|a) slot; "
    r"first token after [\d.]+ m?s; [\d,]+ tokens(?:, [\d,]+ tokens/s)?"
)


@pytest.fixture(scope="module")
def parrots() -> Iterator[Callable[..., Parrot]]:
    made = []

    @cache
    def make(**options) -> Parrot:
        made.append(Parrot(**options))
        return made[-1]

    yield make
    for parrot in made:
        parrot.close()


@pytest.fixture
def talks(opens, parrots):
    """Yield a function that opens the page of a server that repeats prompts, and records the page's
    requests."""

    def opened(parrot: Parrot | None = None, **how):
        address = (parrot or parrots()).api.address
        tab = opens(f"{address}/", offline=False, **how)
        tab.asked = []
        tab.on("request", lambda asked: tab.asked.append(asked))
        until(tab, "!document.querySelector('[data-chat]').hidden")
        return tab

    return opened


def part(tab, name: str):
    return tab.locator(f"[data-chat-part={name}]")


def say(tab, question: str, waits: bool = True) -> None:
    part(tab, "box").fill(question)
    part(tab, "box").press("Enter")
    if waits:
        until(tab, STOPPED)


def say_at_length(tab, parrot: Parrot) -> None:
    """Ask for an answer that arrives slowly, and wait until it has started."""
    parrot.loop.slow = 80  # steps per second
    say(tab, "say: " + "on and on " * 300, waits=False)
    until(tab, "document.querySelector('.turn:last-child > .reply').textContent.length > 20")


def sent(tab) -> list[dict]:
    """Return the bodies of all questions that the page has sent."""
    return [json.loads(r.post_data) for r in tab.asked if r.method == "POST"]


def facts(tab) -> str:
    return tab.inner_text(".turn:last-child .facts")


def test_a_second_question_reads_only_what_is_new(talks):
    """The second question reuses the rows of the first, and the page shows how many tokens were read and
    reused."""
    tab = talks()
    until(tab, "window.nanobatch")  # wait until the page knows the slots
    part(tab, "system").evaluate("(box) => { box.value = 'Be short.'; }")
    say(tab, "say: **Hello**, Ada. " + "And more. " * 20)
    assert tab.inner_text(".turn:last-child > .reply strong") == "Hello"
    assert facts(tab).startswith("read ") and "were still" not in facts(tab)
    until(
        tab,
        "nanobatch.player.lanes[0].requests.get(Number(document.querySelector('.turn .chip').textContent))?.slot >= 0",
    )
    say(tab, "say: Ada. " + "Once more. " * 5)
    read, total, cached = (int(n.replace(",", "")) for n in FACTS.match(facts(tab)).groups())
    assert read + cached == total and cached > 400 and read < total / 2
    first, second = (body["messages"] for body in sent(tab))
    assert [m["role"] for m in first] == ["system", "user"]
    assert second[:2] == first and second[2]["content"].startswith("**Hello**, Ada.")
    assert len(second) == 4
    until(tab, "document.querySelectorAll('.slots .mine').length === 1")
    home = tab.evaluate("location.origin")
    assert {r.url.removeprefix(home) for r in tab.asked} == {"/v1/chat/completions"}
    assert tab.evaluate("document.cookie") == ""


def test_a_conversation_begins_as_the_terminals_does(talks):
    """The temperature and the limit on answers are those of the terminal's chat. If a box is empty, the
    server chooses. Regression: without a limit a small model never stopped."""
    tab = talks()
    say(tab, "say: one")
    for name in ("temperature", "length"):
        part(tab, name).evaluate("(box) => { box.value = ''; }")
    say(tab, "say: two")
    own, free = ((body["temperature"], body["max_tokens"]) for body in sent(tab))
    assert own == (Settings().temperature, tui.TALK)
    assert free == (None, None)


def test_the_newest_line_stays_visible(talks):
    """Regression: in a narrower window the same text is taller, and its end was below the visible part."""
    tab = talks(viewport={"width": 1280, "height": 800})
    hear(tab, "and so on " * 300)
    for viewport in (PHONE, {"width": 700, "height": 500}, {"width": 1280, "height": 800}):
        tab.set_viewport_size(viewport)
        until(tab, f"{BELOW} < 2")
    tab.evaluate("document.querySelector('.log').scrollTop = 0")
    tab.wait_for_timeout(50)  # let the page notice the scrolling
    tab.set_viewport_size(PHONE)
    tab.wait_for_timeout(100)
    assert tab.evaluate(BELOW) > 300, "a user who has scrolled up is not pulled down"


def test_a_question_waits_for_the_running_answer(talks, parrots):
    """Regression: during an answer Enter did nothing, and the page did not say why."""
    parrot = parrots()
    tab = talks(parrot)
    say_at_length(tab, parrot)
    say(tab, "say: one", waits=False)
    say(tab, "more", waits=False)
    part(tab, "box").fill("half of a")
    said = part(tab, "waiting").inner_text()
    assert said.startswith("waits for the answer above") and said.endswith("say: one more")
    assert len(sent(tab)) == 1 and tab.locator(".turn").count() == 1
    parrot.loop.slow = 0.0
    part(tab, "box").press("Escape")
    until(tab, f"{STOPPED} && document.querySelectorAll('.turn').length === 2")
    asked = sent(tab)[1]["messages"]
    assert len(asked) == 3 and asked[2]["content"] == "say: one\nmore"
    assert part(tab, "waiting").inner_text() == ""
    assert part(tab, "box").input_value() == "half of a"


def test_a_reload_restores_the_conversation(talks, parrots):
    """Regression: a reload silently lost the conversation. Only texts are stored, not the key."""
    parrot = parrots()
    tab, other = talks(parrot), talks(parrot)
    part(tab, "system").evaluate("(box) => { box.value = 'Be short.'; }")
    say(tab, "say: <think>Easy.</think>**one**")
    say(other, "say: another")
    say_at_length(tab, parrot)
    say(tab, "say: two", waits=False)
    tab.reload()
    parrot.loop.slow = 0.0
    until(tab, f"document.querySelectorAll('.turn').length === 2 && {BELOW} < 2")
    assert tab.inner_text(".turn > .reply strong") == "one"
    assert tab.locator(".turn:first-child .facts").inner_text().startswith("read ")
    assert facts(tab).startswith("broken off")
    assert part(tab, "box").input_value() == "say: two" and tab.locator(".log .chip").count() == 0
    part(tab, "box").press("Enter")
    until(tab, f"{STOPPED} && document.querySelectorAll('.turn').length === 3")
    told = sent(tab)[-1]["messages"]
    begin = ["Be short.", "say: <thi", "**one**", "say: on a", "on and on", "say: two"]
    assert [message["content"][:9] for message in told] == begin
    assert told[2]["reasoning_content"] == "Easy."
    other.reload()
    until(other, "document.querySelectorAll('.turn').length === 1")
    assert "another" in other.inner_text(".log")
    part(other, "anew").click()
    other.reload()
    until(other, "window.nanobatch")
    assert other.locator(".turn").count() == 0


def test_conversations_are_listed(talks):
    """Regression: there was only one conversation, and starting a new one deleted it."""
    tab = talks()
    assert part(tab, "talks").is_hidden()
    part(tab, "system").evaluate("(box) => { box.value = 'Be short.'; }")
    say(tab, "say: <think>Easy.</think>**one**")
    part(tab, "anew").click()
    assert tab.locator(".turn").count() == 0
    part(tab, "system").evaluate("(box) => { box.value = ''; }")
    say(tab, "say: two\nand more")
    part(tab, "talks").locator("summary").click()
    titles = tab.locator(".talks button.title")
    until(tab, "document.querySelectorAll('.talks button.title').length === 2")
    assert titles.all_inner_texts() == ["say: two and more", "say: <think>Easy.</think>**one**"]
    assert titles.nth(0).get_attribute("aria-current") == "true"
    titles.nth(1).click()
    assert tab.inner_text(".turn > .reply strong") == "one"
    assert part(tab, "system").input_value() == "Be short." and facts(tab).startswith("read ")
    say(tab, "say: three")
    told = [message["content"] for message in sent(tab)[-1]["messages"]]
    assert told[0] == "Be short." and told[2] == "**one**" and told[3] == "say: three"
    tab.locator(".talks li", has_text="two").get_by_text("Rename").click()
    tab.keyboard.type("The second")
    tab.keyboard.press("Enter")
    tab.reload()
    until(tab, "document.querySelectorAll('.turn').length === 2")
    part(tab, "talks").locator("summary").click()
    row = tab.locator(".talks li", has_text="The second")
    assert "1 question" in row.inner_text()
    row.get_by_text("Delete").click()
    assert titles.all_inner_texts() == ["say: <think>Easy.</think>**one**"]
    part(tab, "undo").click()
    titles.get_by_text("The second").click()
    assert tab.inner_text(".turn > .reply").strip() == "two\nand more"
    in_place_everywhere(tab, 20)
    row.get_by_text("Delete").click()  # delete the open conversation
    assert tab.locator(".turn").count() == 0


def test_an_answer_ends_when_another_conversation_is_opened(talks, parrots):
    parrot = parrots()
    tab = talks(parrot)
    say(tab, "say: one")
    part(tab, "anew").click()
    say_at_length(tab, parrot)
    say(tab, "say: later", waits=False)
    part(tab, "talks").locator("summary").click()
    tab.locator(".talks .title").get_by_text("say: one").click()
    parrot.loop.slow = 0.0
    until(tab, STOPPED)
    assert tab.inner_text(".turn > .reply").strip() == "one"
    assert part(tab, "box").input_value() == "say: later" and len(sent(tab)) == 2
    tab.locator(".talks .title").nth(0).click()
    assert facts(tab).startswith("stopped") and "on and on" in tab.inner_text(".turn > .reply")


def test_two_tabs_lose_nothing_of_a_conversation(talks):
    """If two tabs continue one conversation, the later one is stored as a second conversation instead of
    overwriting the first."""
    tab = talks()
    say(tab, "say: one")
    other = tab.context.new_page()
    other.said = tab.said
    other.goto(tab.url)
    until(other, "!document.querySelector('[data-chat]').hidden")
    part(other, "talks").locator("summary").click()
    other.locator(".talks .title").click()
    say(other, "say: two")
    say(tab, "say: three")
    assert "kept as a second one" in part(tab, "note").inner_text()
    until(other, "document.querySelectorAll('.talks .title').length === 2")
    kept = tab.evaluate("Object.values({ ...localStorage }).join()")
    assert all(word in kept for word in ("say: two", "say: three"))


FILLS = "localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 40 - JSON.stringify(localStorage).length))"


def test_a_full_storage(talks):
    """When the browser's storage is full, a message says so, and what was already stored is kept."""
    tab = talks()
    say(tab, "say: one")
    tab.evaluate(FILLS)
    say(tab, "say: two")
    assert "The browser has no more room (0.0 MB are kept)" in part(tab, "note").inner_text()
    assert "say: one" in tab.evaluate("JSON.stringify(localStorage)")
    assert tab.locator(".turn").count() == 2
    tab.evaluate("localStorage.removeItem('filler')")
    say(tab, "say: three")
    assert part(tab, "note").inner_text() == ""
    tab.reload()
    until(tab, "document.querySelectorAll('.turn').length === 3")


SPOILT = (
    "{",
    "null",
    "[]",
    '{"title": 1}',
    '{"title": "x", "fields": [], "turns": [{}]}',
    '{"title": "x", "fields": ["", "", ""], "turns": 7}',
)


def test_spoilt_conversations(talks):
    """Regression: a damaged conversation in the browser's storage left the page empty."""
    tab = talks()
    say(tab, "say: one")
    for i, text in enumerate(SPOILT):
        tab.evaluate(f"localStorage.setItem('nanobatch-conversation-{i}', {json.dumps(text)})")
    for text in SPOILT[::3]:
        tab.evaluate(f"sessionStorage.setItem('nanobatch-tab', {json.dumps(text)})")
        tab.reload()
        until(tab, "!document.querySelector('[data-chat]').hidden")
    part(tab, "talks").locator("summary").click()
    texts = tab.locator(".talks .title").all_inner_texts()
    assert texts == ["say: one", *["A conversation that cannot be read"] * len(SPOILT)]
    for wanted, count in (("ONE", 1), ("title", 0), ("", 1 + len(SPOILT))):
        part(tab, "search").fill(wanted)
        assert tab.locator(".talks .title").count() == count
    tab.locator(".talks button.title").click()
    assert tab.inner_text(".turn > .reply").strip() == "one"
    tab.locator(".talks li", has_text="cannot be read").first.get_by_text("Delete").click()
    assert tab.locator(".talks .title").count() == len(SPOILT)


def test_a_saved_conversation_is_opened(talks, tmp_path):
    said = Conversation()
    said.system = "Be short."
    said.add("Who?", "**Ada**", "Easy.")
    said.add("Where?", "Here.")
    said.save(str(tmp_path / "talk.json"))
    (tmp_path / "other.json").write_text('{"messages": [{"role": "user", "content": "Who?"}]}')
    (tmp_path / "none.json").write_text("{")
    unnamed = Conversation()
    unnamed.add("", "Hello.")
    unnamed.save(str(tmp_path / "unnamed.json"))
    tab = talks()
    say(tab, "say: one")

    def chosen(name: str) -> None:
        with tab.expect_file_chooser() as chooser:
            part(tab, "open").click()
        chooser.value.set_files(tmp_path / name)

    for name, why in (("none.json", "JSON"), ("other.json", "must alternate")):
        chosen(name)
        shows(tab, "[data-chat-part=note]", f"{name} is not a conversation")
        assert why in part(tab, "note").inner_text()
    chosen("unnamed.json")  # an empty question used to be an error
    shows(tab, ".turn > .reply", "Hello.")
    chosen("talk.json")
    until(tab, "document.querySelectorAll('.turn').length === 2")
    assert part(tab, "note").inner_text() == "" and part(tab, "system").input_value() == "Be short."
    say(tab, "say: well")
    assert sent(tab)[-1]["messages"] == [
        *said.messages("say: well")[:2],
        {"role": "assistant", "content": "**Ada**", "reasoning_content": "Easy."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here.", "reasoning_content": ""},
        {"role": "user", "content": "say: well"},
    ]
    part(tab, "talks").locator("summary").click()
    titles = ["Who?", "without a title", "say: one"]
    assert tab.locator(".talks .title").all_inner_texts() == titles


DROPS = """([name, text, andSend]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  const how = { bubbles: true, cancelable: true, dataTransfer };
  const isOpen = document.body.dispatchEvent(new DragEvent("drop", how));
  if (isOpen) throw new Error("the browser would open the file");
  if (andSend) document.querySelector("[data-chat-part=send]").click();
}"""
COUNTS = """async (asked) => {
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify(asked);
  const answer = await fetch("v1/messages/count_tokens", { method: "POST", headers, body });
  return (await answer.json()).input_tokens;
}"""
PASTES = """(box) => {
  const clipboardData = new DataTransfer();
  clipboardData.items.add(new File(["say: pasted"], "image.png"));
  box.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, clipboardData }));
}"""


def test_a_dropped_file_is_attached(talks, parrots):
    """A dropped file is attached, with its number of tokens. If it does not fit, it is refused before
    anything is sent."""
    tab = talks(parrots(max_len=640))
    tab.evaluate(DROPS, ["notes.txt", "a ``` b\n" * 10])
    shows(tab, ".files", "notes.txt, ")
    tokens = int(re.search(r"notes.txt, (\d+) tokens", part(tab, "files").inner_text())[1])
    assert 80 <= tokens < 130, "a letter is a token"
    asked = {"model": "default", "messages": [{"role": "user", "content": "notes.txt:" + "." * 92}]}
    total = tab.evaluate(COUNTS, asked)
    tab.evaluate(DROPS, ["long.txt", "." * (640 - total - 30)])
    shows(tab, "[data-chat-part=note]", "long.txt has ")
    assert "and a slot holds 640, answer included" in part(tab, "note").inner_text()
    part(tab, "box").fill("say: one")
    # The question is not sent without the file
    tab.evaluate(DROPS, ["longer.txt", "long " * 10_000, True])
    shows(tab, "[data-chat-part=note]", "longer.txt does not fit")
    assert "tokens > 639 maximum" in part(tab, "note").inner_text()
    tab.said.clear()  # the browser's own message about a refusal
    tab.evaluate(DROPS, ["picture.png", "\0\0"])
    shows(tab, "[data-chat-part=note]", "picture.png is not text (UTF-8)")
    assert tab.locator(".files .attached").count() == 1 and tab.locator(".turn").count() == 0
    part(tab, "box").evaluate(PASTES)
    until(tab, "document.querySelectorAll('.files .attached').length === 2")
    tab.locator(".files .attached", has_text="image.png").get_by_role("button").click()
    in_place_everywhere(tab, 15)
    say(tab, "say: one")
    fenced = "notes.txt:\n````\n" + "a ``` b\n" * 10 + "\n````\n\nsay: one"
    assert sent(tab)[-1]["messages"] == [{"role": "user", "content": fenced}]
    assert tab.locator(".asked .attached").all_inner_texts() == ["notes.txt"]
    assert tab.locator(".files .attached").count() == 0
    tab.reload()
    until(tab, "document.querySelectorAll('.turn').length === 1")
    tab.locator(".asked .tab").click()
    tab.evaluate(DROPS, ["more.txt", "more"])
    shows(tab, ".files", "more.txt, ")
    part(tab, "box").press("Escape")  # the stored question stays as it was
    tab.locator(".asked .tab").click()
    assert tab.locator(".files .attached").all_inner_texts() == ["notes.txt×"]
    say(tab, "say: two")
    assert sent(tab)[-1]["messages"][0]["content"] == fenced.replace("one", "two")


def test_a_file_is_counted_in_the_open_conversation(talks):
    """Regression: after a file that was attached in another conversation, the number was negative."""
    tab = talks()
    say(tab, "say: " + "a" * 200)
    tab.evaluate(DROPS, ["one.txt", "a" * 40])
    shows(tab, ".files", "one.txt, ")
    part(tab, "anew").click()
    tab.evaluate(DROPS, ["two.txt", "a" * 40])
    shows(tab, ".files", "two.txt, ")
    tokens = int(re.search(r"two.txt, (\S+) tokens", part(tab, "files").inner_text())[1])
    assert 40 < tokens < 80, "a letter is a token"


def test_the_heading_is_the_model(talks, parrots):
    """Regression: all servers had the same heading, and the page showed the amount of memory that was free at
    the server's start."""
    parrot = parrots()
    parrot.engine.summary = "llama; 9.9 GiB of memory free at start; rows"
    tab = talks(parrot)
    shows(tab, "[data-state]", "ready")
    assert tab.inner_text("h1") == "parrot ready" and tab.title() == "parrot: nanobatch"
    line = tab.inner_text("[data-summary]")
    assert re.search(r"; [\d.]+ [GM]iB of memory free now; rows$", line) and "9.9" not in line
    parrot.loop.pause()
    shows(tab, "[data-state]", "paused")
    parrot.loop.resume()
    shows(tab, "[data-state]", "ready")


def test_a_model_is_picked_from_several(opens):
    """No model is loaded at first. The selected one answers and is watched."""
    models = ("--model", "one=demo", "--model", "two=demo", "--slots", "2", "--max-len", "256")
    with Server(*models) as server:
        tab = opens(f"{server.address}/", offline=False)
        until(tab, "document.querySelectorAll('[data-models] option').length === 2")
        shows(tab, "[data-status]", "one is not loaded")
        tab.select_option("[data-models]", "two")
        say(tab, "Count from 3 to 5.")
        shows(tab, ".turn:last-child .facts", "by two")
        shows(tab, "h1", "two ready")
        assert "model=two" in server.log.read_text()
        say(tab, "Count from 3 to 5.")
        tab.select_option("[data-models]", "one")
        say(tab, "Count from 3 to 5.")
        shows(tab, ".turn:last-child .facts", "by one")
        shows(tab, "h1", "one ready")
        tab.said.clear()  # the browser logs that a model could not be watched yet


def test_a_browser_without_storage(talks):
    tab = talks()
    off = "{ get() { throw new Error('off'); } }"
    for name in ("sessionStorage", "localStorage"):
        tab.add_init_script(f"Object.defineProperty(window, '{name}', {off})")
    tab.reload()
    say(tab, "say: one")
    assert facts(tab).startswith("read ") and part(tab, "note").inner_text() == ""
    tab.reload()
    until(tab, "!document.querySelector('[data-chat]').hidden")
    assert tab.locator(".turn").count() == 0


def test_asking_again_and_a_new_conversation(talks):
    tab = talks()
    say(tab, "say: one")
    say(tab, "say: two")
    part(tab, "again").click()
    until(tab, STOPPED)
    part(tab, "anew").click()
    assert tab.locator(".turn").count() == 0 and not part(tab, "again").is_visible()
    say(tab, "say: three")
    lengths = [len(body["messages"]) for body in sent(tab)]
    assert lengths == [1, 3, 3, 1]


def test_an_answer_is_copied_as_it_was_written(talks):
    tab = talks(permissions=["clipboard-read", "clipboard-write"])
    say(tab, "say: **Hello**, `Ada`.")
    copy = tab.locator(".turn .copy")
    copy.click()
    until(tab, "document.querySelector('.turn .copy').textContent === 'Copied.'")
    assert tab.evaluate("navigator.clipboard.readText()") == "**Hello**, `Ada`."


def test_an_edited_question_replaces_what_followed(talks):
    tab = talks()
    for text in ("one", "two", "three"):
        say(tab, f"say: {text}")
    edit = tab.locator(".turn .asked .tab")
    edit.nth(1).click()
    assert part(tab, "box").input_value() == "say: two" and tab.locator(".edited").count() == 2
    part(tab, "box").press("Escape")  # nothing is replaced
    assert part(tab, "box").input_value() == "" and tab.locator(".edited").count() == 0
    assert tab.locator(".turn").count() == 3
    edit.nth(1).click()
    say(tab, "say: 2")
    assert [m["content"] for m in sent(tab)[-1]["messages"]] == ["say: one", "one", "say: 2"]
    assert tab.locator(".turn").count() == 2 and part(tab, "note").inner_text() == ""


def refuse(tab, status: int, message: str) -> None:
    """Let the page's questions be refused."""
    answer = {"status": status, "json": {"error": {"message": message}}}
    tab.route("**/v1/chat/completions", lambda asked: asked.fulfill(**answer))


def test_a_refused_question_replaces_nothing(talks):
    """Regression: after an edited question, or one asked again, was refused, the earlier answers were lost."""
    tab = talks()
    for text in ("one", "two", "three"):
        say(tab, f"say: {text}")
    refuse(tab, 503, "The server is full.")
    tab.locator(".turn .asked .tab").nth(1).click()
    say(tab, "say: 2")
    shows(tab, "[data-chat-part=note]", "The server is full")
    assert tab.locator(".turn").count() == 3 and tab.locator(".edited").count() == 2
    assert part(tab, "box").input_value() == "say: 2"
    tab.unroute("**/v1/chat/completions")
    part(tab, "box").press("Enter")  # it still replaces them
    until(tab, f"{STOPPED} && document.querySelectorAll('.turn').length === 2")
    assert [m["content"] for m in sent(tab)[-1]["messages"]] == ["say: one", "one", "say: 2"]
    refuse(tab, 503, "The server is full.")
    part(tab, "again").click()
    shows(tab, "[data-chat-part=note]", "The server is full")
    assert part(tab, "box").input_value() == "" and tab.locator(".edited").count() == 0
    assert tab.locator(".turn > .reply").all_inner_texts() == ["one", "2"]
    tab.unroute("**/v1/chat/completions")
    tab.route("**/v1/chat/completions", lambda asked: None)  # never answered
    part(tab, "again").click()
    tab.reload()
    until(tab, "document.querySelectorAll('.turn').length === 3")
    assert [t.strip() for t in tab.locator(".turn > .reply").all_inner_texts()] == ["one", "2", ""]
    assert facts(tab).startswith("broken off")
    tab.said.clear()  # the browser's own messages about refusals


def test_a_refusal_keeps_what_was_typed(talks):
    """Regression: a question asked again was put before the text in the box when it was refused, and the
    next try deleted both. A refused new wording was deleted with the conversation that it was for."""
    tab = talks()
    box, note, again = part(tab, "box"), part(tab, "note"), part(tab, "again")
    say(tab, "say: one")
    box.fill("my long draft")
    for status, message, said in ((503, "It is full.", "is full"), (401, "No key.", "API key")):
        refuse(tab, status, message)
        again.click()
        shows(tab, "[data-chat-part=note]", said)
        assert box.input_value() == "my long draft" and tab.locator(".edited").count() == 0
        assert tab.locator(".turn > .reply").all_inner_texts() == ["one"]
    tab.unroute("**/v1/chat/completions")
    give(tab, "hush")  # asks the refused question, not the draft
    until(tab, f"{STOPPED} && !document.querySelector('[data-chat-part=note]').textContent")
    assert box.input_value() == "my long draft" and tab.locator(".turn").count() == 1
    assert [m["content"] for m in sent(tab)[-1]["messages"]] == ["say: one"]
    refuse(tab, 401, "No key.")
    tab.locator(".turn .asked .tab").click()
    say(tab, "say: 1")
    assert "API key" in note.inner_text() and note.inner_text().endswith("Esc leaves it.")
    part(tab, "anew").click()
    assert box.input_value() == "say: 1" and tab.locator(".turn").count() == 0
    tab.said.clear()  # the browser's own messages about refusals


def test_an_empty_question_is_not_asked_again(talks):
    """Regression: the page removed it with its answer, and sent nothing."""
    tab = talks()
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": "Yes?"}]
    file = {"name": "a.json", "mimeType": "application/json"}
    part(tab, "file").set_input_files(
        file | {"buffer": json.dumps({"messages": messages}).encode()}
    )
    shows(tab, ".turn > .reply", "Yes?")
    part(tab, "again").click()
    assert tab.locator(".turn > .reply").all_inner_texts() == ["Yes?"]
    assert part(tab, "note").inner_text() == "The last question is empty."


def test_a_saved_conversation_loads_in_the_terminal(talks, tmp_path):
    tab = talks()
    part(tab, "system").evaluate("(box) => { box.value = 'Be short.'; }")
    assert part(tab, "save").is_hidden()
    say(tab, "say: <think>Easy.</think>**one**")
    with tab.expect_download() as download:
        part(tab, "save").click()
    file = tmp_path / "conversation.json"
    download.value.save_as(file)
    loaded = Conversation.load(str(file))
    assert loaded.system == "Be short." and loaded.turns[1] == {
        "role": "assistant",
        "content": "**one**",
        "reasoning_content": "Easy.",
    }


def test_the_progress_of_a_long_prompt(talks, parrots, monkeypatch):
    """Regression: the page said "about 0 tokens" for minutes."""
    monkeypatch.setattr(progress, "LONG_S", -1.0)
    parrot = parrots()
    tab = talks(parrot)
    parrot.loop.slow = 8  # steps per second
    say(tab, "say: " + "which no slot has yet " * 140, waits=False)
    said = "document.querySelector('.turn:last-child .facts').textContent"
    until(tab, f"/^reading: [\\d,]+ of [\\d,]+ tokens, [\\d,]+ tokens.s, about /.test({said})")
    parrot.loop.slow = 0.0
    part(tab, "stop").click()
    until(tab, STOPPED)


def test_a_stopped_answer_frees_its_slot(talks, parrots):
    parrot = parrots()
    tab = talks(parrot)
    say_at_length(tab, parrot)
    part(tab, "box").press("Escape")
    until(tab, STOPPED)
    parrot.loop.slow = 0.0
    # A stopped answer has no usage, so its number of tokens is approximate
    assert re.search(r"; about \d+ tokens?(, [^;]*)?; stopped", facts(tab))
    said = tab.inner_text(".turn > .reply")
    say(tab, "say: well")
    kept = sent(tab)[1]["messages"][1]["content"]
    assert kept.startswith("on and on") and len(kept) < 3000 and said.strip() == kept.strip()
    # A busy browser closes the connection a little later
    wait_for(lambda: not parrot.engine.snapshot().requests)
    reasons = {view.id: view.reason for view in parrot.engine.snapshot().ended}
    assert "cancelled" in [reasons[number] for number in sorted(reasons)[-2:]]


def test_a_late_page_knows_the_queue(talks, parrots):
    """Regression: the page received the first 32 requests, and said that no more were queued."""
    parrot = parrots()
    parrot.loop.pause()
    for _ in range(50):
        parrot.engine.submit("one", SamplingParams(max_tokens=2))
    tab = talks(parrot)
    shows(tab, ".queue", "50 in line")
    parrot.loop.resume()
    shows(tab, ".queue", "none in line")


def test_a_late_page_counts_steps_like_the_server(talks, parrots):
    """Regression: the page said "step 4,000 of 1,000", and a click on a picture without a step was an
    error."""
    parrot = parrots(max_len=640)
    tab = talks(parrot)
    until(tab, "window.nanobatch")
    tab.locator("[data-step-microscope]").click()
    tab.context.close()
    # A watcher that has seen more steps would receive an error
    wait_for(lambda: not parrot.api.view().watchers)
    parrot.engine.registry.steps = Log(20)  # the server keeps only the newest 20 steps
    parrot.engine.submit("say: one", SamplingParams(max_tokens=60, ignore_eos=True)).result()
    late = talks(parrot)
    until(late, "window.nanobatch?.player.lane.rests")
    late.evaluate("nanobatch.player.goBy(-1)")
    steps = parrot.engine.snapshot().planned
    shows(late, "[data-step-title]", f" of {steps:,}")


def test_a_conversation_that_outgrows_its_slot(talks, parrots):
    tab = talks(parrots(max_len=512))
    say(tab, "say: " + "a" * 80)
    assert "are left" not in facts(tab) and not part(tab, "drop").is_visible()
    say(tab, "say: " + "b" * 60)
    left = int(re.search(r"(\d+) tokens are left: begin anew", facts(tab))[1])
    assert left < 128 and part(tab, "drop").is_visible()
    question = "say: c" + " " * 10 + "d" * left
    say(tab, question)
    until(tab, "document.querySelector('[data-chat-part=note]').textContent")
    assert "maximum context length is 512 tokens" in part(tab, "note").inner_text()
    assert part(tab, "box").input_value() == question and tab.locator(".turn").count() == 2
    tab.said.clear()  # the browser's own message about a refusal
    part(tab, "drop").click()
    until(tab, f"{STOPPED} && document.querySelectorAll('.turn').length === 3")
    mark = tab.locator(".turn.dropped .facts").first
    assert "no longer sees this question and its answer" in mark.inner_text()
    dropped_question = tab.locator(".turn.dropped .asked").first
    assert mark.bounding_box()["y"] < dropped_question.bounding_box()["y"], "what is it about?"
    told = [m["content"] for m in sent(tab)[-1]["messages"]]
    dropped = tab.locator(".turn.dropped").count()
    assert len(told) == 5 - 2 * dropped and told[-1] == question


def give(tab, key: str) -> None:
    tab.fill("[data-key]", key)
    tab.press("[data-key]", "Enter")


def test_a_refused_key_is_not_sent_again(talks, parrots):
    """Regression: the page kept sending the first key that was typed, even after a correct one. No URL
    contains a key."""
    tab = talks(parrots(api_key="hush", watch_key="eye"))
    until(tab, "!document.querySelector('[data-key-form]').hidden")
    give(tab, "wrong")
    shows(tab, "[data-status]", "does not take")
    give(tab, "hush")  # this key allows asking, but not reading what others ask
    shows(tab, "[data-status]", "not shown")
    say(tab, "say: hello")
    assert tab.inner_text(".turn > .reply").strip() == "hello"
    assert tab.is_visible("[data-key]")
    give(tab, "eye")
    until(tab, "nanobatch.player.lane.hidesTexts === false")
    assert not tab.is_visible("[data-key]")
    home = tab.evaluate("location.origin")
    asked = {r.url.removeprefix(home) for r in tab.asked}
    assert asked == {"/watch", "/v1/chat/completions"}
    tab.said.clear()  # the browser's own messages about 401


def test_a_missing_key_is_asked_for(talks, parrots):
    """There are two keys: the watch key shows all texts, and the API key allows asking."""
    tab = talks(parrots(api_key="hush", watch_key="eye"))
    form = "document.querySelector('[data-key-form]').hidden"
    until(tab, f"!{form}")
    give(tab, "eye")
    until(tab, "window.nanobatch")
    tab.evaluate(DROPS, ["notes.txt", "a"])
    shows(tab, "[data-chat-part=note]", "notes.txt is not attached: ")
    until(tab, f"!{form}")
    say(tab, "say: hello")
    shows(tab, "[data-chat-part=note]", "wants its API key")
    assert part(tab, "box").input_value() == "say: hello"
    give(tab, "hush")
    shows(tab, ".turn .facts", "read ")
    assert tab.inner_text(".turn > .reply").strip() == "hello"
    assert tab.evaluate("nanobatch.player.lanes[0].hidesTexts") is False
    tab.reload()  # keeps the conversation, but no key
    until(tab, f"!{form}")
    kept = tab.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }])")
    assert "hello" in kept and "hush" not in kept and "eye" not in kept
    tab.said.clear()  # the browser's own messages about 401


# --- answers that only need to be drawn ---------------------------------------------------------


def events(said: str, thought: str = "") -> str:
    """Return the event stream of a server's answer."""
    progress = {"total": 9, "cache": 0, "processed": 9, "time_ms": 1}
    size = 7 + len(said) // 1000
    deltas = [{"reasoning_content": thought[i : i + size]} for i in range(0, len(thought), size)]
    deltas += [{"content": said[i : i + size]} for i in range(0, len(said), size)]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": 9}})
    lines = [
        json.dumps({"id": "chatcmpl-7-ab", "prompt_progress": progress} | chunk) for chunk in chunks
    ]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def hear(tab, said: str, thought: str = "") -> None:
    tab.unroute("**/v1/chat/completions")
    body = events(said, thought)
    how = {"body": body, "content_type": "text/event-stream; charset=utf-8"}
    tab.route("**/v1/chat/completions", lambda asked: asked.fulfill(**how))
    say(tab, "?")


EVIL = (
    *(text.strip('"') for text in HOSTILE),
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "[x](javascript:document.title='owned') and ![seen](http://127.0.0.1:9/seen.png)",
    "<a href=http://127.0.0.1:9/>x</a><style>*{display:none}</style><iframe srcdoc=x></iframe>",
    "\u202egnp.exe\u2066 \u200fend",
    "```html\n<script>document.title = 'owned'</script>",
    "`<b>` **<i>** | <td> |\n| <td> | **<th>** |",
)


def test_hostile_answers_do_nothing(talks):
    tab = talks()
    for text in EVIL:
        hear(tab, text, thought=text)
    shown = tab.evaluate("document.querySelector('.log').textContent")
    for words in (
        "</script><script>alert(1)",
        "javascript:document.title",
        "![seen](http://127",
        "<a href=",
    ):
        assert shown.count(words) >= 2, words
    assert "<U+202E>" in shown and "\u202e" not in shown
    made = "[...new Set([...document.querySelectorAll('.reply *')].map((e) => e.tagName))]"
    allowed = {"P", "CODE", "PRE", "STRONG", "DIV", "SPAN", "BUTTON"}
    assert set(tab.evaluate(made)) == allowed
    assert "owned" not in tab.title()
    home = tab.evaluate("location.origin")
    assert all(r.url.startswith(home) for r in tab.asked)
    isolated = (
        "[...document.querySelectorAll('.reply p')].map((e) => getComputedStyle(e).unicodeBidi)"
    )
    assert set(tab.evaluate(isolated)) == {"isolate"}


def test_any_answer_stays_in_its_place_on_any_screen(talks):
    tab = talks()
    for text in TEXTS:
        hear(tab, text + "\n\n```\n" + text, thought=text[:200])
    in_place_everywhere(tab, 50)
    wide = "[...document.querySelectorAll('.reply')].filter((e) => e.getBoundingClientRect().right > innerWidth).length"
    assert tab.evaluate(wide) == 0


@pytest.fixture
def draws(opens):
    """A page with `Markdown` and nothing else."""
    tab = opens(ROOT / "web" / "index.html", java_script_enabled=True)
    tab.route(
        "http://web.test/*.js",
        lambda asked: asked.fulfill(path=ROOT / "web" / asked.request.url.rpartition("/")[2]),
    )
    script = "import { Markdown } from './markdown.js'; window.Markdown = Markdown;"
    page = f"<!doctype html><meta charset=utf-8><body><script type=module>{script}</script>"
    tab.route("http://web.test/", lambda asked: asked.fulfill(body=page, content_type="text/html"))
    tab.said.clear()
    tab.goto("http://web.test/")
    until(tab, "!!window.Markdown")
    return tab


DRAWN = (
    "(pieces) => { const root = document.createElement('div'); const view = new Markdown(root);"
    " for (const piece of pieces) { view.push(piece); view.draw(); }"
    " const all = [...root.children].map((part) => part.innerHTML).join('');"
    " return all.replaceAll(' dir=\"auto\"', ''); }"
)

CODE = '<div class="code"><pre><code>{}</code></pre><button class="tab" type="button">Copy</button></div>'
FORMS = {
    "a line\nand one": "<p>a line<span>\nand one</span></p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "## A *head*\ntext": "<h4>A <em>head</em></h4><p>text</p>",
    "**bold `co_de`** and snake_case, 2 * 3 * 4, *args": "<p><strong>bold <code>co_de</code></strong>"
    " and snake_case, 2 * 3 * 4, *args</p>",
    "```\nif a < b:\n    **c**\n```\nafter": CODE.format("if a &lt; b:\n    **c**")
    + "<p>after</p>",
    "```\nnever closed": CODE.format("never closed"),
    "```py\nif a: # b\n```": CODE.format(
        '<span><span class="word">if</span> a: <span class="comment"># b</span></span>'
    ),
    '```c\n#x "a // b" 7 // c': CODE.format(
        '<span>#x <span class="string">"a // b"</span> <span class="number">7</span>'
        ' <span class="comment">// c</span></span>'
    ),
    "- a\n- b\n  1. c\n  2. d\n- e": '<ul><li>a</li><li>b<ol start="1"><li>c</li><li>d</li></ol></li><li>e</li></ul>',
    "3. a\n   ```\n   x\n   ```\n4. b": f'<ol start="3"><li>a{CODE.format("x")}</li><li>b</li></ol>',
    "> said\n> twice\n\nand I": "<blockquote>said<span>\ntwice</span></blockquote><p>and I</p>",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\nend": '<div class="cells"><span>a</span><span>b</span></div>'
    '<div class="cells"><span>1</span><span><strong>2</strong></span></div><p>end</p>',
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
}


COPIES = """([pieces]) => {
  const view = new Markdown(document.body);
  for (const piece of pieces) { view.push(piece); view.draw(); }
  const copied = [];
  const clipboard = { writeText: async (text) => copied.push(text) };
  Object.defineProperty(navigator, "clipboard", { value: clipboard });
  for (const button of document.querySelectorAll(".code button")) button.click();
  return copied;
}"""


def test_code_is_copied_as_the_model_wrote_it(draws):
    """The copied code keeps its tabs, but not a list's indent."""
    text = (
        "- a\n  ```make\n  all:\n  \tcc\n\n  ```\n```\n" + "x = 1\n" * 100 + "```\nend\n```\nopen"
    )
    found = ["all:\n\tcc\n", "\n".join(["x = 1"] * 100), "open"]
    assert draws.evaluate(COPIES, [[text[i : i + 7] for i in range(0, len(text), 7)]]) == found


def test_markdown_is_drawn_as_elements(draws):
    assert {text: draws.evaluate(DRAWN, [text]) for text in FORMS} == FORMS


def test_an_answer_is_drawn_alike_for_any_chunks(draws):
    dice = random.Random(4)
    texts = [*FORMS, *TEXTS, *EVIL, "\n\n".join(FORMS), "word " * 300 + "`x` " * 300]
    compared = 0
    for text in texts:
        whole = draws.evaluate(DRAWN, [text])
        for _ in range(5):
            cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(1, 40)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert draws.evaluate(DRAWN, pieces) == whole, (text, pieces)
            compared += 1
    assert compared > 150


LONG = {
    "without a break": "x",
    "of stars": "*",
    "of backquotes": "`a``",
    "of marks in marks": "**_",
    "of words": "some **words** and `code` ",
    "of lines": "a line of it\n",
    "of quotes in quotes": "> ",
    "of code": "```\ncode\n```\n",
    "of cells": "| a ",
}
TEXTS_OF = {name: (line * 30_000)[:30_000] for name, line in LONG.items()}
TEXTS_OF["of items that lie deeper and deeper"] = "".join(" " * n + "- x\n" for n in range(250))
# Return the number of characters that enter the page per character of an answer that arrives in pieces, the
# depth of its elements, and the largest number of children
WORK = """([text, size]) => {
  let letters = 0;
  const { append, appendChild } = Element.prototype;
  const count = (one) => { letters += 1 + (one.textContent ?? one).length; };
  const counted = (put) => function (...all) { all.forEach(count); return put.apply(this, all); };
  Object.assign(Element.prototype, { append: counted(append), appendChild: counted(appendChild) });
  const root = document.createElement("div");
  const view = new Markdown(root);
  for (let at = 0; at < text.length; at += size) {
    view.push(text.slice(at, at + size));
    view.draw();
  }
  Object.assign(Element.prototype, { append, appendChild });
  let deep = 0;
  let broad = 0;
  for (const leaf of root.querySelectorAll("*")) {
    broad = Math.max(broad, leaf.childNodes.length);
    if (leaf.firstElementChild) continue;
    let depth = 0;
    for (let node = leaf; node !== root; node = node.parentNode) depth += 1;
    deep = Math.max(deep, depth);
  }
  return [letters / text.length, deep, broad];
}"""


def test_drawing_is_linear_in_the_answer(draws):
    """Answers of 30,000 characters arrive in pieces of 50. Redrawing the answer for each piece would put each
    character into the page 300 times."""
    for name, text in TEXTS_OF.items():
        work, deep, broad = draws.evaluate(WORK, [text, 50])
        assert 0 < work < 50, name
        assert deep < 200, name
        assert broad < 1000, name  # otherwise the browser lays out the whole element for each piece
