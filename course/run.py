"""Run a program with the chapters of your folder in place of ours.

    python course/run.py mine tui.py --policy static
    python course/run.py mine -m pytest course/from_zero/test_6_continuous_batching.py -k cancel --pdb

The folder is first on Python's path, and child processes inherit that.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from course import overlay
from course.overlay import ROOT


def main(folder: str, program: str, *rest: str) -> None:
    book = overlay.Book(overlay.check_book(folder))
    if (ROOT / program).parent == ROOT and program != "-m":
        book.check_whole()
        print(f"nanobatch: {book}", file=sys.stderr)
    words = [program] if program == "-m" else [str(ROOT / program)]
    os.execve(sys.executable, [sys.executable, *words, *rest], book.environment())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(f"nanobatch: {error}", file=sys.stderr)
        sys.exit(2)
