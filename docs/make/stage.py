"""A stage of the blank book being done, as an animated picture: python docs/make/stage.py course/from_zero/stage.svg

What is seen is run: the commands of course/from_zero, in a folder of its own, on functions of
`tests/lib/firstbook.py`. There is no script in the picture. Where animations do not play, the last
scene shows.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "course" / "from_zero"))

from course.overlay import functions  # noqa: E402
from parts.files import write_whole  # noqa: E402
from screen.ink import DARK  # noqa: E402

FIRST = ROOT / "tests" / "lib" / "firstbook.py"
WIDE = 860  # pixels
ROW = 17  # pixels of a line
ROWS = 22  # lines
SCALE = " / Dh**0.5"  # forgotten at first


class Scene(NamedTuple):
    seconds: float
    lines: list[str]


def shown(command: str, folder: Path, seconds: float) -> Scene:
    """A command as it is typed, and what it prints."""
    program, *words = command.split(" ", 3)[1:]
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *" ".join(words).split()],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return Scene(seconds, [f"$ {command}", *(done.stdout + done.stderr).splitlines()])


def write(folder: Path, name: str, forgets: str = "") -> list[str]:
    """Give a blank function its body. Returns the function as it stands in the file then."""
    file = folder / "llama.py"
    first = FIRST.read_text()
    theirs = functions(first)[name]
    body = first.splitlines()[theirs.body[0].lineno - 1 : theirs.end_lineno]
    body = [line.replace(forgets, "") if forgets else line for line in body]
    lines = file.read_text().splitlines()
    node = functions(file.read_text())[name]
    lines[node.body[1].lineno - 1 : node.end_lineno] = body
    file.write_text("\n".join(lines) + "\n")
    arguments = ", ".join(arg.arg for arg in node.args.args)
    return ["# mine/llama.py", "", f"def {name}({arguments}):", *body]


def scenes() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mine = folder / "mine"
        check = "python course/from_zero/check.py mine 1"
        yield shown("python course/from_zero/start.py mine", folder, 2)
        yield shown(check, folder, 3)
        yield Scene(5, write(mine, "attention", forgets=SCALE))
        yield shown(check, folder, 6)
        file = mine / "llama.py"
        scores = "scores = q @ k.transpose(0, 1, 3, 2)"
        file.write_text(file.read_text().replace(scores, scores + SCALE))
        yield shown(check, folder, 4)
        yield Scene(4, [*write(mine, "heads"), "", *write(mine, "forward")[2:]])
        yield shown(check, folder, 6)


def draw(parts: Sequence[Scene]) -> str:
    whole = sum(scene.seconds for scene in parts)
    tall = ROWS * ROW + 16
    styles = []
    groups = []
    at = 0.0
    for number, scene in enumerate(parts):
        begins = 100 * at / whole
        at += scene.seconds
        ends = 100 * at / whole
        hidden = f"0%{{opacity:0}}{begins:.2f}%{{opacity:1}}" if number else "0%{opacity:1}"
        styles.append(
            f"@keyframes s{number}{{{hidden}{ends:.2f}%{{opacity:0}}100%{{opacity:0}}}}"
            f".s{number}{{opacity:{int(scene is parts[-1])};animation:s{number} {whole}s step-end infinite}}"
        )
        groups.append(f'<g class="s{number}">')
        for row, line in enumerate(scene.lines[:ROWS]):
            y = 8 + ROW * (row + 1)
            groups.append(
                f'<text x="12" y="{y - 4}" class="{hue(line)}">{escape(line[:106])}</text>'
            )
        groups.append("</g>")
    colours = f"text{{fill:{DARK.text};white-space:pre;font:13px ui-monospace,monospace}}"
    colours += f".typed{{fill:{DARK.accent}}}.good{{fill:#7fd08a}}.bad{{fill:{DARK.bad}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {tall}">',
            f"<style>{colours}{''.join(styles)}</style>",
            f'<rect width="{WIDE}" height="{tall}" rx="8" fill="{DARK.back}"/>',
            *groups,
            "</svg>\n",
        ]
    )


def hue(line: str) -> str:
    marks = {"$": "typed", "✓": "good", "✗": "bad"}
    return marks.get(line.strip()[:1], "plain")


def main() -> None:
    write_whole(sys.argv[1], draw(list(scenes())))


if __name__ == "__main__":
    main()
