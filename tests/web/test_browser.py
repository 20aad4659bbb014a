"""The page in a real browser: python -m pytest tests/web/test_browser.py

This needs `pip install -e '.[browser]'` and Chromium (`apt-get install chromium`); otherwise these tests are
skipped. The test of Python in the page also needs Pyodide, as `test_simulate.py` explains.
"""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsers import (
    DESK,
    PHONE,
    choose,
    in_place_everywhere,
    needs_browser,
    needs_pyodide,
    shows,
    until,
)
from recordings import HOSTILE, TEXTS, recording
from servers import Server

from docs.make import annotated, page

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "docs" / "index.html"
pytestmark = needs_browser


def test_the_page_plays_from_a_file_without_a_network(opens):
    tab = opens(DEMO)
    until(tab, "nanobatch.player.now > 0.05")
    until(tab, "document.querySelector('.answers .text').textContent.length > 20")
    assert tab.inner_text("[data-play]") == "Pause"
    tab.evaluate("nanobatch.player.goTo(99)")
    until(tab, "document.querySelector('[data-verdict]').textContent")
    assert "Continuous takes" in tab.inner_text("[data-verdict]")
    assert tab.inner_text(".figures >> nth=0").startswith("done in")


def test_it_answers_to_the_keyboard_and_to_the_scrubber(opens):
    tab = opens(DEMO)
    tab.keyboard.press(" ")
    until(tab, "!nanobatch.player.playing")
    tab.evaluate("nanobatch.player.goTo(nanobatch.player.end * 0.3)")
    before = tab.evaluate("nanobatch.player.step")
    for key, by in (("ArrowRight", 1), ("s", 2), ("ArrowLeft", 1), ("Shift+ArrowRight", 11)):
        tab.keyboard.press(key)
        until(tab, f"nanobatch.player.step === {before + by}")
    tab.locator("#h-step").scroll_into_view_if_needed()
    shows(tab, "[data-step-title]", f"step {before + 12} ")
    assert tab.inner_text("[data-step-words]")
    tab.keyboard.press("End")
    until(tab, "nanobatch.player.now === nanobatch.player.end")
    tab.keyboard.press("Home")
    until(tab, "nanobatch.player.now === 0")
    tab.locator("[data-scrub]").fill("1000")
    until(tab, "Math.abs(nanobatch.player.now - nanobatch.player.end / 2) < 0.01")
    tab.locator("[data-scrub]").focus()
    tab.keyboard.press(" ")  # without scrolling the page
    until(tab, "nanobatch.player.playing")
    pace = tab.evaluate("nanobatch.player.pace")
    tab.locator("h1").click()
    tab.keyboard.press("-")
    until(tab, f"nanobatch.player.pace > {pace}")


def test_links_of_the_annotated_core_open_a_step(opens):
    """A link opens a step from another page, and within the open page, where only the hash changes. The
    buttons open one, too."""
    tab = opens(f"file://{DEMO}#ghost")
    shows(tab, "[data-step-words]", "a ghost")
    assert not tab.evaluate("nanobatch.player.playing")
    words = {"join": "Admitted", "chunk": "(tokens 1 to ", "prefix": "known already"}
    words |= {"ghost": "a ghost", "blocked": "blocked"}
    assert words.keys() == annotated.MARKS.groupindex.keys() - {"code", "em"}
    for name, said in words.items():
        tab.evaluate(f"location.hash = '{name}'")
        shows(tab, "[data-step-words]", said)
    tab.evaluate("nanobatch.choose(3)")
    tab.locator("[data-step-examples] button").first.click()
    shows(tab, "[data-step-words]", "Admitted")
    assert tab.evaluate("nanobatch.player.chosen") == 0  # a chosen request would dim all others
    until(
        tab, "document.querySelector('[data-step-panel]').getBoundingClientRect().top < innerHeight"
    )


def test_a_click_on_a_column_shows_its_step(opens):
    tab = opens(DEMO)
    tab.evaluate("nanobatch.player.goTo(0.5); nanobatch.choose(3)")
    tab.locator("[data-step-microscope]").scroll_into_view_if_needed()
    step = tab.evaluate("nanobatch.player.step")
    until(tab, f"nanobatch.step.index === {step}")
    tab.locator("[data-step-microscope]").click(position={"x": 30, "y": 30})
    assert tab.evaluate("nanobatch.player.step") < step
    assert tab.evaluate("nanobatch.player.chosen") == 0
    tab.click(".steps [data-press=ArrowRight]")
    tab.click(".steps [data-press=ArrowRight]")
    tab.click(".steps [data-press=ArrowLeft]")
    shown = tab.evaluate("nanobatch.player.step")
    shows(tab, "[data-step-title]", f"step {shown + 1} ")


