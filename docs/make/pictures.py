"""Make the pictures of README, docs and course.

    python docs/make/pictures.py                    all of them
    python docs/make/pictures.py race --out /tmp    one of them, in another folder

    screen     docs/screen.svg: the screen during a burst
    watch      docs/watch-dark.svg, docs/watch-light.svg: a burst on the screen, animated
    race       docs/race.svg: both legs of a race on one clock, animated
    clients    docs/clients.svg: the screen under HTTP load
    stage      course/from_zero/stage.svg: the first stage of the course, animated
    card       docs/card.png: the finished race of docs/index.html, for links to the page

`card` needs Chromium, and pip install -e '.[browser]'. The others run the screen without a terminal.

An animated picture is made of frames, which Rich and Textual export as SVG. It has no script: CSS shows
one frame after another. Most lines do not change from frame to frame, so each is stored only once. If the
reader prefers reduced motion, the last frame is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.segment import Segment, Segments  # noqa: E402
from rich.text import Text  # noqa: E402

import tui  # noqa: E402
from course.from_zero.start import filled  # noqa: E402
from course.overlay import functions  # noqa: E402
from experiments import race as race_page  # noqa: E402
from screen.app import Screen  # noqa: E402
from screen.commands import Session  # noqa: E402
from screen.draw.canvas import Canvas  # noqa: E402
from screen.draw.style import DARK  # noqa: E402
from screen.state import State  # noqa: E402

PLAIN_SIZE = (120, 40)  # size of a still picture in characters
SIZE = (100, 34)  # size of an animated picture


# --- animated pictures --------------------------------------------------------------------------


class Picture(NamedTuple):
    svg: str
    seconds: float


CELL, LINE, BASE = 12, 24, 19  # pixels: width of a character, height of a line, its baseline
RICH_CELL, RICH_LINE = 12.2, 24.4  # width and height in Rich's SVG
RECT = re.compile(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
TEXT = re.compile(
    r'class="[^"]*-(r\d+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>(.*?)</text>'
)
STYLE = re.compile(r"-(r\d+) \{ (.*?) \}")


def cells(pixels: str) -> int:
    return round(float(pixels) / RICH_CELL) * CELL


def lines_of(svg: str, classes: dict[str, str], rows: int) -> list[str]:
    """Split a frame into lines of SVG, each at the origin. `classes`: CSS style -> class name, extended
    here."""

    def name_of(style: str) -> str:
        return classes.setdefault(style.replace(" ", ""), f"s{len(classes)}")

    styles = dict(STYLE.findall(svg))
    lines = [""] * rows
    for fill, x, y, width in RECT.findall(svg):
        wide = cells(width)
        box = f'd="M{cells(x)}-{BASE}h{wide}v{LINE}h-{wide}"'
        lines[round(float(y) / RICH_LINE)] += f'<path class="{name_of(f"fill:{fill}")}" {box}/>'
    for style, x, y, width, text in TEXT.findall(svg):
        text = text.replace("&#160;", " ")
        if text.strip():
            # Block characters may fall back to a font with a different width
            fixed = "" if text.isascii() else f' textLength="{cells(width)}"'
            place = f'class="{name_of(styles[style])}" x="{cells(x)}"{fixed}'
            lines[int(float(y) / RICH_LINE)] += f"<text {place}>{text}</text>"
    return lines


def keyframes(name: str, begin: float, end: float) -> str:
    """Return the CSS of a class that is visible from `begin` to `end`, in percent of the time. The last
    frame is also visible without animation."""
    moments = "" if begin else "0%{visibility:visible}"
    if begin:
        moments += f"0%{{visibility:hidden}}{begin:.2f}%{{visibility:visible}}"
    if end < 100:
        moments += f"{end:.2f}%{{visibility:hidden}}"
    rests = "hidden" if end < 100 else "visible"
    return f".{name}{{visibility:{rests};animation-name:{name}}}@keyframes {name}{{{moments}}}"


def moving(frames: Sequence[Picture], size: tuple[int, int] = SIZE) -> str:
    """Return one animated SVG of all frames. A line that stays the same for several frames is written
    once."""
    columns, rows = size
    whole = sum(frame.seconds for frame in frames)
    ends = [100 * sum(f.seconds for f in frames[: i + 1]) / whole for i in range(len(frames))]
    starts = [0.0, *ends[:-1]]
    classes: dict[str, str] = {}
    spans: dict[tuple[float, float], str] = {}
    drawn = [lines_of(frame.svg, classes, rows) for frame in frames]
    body = []
    for row in range(rows):
        for line, same in groupby(range(len(frames)), key=lambda i: drawn[i][row]):
            shown = list(same)
            span = starts[shown[0]], ends[shown[-1]]
            place = f'transform="translate(0 {row * LINE + BASE})"'
            if len(shown) < len(frames):
                name = spans.setdefault(span, f"m{len(spans)}")
                place = f'class="m {name}" {place}'
            if line:
                body.append(f"<g {place}>{line}</g>")
    looks = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    moves = "".join(keyframes(name, *span) for span, name in spans.items())
    rects = RECT.findall(frames[0].svg)
    back = max(rects, key=lambda rect: float(rect[3]))[0] if rects else DARK.back
    box = f"{-CELL} {-CELL} {(columns + 2) * CELL} {rows * LINE + 2 * CELL}"  # with a margin
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">
<style>text{{font:20px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
{looks}
.m{{animation:{whole:.1f}s step-end infinite}}{moves}
@media(prefers-reduced-motion:reduce){{.m{{animation:none!important}}}}</style>
<rect x="{-CELL}" y="{-CELL}" width="100%" height="100%" fill="{back}"/>
{chr(10).join(body)}
</svg>
"""


