"""A stage's tests, run on a reader's chapters: a line for each. `check.py` starts this program, in a
process of its own."""

import io
import os
import re
import sys
import traceback
from contextlib import redirect_stdout
from importlib import import_module
from inspect import getdoc
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import overlay


class Report:
    """A line for each test: what it asks for. What it prints, and what is wrong, stands below."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lines: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        says = " ".join(getdoc(item.obj).split())
        if report.failed:
            mark = item.get_closest_marker("about")
            self.lines.append(f"   ✗ {says} ({', '.join(mark.args)})" if mark else f"   ✗ {says}")
            self.add(self.mistake(call.excinfo.value))
        elif report.passed and report.when == "call":
            self.lines.append(f"   ✓ {says}")
        if report.when == "call":
            self.add(report.capstdout)
        return report

    def add(self, text: str) -> None:
        self.lines += [f"       {line}".rstrip() for line in text.splitlines()]

    def mistake(self, error: BaseException) -> str:
        """What a test says is wrong; or an exception, and where in the reader's chapters it was."""
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if Path(frame.filename).parent == self.folder]
        tests = [frame for frame in frames if frame.name.startswith("test_")]
        if str(error).startswith("Timeout"):
            says = f"no end after {os.environ['PYTEST_TIMEOUT']} s: an endless loop?"
        elif isinstance(error, AssertionError | pytest.fail.Exception) and frames[-1] not in theirs:
            theirs = tests[-1:]
            says = re.sub(r"^(assert )?\n?(  )?", "", str(error), flags=re.MULTILINE)
        else:
            says = "".join(traceback.format_exception_only(error))
        places = map(place, theirs[-3:] or tests[-1:] or frames[-2:])
        return "".join([*places, says])


def place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"


def main(folder: str, stage: str) -> int:
    report = Report(Path(folder))
    overlay.open_book(folder)
    try:
        for module in overlay.CHAPTERS:
            import_module(module)
    except (Exception, SystemExit) as error:
        print("   ✗ The chapters can be imported.")
        report.add(report.mistake(error))
        print("\n".join(report.lines))
        return pytest.ExitCode.TESTS_FAILED
    (tests,) = Path(__file__).parent.glob(f"test_{stage}_*.py")
    output = io.StringIO()
    with redirect_stdout(output):
        code = pytest.main(["-x", "-p", "no:cacheprovider", str(tests)], plugins=[report])
    print("\n".join(report.lines) or output.getvalue())
    return code


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # whatever the reader's engine has left running