def test_the_cost_of_a_step_adds_up_in_its_words(opens):
    tab = opens(DEMO)
    tab.evaluate("nanobatch.player.goToStep(1)")
    tab.locator("[data-step-words]").scroll_into_view_if_needed()
    until(tab, "nanobatch.step.index === 1")
    cost, words = tab.inner_text("[data-step-cost]"), tab.inner_text("[data-step-words]")
    numbers = r"(\d+) of a budget of 136: (\d+) for answers, (\d+) for prompts"
    whole, decoded, read = map(int, re.search(numbers, cost).groups())
    chunks = re.findall(r"tokens (\d+) to (\d+) of \d+", words)
    wholes = re.findall(r"all (\d+) tokens", words)
    assert read == sum(int(b) - int(a) + 1 for a, b in chunks) + sum(map(int, wholes)) > 0
    assert whole == decoded + read


def test_heading_and_picture_show_the_same_step(opens):
    """Regression: the heading is updated less often than steps end, so the picture was ahead of it."""
    tab = opens(DEMO)
    tab.locator("[data-step-words]").scroll_into_view_if_needed()
    until(tab, "nanobatch.player.step > 20")
    for _ in range(10):
        told = tab.evaluate(
            "[document.querySelector('[data-step-title]').textContent, nanobatch.step.index + 1]"
        )
        assert f"step {told[1]} " in told[0]
        tab.wait_for_timeout(50)


def test_a_press_on_a_timeline_opens_the_request_there(opens):
    """Regression: a click on a timeline whose lane had ended opened the request that ended last."""
    tab = opens(DEMO)
    tab.evaluate("nanobatch.player.goTo(nanobatch.player.end)")
    tab.locator("canvas.timeline >> nth=1").click(position={"x": 60, "y": 5})
    until(tab, "nanobatch.player.chosen === 1")
    for words in ("fox and a lantern", "sha256"):
        shows(tab, "[data-request]", f"{words}")
    tab.click("[data-request] [aria-label='close this request']")
    until(tab, "document.querySelector('[data-request]').hidden")
    tab.evaluate("nanobatch.choose(1)")
    until(tab, "!document.querySelector('[data-request]').hidden")
    tab.evaluate("nanobatch.player.goTo(nanobatch.player.end)")
    for slot in range(8):
        tab.locator("canvas.timeline >> nth=1").click(position={"x": 900, "y": 14 * slot + 7})
        assert tab.evaluate("nanobatch.player.chosen") == 0
    tab.evaluate("nanobatch.choose(1)")
    until(tab, "!document.querySelector('[data-request]').hidden")
    tab.keyboard.press("Escape")
    until(tab, "document.querySelector('[data-request]').hidden")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(opens, viewport, scheme):
    tab = opens(DEMO, viewport=viewport, color_scheme=scheme)
    tab.evaluate("nanobatch.player.goTo(0.7); nanobatch.choose(6)")
    until(tab, "!document.querySelector('[data-request]').hidden")
    assert tab.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) == (scheme == "dark")


@pytest.fixture
def plays(opens, tmp_path):
    """Return a function that makes a page of recordings and opens it."""

    def opened(*recordings: dict, **how):
        (tmp_path / "page.html").write_text(page.make(list(recordings)))
        return opens(tmp_path / "page.html", **how)

    return opened


def test_any_text_stays_in_its_row(plays):
    """Regression: the answers of a real model, unlike the demo model's, have line breaks, and their lines
    overlapped the rows below and the next heading."""
    run = recording([(f'"{text}"', 600) for text in TEXTS], burst=len(TEXTS), max_len=4096)
    tab = plays(run, run)
    until(tab, "nanobatch.player.now > 0")
    for part in (0.1, 0.5, 1.0):
        tab.evaluate(f"nanobatch.player.goTo(nanobatch.player.end * {part})")
        in_place_everywhere(tab, 120)
    tab.click("[data-every]")
    for number in range(1, len(TEXTS) + 1):
        choose(tab, number)
        in_place_everywhere(tab, 200)


def test_nothing_moves_when_it_is_seen_for_the_first_time(opens):
    """Regression: the list of requests was filled when it became visible, and everything below it jumped."""
    tab = opens(DEMO)
    until(tab, "nanobatch.player.now > 0.02")
    tab.evaluate("nanobatch.player.pause()")
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.locator("#run").scroll_into_view_if_needed()
    tab.locator("#h-all").scroll_into_view_if_needed()
    assert tab.evaluate("document.documentElement.scrollHeight") == height


def test_who_wants_no_motion_sees_the_whole_run_at_rest(opens):
    tab = opens(DEMO, reduced_motion="reduce")
    until(tab, "document.querySelector('[data-verdict]').textContent")
    # The last frame is the same at two checks: an idle page draws nothing
    until(
        tab,
        "nanobatch.player.frames.last === window.before || !(window.before = nanobatch.player.frames.last)",
    )
    assert not tab.evaluate("nanobatch.player.playing")


