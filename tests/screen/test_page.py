"""A page is one record. Its key, command, completion, help, footer, palette entry and log derive from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from source import PACKAGES

from screen.commands import PlainLog
from tui import MENU

ROOT = Path(__file__).parents[2]
# The smallest possible page
HELLO = '''"""It says hello."""

from screen.page import Page


def draw(state, on):
    on.title("Hello")
    on.say(f"{len(state.view.engine.slots)} slots say hello.")


PAGE = Page("hello", "H", "Hello", "says hello", draw, footer=2)
'''
USED = """
from screen_stage import Stage, drawn, plain, show
from screen.commands import PlainLog, orders_of
from tui import MENU

async def scenario(it):
    assert "H Hello" in it.text().splitlines()[-1]
    it.stage.obey("/resume")  # else the letter might be text
    await it.press("H", turns=0)
    assert it.app.page.name == "hello" and "8 slots say hello." in it.text()
    await it.press("t", turns=0)
    assert it.app.page.name == "totals"
    await it.press("H", "H", turns=0)
    assert it.app.page is None
    await it.press("slash", *"hell", "tab", "enter", turns=0)
    assert it.app.page.name == "hello"
    assert any("Hello (H)" in each.title for each in it.app.get_system_commands(it.app.screen))

stage = show(scenario, size=(200, 50)).finish()
said = []
PlainLog(stage.session, said.append).obey("/hello")
assert said[1:] == [" 8 slots say hello."], said
assert orders_of("burst8 hello", MENU, logged=True) == [("burst", "8"), ("hello", "")]
assert "says hello" in "".join(stage.lines(MENU.draw_help, 120, 40))
print("hello, too")
"""


def test_a_new_page_is_a_file_and_a_line_of_the_table(tmp_path):
    """Regression: the long-prompt page was named in five files and sixteen tables. This needs a separate
    process, since bindings are created with the screen class."""
    for name in (
        *PACKAGES,
        "benchmarks",
        "cli",
        "experiments",
        "screen",
        "server",
        "course",
        "tests/lib",
    ):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "screen" / "pages" / "hello.py").write_text(HELLO)
    table = tmp_path / "screen" / "keys.py"
    text = table.read_text()
    text = text.replace("    error_log,\n", "    error_log,\n    hello,\n", 1)
    text = text.replace("    error_log.PAGE,\n", "    error_log.PAGE,\n    hello.PAGE,\n", 1)
    table.write_text(text)
    run = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path / 'tests' / 'lib'}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout == "hello, too\n", run.stdout + run.stderr


def test_every_page_can_be_read_in_a_log(stage):
    """Regression: totals, errors and clients were only available on a screen."""
    stage.obey("/burst 4")
    stage.finish()
    for page in MENU.pages.values():
        if not page.disturbs:
            said = []
            log = PlainLog(stage.session, said.append)
            log.refresh()
            before = len(said)
            log.obey(f"/{page.name}")
            stage.client.loop.turn()
            log.refresh()
            assert len(said) > before, page.name
