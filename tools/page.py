"""A recording as a page that needs nothing else: python tools/page.py run.json out.html

    python tui.py --plain --script race24 --record run.json
    python tools/page.py run.json out.html

Two recordings, of one run each, race side by side: python tools/page.py static.json continuous.json out.html
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from door import page
from screen import record

MOST = 400_000  # bytes of a page: it is sent over slow lines, too


def joined(recordings: list[dict]) -> dict:
    """One recording of all runs."""
    runs = [run for recording in recordings for run in recording["runs"]]
    return recordings[0] | {"runs": runs}


def read(path: str) -> dict:
    recording = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(recording, dict) or recording.get("format") != record.FORMAT:
        raise ValueError(f"{path} is no recording of this version; tui.py --record writes one")
    return recording


def make(recordings: list[dict]) -> str:
    story = ""
    return page.page({"recording": joined(recordings)}, story=story)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recordings", nargs="+", metavar="run.json")
    parser.add_argument("out", metavar="out.html")
    args = parser.parse_args(arguments)
    try:
        text = make([read(path) for path in args.recordings])
    except (OSError, ValueError) as error:
        print(f"tools/page.py: {error}", file=sys.stderr)
        return 2
    size = len(text.encode())
    if size > MOST:
        print(
            f"tools/page.py: the page has {size:,} bytes, and may have {MOST:,}; record a shorter run",
            file=sys.stderr,
        )
        return 2
    Path(args.out).write_text(text, encoding="utf-8")
    print(f"{args.out}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