def test_a_few_requests_are_listed_until_all_are_asked_for(plays):
    """Regression: in a recording of more than 40 requests the first ones were never listed."""
    tab = plays(recording(burst=45), viewport=PHONE, reduced_motion="reduce")
    rows = tab.locator("[data-requests] li")
    until(tab, "!document.querySelector('[data-every]').hidden")
    assert rows.count() == 6
    tab.click("[data-every]")
    until(tab, "document.querySelectorAll('[data-requests] li').length === 45")
    tab.click("[data-every]")
    until(tab, "document.querySelectorAll('[data-requests] li').length === 6")


def test_an_open_request_stays_open(opens):
    """Regression: newer requests of a server replaced the open one, and after that no request could be
    opened."""
    tab = opens(DEMO, reduced_motion="reduce")
    tab.click("[data-requests] .request >> nth=1")
    until(tab, "document.querySelector('li [data-request] .chip')?.textContent === '2'")
    # With a server, only the newest requests are listed
    tab.evaluate("nanobatch.player.change({ window: 20 })")
    until(tab, "document.querySelector('[data-requests] .number').textContent === '19'")
    assert tab.locator("[data-opened] [data-request]").is_visible()
    tab.click(".slots .chip >> nth=0")
    until(tab, "document.querySelector('[data-request] .chip').textContent !== '2'")


def test_touch_targets_are_large_enough(opens):
    tab = opens(DEMO, viewport=PHONE, reduced_motion="reduce")
    until(tab, "!document.querySelector('[data-every]').hidden")
    seen = "[...document.querySelectorAll('button:not(.row button)')].filter((e) => e.offsetHeight)"
    assert tab.evaluate(f"{seen}.length") > 15
    assert (
        tab.evaluate(f"{seen}.filter((e) => e.offsetHeight < 36).map((e) => e.textContent)") == []
    )


def test_file_names_become_links(opens, tmp_path):
    """File names become links on GitHub Pages and in a copy of the repository. Elsewhere they stay plain
    text, because links would lead nowhere."""
    links = "[...document.querySelectorAll('a[data-file]')].map((link) => [link.dataset.file, link.href])"
    found = opens(DEMO).evaluate(links)
    assert len(found) >= 5
    for name, href in found:
        assert href == f"file://{ROOT / name}" and (ROOT / name).exists()
    (tmp_path / "page.html").write_text(DEMO.read_text())
    assert {href for _, href in opens(tmp_path / "page.html").evaluate(links)} == {""}
    tab = opens(tmp_path / "page.html")
    tab.route("https://ann.github.io/**", lambda asked: asked.fulfill(path=DEMO))
    tab.goto("https://ann.github.io/nanobatch/")
    for name, href in tab.evaluate(links):
        assert href == f"https://github.com/ann/nanobatch/blob/main/{name}"
    tab.evaluate(
        "nanobatch.game.deal(); nanobatch.game.rows = nanobatch.game.setup.runs; nanobatch.game.copy()"
    )
    until(tab, "!document.querySelector('[data-game-score]').hidden")
    assert tab.inner_text("[data-game-score]").endswith("\nhttps://ann.github.io/nanobatch/#game")


def test_the_picture_of_the_page_shows_the_finished_race(opens, tmp_path):
    out = tmp_path / "card.png"
    subprocess.run(
        [sys.executable, ROOT / "docs" / "make" / "pictures.py", "card", "--out", tmp_path],
        check=True,
        timeout=120,
    )
    drawn, kept = (path.read_bytes() for path in (out, ROOT / "docs" / "card.png"))
    assert drawn[:24] == kept[:24], "of another size"
    assert len(drawn) > len(kept) / 2, "there is less to be seen"


def test_the_page_without_scripts(opens):
    tab = opens(DEMO, java_script_enabled=False)
    assert "Scripts are off" in tab.inner_text("noscript")
    assert "What eight requests cost" in tab.inner_text("body")


def test_hostile_texts_are_shown_and_do_nothing(plays):
    tab = plays(recording([(prompt, 40) for prompt in HOSTILE], burst=4))
    tab.evaluate("nanobatch.player.goTo(99)")
    for number, prompt in enumerate(HOSTILE, start=1):
        choose(tab, number)
        answer = "document.querySelector('[data-request] .answer').textContent"
        until(tab, f"{answer} === {json.dumps(prompt.split(chr(34))[1])}")
    assert tab.evaluate("document.querySelectorAll('img, iframe').length") == 0
    kinds = tab.evaluate(
        "[...document.querySelectorAll('bdi')].map(e => getComputedStyle(e).unicodeBidi)"
    )
    assert set(kinds) == {"isolate"}


