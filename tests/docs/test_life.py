"""docs/life.md shows the actual path of a request."""

import re
from pathlib import Path

from source import places

from docs.make import life

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "life.md").read_text()
API = ("handle", "registry", "loop")
STATIONS = re.findall(r"^\| +\d* *\| `([\w/]+\.py)`, `([\w.]+)` \|", TEXT, re.MULTILINE)


def test_places_in_the_drawing_exist():
    assert len(STATIONS) >= 15
    for file, name in [*STATIONS, *re.findall(r"\(`([\w/]+\.py)`, `([\w.]+)`\)", TEXT)]:
        assert name in places(ROOT / file), (file, name)
    drawn = set(re.findall(r"[A-Z]\w+\.\w+", TEXT.split("```")[1]))
    known = {
        name
        for path in (
            "server/app",
            "nanobatch",
            "runner",
            "sched",
            "server/tokenize_request",
            "server/submit",
            "server/stream",
            "text/detokenizer",
            *(f"engine/{each}" for each in API),
        )
        for name in places(ROOT / f"{path}.py")
    }
    assert len(drawn) >= 12 and drawn <= known, drawn - known


def test_drawing_and_table_have_the_same_stations():
    numbers = [int(number) for number in re.findall(r"^\| +(\d+) *\|", TEXT, re.MULTILINE)]
    drawn = re.findall(r"(?:^|  )(\d+) (?:HTTP body|[a-z]+)", TEXT.split("```")[1], re.MULTILINE)
    assert len(numbers) > 1 and numbers == sorted(map(int, drawn)) == list(
        range(1, len(numbers) + 1)
    )


def test_a_request_goes_the_way_that_is_drawn(engine):
    """From submit to text, the functions traced by docs/make/life.py run in the order of the table."""
    entered = [name for _, _, name in life.trace(engine, "Count.")]
    stations = [name for _, name in STATIONS]
    inside = stations[
        stations.index("Engine.submit") : stations.index("StreamingDetokenizer.push") + 1
    ]
    inside.remove("Loop.turn")  # life.py calls `step` itself
    assert len(inside) >= 10
    firsts = [entered.index(name) for name in inside]
    assert firsts == sorted(firsts), list(zip(inside, firsts, strict=True))