def exported(lines: Sequence[Sequence[Segment] | Text], size: tuple[int, int] = SIZE) -> str:
    """Return Rich's SVG of these lines on a terminal of this size."""
    columns, rows = size
    console = Console(
        record=True,
        width=columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for line in lines[:rows]:
        if not isinstance(line, Text):
            line = Segments([*Segment.simplify(line), Segment.line()])
        console.print(line, end="\n" if isinstance(line, Text) else "", no_wrap=True, crop=True)
    return console.export_svg()


# --- the screen ---------------------------------------------------------------------------------


def run_screen(
    act: Callable[[Screen], Awaitable[None]],
    *options: str,
    size: tuple[int, int] = SIZE,
) -> None:
    """Run the screen without a terminal until `act` returns."""
    args = tui.parse_arguments(["--model", "demo", *options])
    client = tui.open_client(args)
    client.start()
    screen = Screen(Session(client, State("demo"), tui.MENU))

    async def play(_) -> None:
        try:
            await screen.until(lambda: screen.state.view.stage != "loading")
            await act(screen)
        finally:
            screen.exit()

    try:
        screen.run(headless=True, size=size, auto_pilot=play)
    finally:
        client.stop(10)


def screen() -> dict[str, str]:
    pictures = {}

    async def act(screen: Screen) -> None:
        await screen.play("pause burst24 step110")
        pictures["docs/screen.svg"] = await screen.draw_picture()

    run_screen(act, size=PLAIN_SIZE)
    return pictures


# --- a burst ------------------------------------------------------------------------------------

BURST_STEPS = (1, 1, 1, 1, 1, 1, 2, 2, 2, 2, *[6] * 18)  # engine steps before each frame
SHOWN = 0.45  # seconds of a frame
LAST = 9 * SHOWN  # seconds of the last frame


def watch() -> dict[str, str]:
    return {f"docs/watch-{theme}.svg": moving(burst(theme)) for theme in ("dark", "light")}


def burst(theme: str) -> list[Picture]:
    frames = []

    async def act(screen: Screen) -> None:
        await screen.play(f"{theme} pause burst24")
        for count in BURST_STEPS:
            await screen.play(f"step{count}")
            frames.append(Picture(await screen.draw_picture(), SHOWN))

    run_screen(act)
    return [*frames[:-1], frames[-1]._replace(seconds=LAST)]


# --- a race -------------------------------------------------------------------------------------

RACE_FRAMES = 24


def race() -> dict[str, str]:
    """Draw the replay of a finished race, with both legs on one clock."""
    frames = []

    async def act(screen: Screen) -> None:
        await screen.play("race24")
        state = screen.state
        contest = race_page.shown_in(state).last
        longest = max(run.makespan for run in contest.runs)
        for number in range(RACE_FRAMES + 1):
            is_over = number == RACE_FRAMES
            canvas = Canvas(DARK, *SIZE)
            canvas.has_keys = False
            moment = None if is_over else longest * number / RACE_FRAMES
            race_page.draw_contest(state, canvas, contest, moment)
            frames.append(Picture(exported(canvas.lines), LAST if is_over else SHOWN))

    run_screen(act)
    return {"docs/race.svg": moving(frames)}


# --- clients over HTTP --------------------------------------------------------------------------

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STORY = "Tell me a long story about a fox and a lantern."
SHORT = (
    "Count from 3 to 12.",
    "What is 17 + 6?",
    "Reverse the word stone.",
    "Why batch?",
    "What is a slot?",
)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")  # two more than there are slots
WEATHER = [{"role": "user", "content": "What is the weather?"}]
REFUSED = (
    (CHAT, {"messages": [], "n": 0}),
    (CHAT, {"messages": WEATHER, "tools": [{"type": "function"}]}),
    ("/v1/embeddings", {"input": "a text"}),
    (COMPLETIONS, {"prompt": "Once upon a time", "temperature": "hot"}),
)


def post(address: str, path: str, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def chat(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def ask_in_thread(address: str, body: dict) -> threading.Thread:
    thread = threading.Thread(target=lambda: post(address, CHAT, body).read(), daemon=True)
    thread.start()
    return thread


def traffic(address: str) -> None:
    """Send requests as several clients would: some are answered, some refused, and one disconnects."""
    for path, body in REFUSED[:2]:
        post(address, path, body).read()
    for thread in [ask_in_thread(address, chat(text)) for text in SHORT]:
        thread.join()
    gone = post(address, CHAT, chat(STORY, stream=True))
    gone.read(200)
    gone.close()  # disconnects, because nothing else holds the connection
    for path, body in REFUSED[2:]:
        post(address, path, body).read()
    for i, name in enumerate(NAMES):
        story = f"{STORY[:-1]} named {name}."
        ask_in_thread(address, chat(story, stream=i % 3 > 0, max_tokens=400))
        time.sleep(0.05)
    time.sleep(0.5)


def clients() -> dict[str, str]:
    pictures = {}

    async def act(screen: Screen) -> None:
        client = screen.session.client
        await asyncio.to_thread(traffic, client.server.address)
        client.pause(True)
        await screen.until(lambda: screen.state.view.paused)
        pictures["docs/clients.svg"] = await screen.draw_picture()

    run_screen(act, "--serve", "0", size=PLAIN_SIZE)
    return pictures


# --- a stage of the course ----------------------------------------------------------------------

COURSE = "course/from_zero"
STAGE_SIZE = (108, 22)
SOLUTION = ROOT / "tests" / "lib" / "simple_core.py"
FORGOTTEN = " / Dh**0.5"  # the first attempt's mistake
HUES = {"$": DARK.accent, "✓": "#7fd08a", "✗": DARK.bad}


def stage() -> dict[str, str]:
    """Draw a stage of the course: blank functions, a mistake with its message, and success. The
    commands run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        frames = [Picture(page_of(lines), seconds) for seconds, lines in scenes(Path(folder))]
    return {f"{COURSE}/stage.svg": moving(frames, STAGE_SIZE)}


def page_of(lines: Sequence[str]) -> str:
    hues = [HUES.get(line.strip()[:1], DARK.text) for line in lines]
    texts = [Text(f" {line}", style=hue) for line, hue in zip(lines, hues, strict=True)]
    return exported([Text(), *texts], STAGE_SIZE)


def scenes(folder: Path) -> Iterator[tuple[float, list[str]]]:
    """Yield (seconds, frame) pairs."""
    run = partial(output_of, folder)
    check = "check.py mine 1"
    yield 2, run("start.py mine")
    yield 3, run(check)
    yield 5, fill_in(folder, "attention", forget=FORGOTTEN)
    yield 6, run(check)
    file = folder / "mine" / "llama.py"
    scores = "scores = q @ k.transpose(0, 1, 3, 2)"
    file.write_text(file.read_text().replace(scores, scores + FORGOTTEN))
    yield 4, run(check)
    yield 4, [*fill_in(folder, "heads"), "", *fill_in(folder, "forward")[2:]]
    yield 6, run(check)


def output_of(folder: Path, command: str) -> list[str]:
    """Run a command. Return the command line and its output."""
    program, *words = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / COURSE / program), *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return [f"$ python {COURSE}/{command}", *(done.stdout + done.stderr).splitlines()]


def fill_in(folder: Path, name: str, forget: str = "") -> list[str]:
    """Fill in the body of a blank function. Return the lines of the complete function."""
    file = folder / "mine" / "llama.py"
    solution = SOLUTION.read_text().replace(forget, "") if forget else SOLUTION.read_text()
    blank = functions(file.read_text())[name]
    file.write_text(filled(file.read_text(), name, solution))
    solved = functions(solution)[name]
    body = solution.splitlines()[solved.body[0].lineno - 1 : solved.end_lineno]
    arguments = ", ".join(arg.arg for arg in blank.args.args)
    return ["# mine/llama.py", "", f"def {name}({arguments}):", *body]


# --- the page -----------------------------------------------------------------------------------

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
CARD_SIZE = {"width": 1200, "height": 630}  # messengers show this size without cropping
CARD_STYLE = """
.bar a, .lead, .key, .transport, .hint, [data-answers], section ~ section { display: none !important; }
body { max-width: none; padding: 10px 60px; }
.bar strong { font-size: 26px; }
h1 { font-size: 46px; margin: 22px 0 26px; }
h3, .figures { font-size: 22px; }
.lane { margin-bottom: 20px; }
.verdict { font-size: 23px; line-height: 1.4; max-width: none; }
"""


def card() -> dict[str, bytes]:
    """Take a screenshot of the page in a browser, without the parts that are illegible at this size."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), "")
    if not (chromium and find_spec("playwright")):
        raise ValueError("card takes Chromium, and pip install -e '.[browser]'; name the others")
    from playwright import sync_api  # an optional dependency

    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        # With reduced motion the page shows the end of the race. `bypass_csp` allows CARD_STYLE.
        context = browser.new_context(viewport=CARD_SIZE, reduced_motion="reduce", bypass_csp=True)
        tab = context.new_page()
        tab.goto(f"file://{ROOT / 'docs' / 'index.html'}")
        tab.add_style_tag(content=CARD_STYLE)
        # The style changed the size of the canvases, so redraw them and wait for the next frame
        tab.evaluate("nanobatch.player.change({ looks: 1 }); new Promise(requestAnimationFrame)")
        picture = tab.screenshot()
        browser.close()
    return {"docs/card.png": picture}


PICTURES = {
    "screen": screen,
    "watch": watch,
    "race": race,
    "clients": clients,
    "stage": stage,
    "card": card,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="docs/make/pictures.py")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--out", type=Path, help="another folder for the files")
    args = parser.parse_args(arguments)
    try:
        for name in args.names or PICTURES:
            if name not in PICTURES:
                raise ValueError(f"there is no picture {name!r}; choose of {', '.join(PICTURES)}")
            for file, content in PICTURES[name]().items():
                path = args.out / Path(file).name if args.out else ROOT / file
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                print(f"{path}: {path.stat().st_size:,} bytes")
    except (ValueError, OSError) as error:
        print(f"docs/make/pictures.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