# --- Python in the page -------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("access-control-allow-origin", "*")
        super().end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def files() -> Iterator[Callable[[str], str]]:
    """Yield a function that serves a folder and returns its address."""
    servers = []

    def serve(folder: str) -> str:
        handler = functools.partial(Quiet, directory=folder)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def with_python_from(address: str, folder: Path) -> Path:
    (folder / "page.html").write_text(page.make([page.read_recording(str(DEMO))], address))
    return folder / "page.html"


@needs_pyodide
def test_the_scheduler_runs_in_the_page(opens, files, tmp_path):
    tab = opens(with_python_from(files(os.environ["NANOBATCH_PYODIDE"]), tmp_path), offline=False)
    tab.click("[data-lab-load]")
    shows(tab, "[data-lab-status]", "step")
    first = tab.inner_text("[data-lab-runs] tr >> nth=0").split("\t")
    static, continuous = page.read_recording(str(DEMO))["runs"]
    assert first[0] == "continuous" and first[5] == str(len(continuous["steps"]))
    tab.select_option("[name=policy]", "static")
    shows(tab, "[data-lab-status]", f"{len(static['steps'])} steps")
    tab.select_option("[name=policy]", "mine")
    text = tab.input_value("[name=lines]")
    wrong = "free if fre >= 2"
    tab.fill("[name=lines]", text.replace("free if free >= 2", wrong))
    error = "[data-lab-error]"
    shows(tab, error, ": NameError")
    assert wrong in tab.inner_text("[data-lab-where]")
    tab.fill("[name=lines]", text.replace("    return iter(", "    while True: pass\n    iter(", 1))
    shows(tab, error, "was stopped")
    tab.click("[data-lab-reset]")
    until(tab, "!document.querySelector('[data-lab-error]').textContent")


def test_only_the_pinned_python_is_accepted(opens, files, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "pyodide.mjs").write_text("alert(1)")
    tab = opens(with_python_from(files(str(tmp_path / "served")), tmp_path), offline=False)
    tab.click("[data-lab-load]")
    shows(tab, "[data-lab-status]", "Python could not be loaded")
    assert any("integrity" in text for text in tab.said)
    tab.said.clear()


def test_python_in_the_page_needs_a_network(opens):
    tab = opens(DEMO)
    tab.click("[data-lab-load]")
    shows(tab, "[data-lab-status]", "needs a network")
    tab.said.clear()  # the browser's own message about the missing network
    tab.evaluate("nanobatch.player.goTo(0.2)")
    assert tab.evaluate("nanobatch.player.now") == pytest.approx(0.2)


def test_the_game_is_played_by_keys_to_a_score(opens):
    tab = opens(DEMO)
    tab.evaluate("nanobatch.player.pause()")
    tab.click("[data-game-start]")
    until(tab, "nanobatch.game.hand.line.length > 2")
    tab.keyboard.press("1")
    until(tab, "nanobatch.game.hand.slots[0]?.id === 1")
    # A second press at the same place hits no other request. Check it within the same call, because another
    # request soon takes the place.
    before, after, name, still = tab.evaluate(
        "(() => { const place = document.querySelectorAll('.line li')[1], before = place.getBoundingClientRect();"
        " place.querySelector('.card').click(); const { line } = nanobatch.game.hand;"
        " const after = place.getBoundingClientRect(), still = line.some((request) => request.id === 2);"
        " return [before.top, after.top, place.className, still]; })()"
    )
    assert before == after and name == "gone" and not still
    tab.keyboard.press(" ")
    until(tab, "!nanobatch.game.running")
    tab.evaluate(  # play the rest of the hand without waiting
        "const { hand } = nanobatch.game; while (!hand.isOver) { for (const r of [...hand.line]) hand.admit(r);"
        " hand.step(); } nanobatch.game.end()"
    )
    assert tab.locator("[data-game-rows] tr").count() == len(page.POLICIES) + 1
    assert "You " in tab.inner_text("[data-game-status]")
    assert "What cost you time" in tab.inner_text("[data-game-why]")
    for words in page.POLICIES:
        assert words in tab.inner_text("[data-game-rows]")


# --- a server -----------------------------------------------------------------------------------


def test_a_servers_own_page_shows_what_it_does(opens):
    with Server() as server:
        tab = opens(f"{server.address}/", offline=False)
        shows(tab, "[data-status]", "Nothing runs")
        server.chat("Count from 3 to 7.", max_tokens=40)
        shows(tab, ".answers .text", "3, 4, 5, 6, 7")
        shows(tab, ".figures", "1 answered")
        shows(tab, "[data-status]", "1 request ended")
