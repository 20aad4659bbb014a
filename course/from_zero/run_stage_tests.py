"""Run files of checks on a student's chapters, in a separate process.

`run` starts this file as a program, and reads a signed line for each check. The key comes through
standard input and is read before any student code runs. So nothing that the student's code prints,
or writes into the file of results, can count as a result. A check that has begun but has no result
is the one in which the process died.
"""

from __future__ import annotations

import faulthandler
import hmac
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

try:
    import pytest
    import pytest_timeout  # noqa: F401 (a plugin)
except ImportError:
    sys.exit("The stages are tests: pip install pytest pytest-timeout")

from course import overlay
from course.overlay import ROOT

BLANK = re.compile(r"stage (\d+): (\S+) is blank")
MOST_TEXT = 4_000  # characters of a check's output
MOST_FILE = 50_000_000  # bytes that a student's code may write to a file


class Check(NamedTuple):
    """A stage's test and its result."""

    name: str
    # "passed", "failed", "skipped", or "waits" for another stage; "begun" if the process died in it
    outcome: str
    says: str = ""  # the requirement that it checks
    text: str = ""  # what is wrong, and what was printed

    def lines(self) -> list[str]:
        if self.outcome == "skipped":
            return []
        mark = {"passed": "✓", "waits": "·"}.get(self.outcome, "✗")
        text = [f"       {line}".rstrip() for line in self.text.splitlines()]
        return [f"   {mark} {self.says or self.name}", *text]


# --- the parent process -------------------------------------------------------------------------


def run(
    folder: Path, tests: list[Path], *options: str, seconds: int = 0, **settings
) -> list[Check]:
    """Run tests on a student's folder, and return a check for each.

    `options` are pytest's. `seconds` limits the processor time; 0 means no limit. `settings` are
    passed to `main`.
    """
    key = secrets.token_bytes(32)
    with TemporaryDirectory() as scratch, open(f"{scratch}/output", "w+b") as output:
        results = Path(scratch, "results")
        asked = settings | {"seconds": seconds, "options": [*map(str, tests), *options]}
        process = subprocess.Popen(
            [sys.executable, __file__, folder, results, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=overlay.Book(folder).environment(),
            start_new_session=True,
        )
        try:
            process.communicate(key, timeout=4 * seconds or None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGXCPU)  # faulthandler then prints the stack
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including processes that it left running
        code = process.wait()
        found, is_whole = read_results(results, key)
        if is_whole:
            return found
        output.seek(
            max(0, output.tell() - 16 * MOST_TEXT)
        )  # a stack of long paths, innermost first
        said = output.read(16 * MOST_TEXT).decode(errors="replace")
    if not found or found[-1].outcome != "begun":
        found.append(Check("the end", "begun", "The checks run to their end.", said[-MOST_TEXT:]))
    text = f"{why_ended(code, seconds)}\n{where(said, folder) or found[-1].text}"
    return [*found[:-1], found[-1]._replace(outcome="failed", text=text)]


def read_results(file: Path, key: bytes) -> tuple[list[Check], bool]:
    """Return the newest result of each check, and whether the end was written."""
    found = {}
    with suppress(FileNotFoundError):
        for line in file.read_bytes().splitlines():
            sign, _, text = line.partition(b" ")
            if hmac.compare_digest(sign, hmac.digest(key, text, "sha256").hex().encode()):
                check = Check(*json.loads(text))
                found[check.name] = check
    is_whole = found.pop("end", None) is not None
    return [*found.values()], is_whole


def why_ended(code: int, seconds: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"stopped after {seconds} s of processor time, or {4 * seconds} s: an endless loop?"
    if code < 0:
        why = "an index or a row beyond its array? MLX checks no bounds"
        return f"The process crashed (signal {-code}): {why}"
    return f"The process ended before its checks did (exit code {code})"


def where(stderr: str, folder: Path) -> str:
    """Return the student's own lines in a dump of `faulthandler`."""
    lines = re.findall(r'File "(.*)", line (\d+) in (\S+)', stderr)
    own = [line for line in lines if Path(line[0]).parent == folder]
    return "".join(f"{Path(f).name}, line {n}, in {name}\n" for f, n, name in own[:3])


# --- the child process --------------------------------------------------------------------------


class Report:
    """A pytest plugin that writes the outcome of each test."""

    def __init__(self, folder: Path, results: str, key: bytes):
        self.folder = folder
        self.file = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.key = key

    def write(self, name: str, outcome: str, says: str = "", text: str = "") -> None:
        line = json.dumps(Check(name, outcome, says, text[:MOST_TEXT])).encode()
        sign = hmac.digest(self.key, line, "sha256").hex()
        os.write(self.file, sign.encode() + b" " + line + b"\n")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.write(item.nodeid, "begun", says(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        printed = report.capstdout[-MOST_TEXT // 2 :] if report.when == "call" else ""
        outcome = report.outcome
        if report.failed:
            error = call.excinfo.value
            text = self.mistake(error)
            blank = BLANK.match(str(error))
            if blank and isinstance(error, NotImplementedError):
                outcome = "waits"
                text = f"waits for stage {blank[1]}: {blank[2]}"
                report.outcome = "skipped"  # so that -x continues
                report.longrepr = ("", 0, text)
            self.write(item.nodeid, outcome, says(item, is_wrong=True), f"{text}\n{printed}")
        elif report.when == "call" or report.skipped:
            self.write(item.nodeid, outcome, says(item), printed)
        return report

    def mistake(self, error: BaseException) -> str:
        """Describe a failed assertion, or an exception with its place in the student's chapters."""
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


def says(item: pytest.Item, is_wrong: bool = False) -> str:
    said = " ".join((getdoc(item.obj) or item.name).split())
    mark = item.get_closest_marker("about")
    return f"{said} ({', '.join(mark.args)})" if mark and is_wrong else said


def place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"


def limit(seconds: int, gigabytes: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    if sys.platform == "linux":  # macOS refuses this limit
        memory = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def main(
    folder: str,
    results: str,
    options: list[str],
    seconds: int = 0,
    gigabytes: float = 8,
) -> None:
    report = Report(Path(folder), results, sys.stdin.buffer.read())
    if seconds:
        limit(seconds, gigabytes)
        faulthandler.register(signal.SIGXCPU, os.dup(2), chain=True)
    try:
        for module in overlay.CHAPTERS:
            import_module(module)
    except (Exception, SystemExit) as error:
        report.write("import", "failed", "The chapters can be imported.", report.mistake(error))
    else:
        # Load conftest.py as a plugin, because hidden checks are in another folder
        settings = ["-p", "no:cacheprovider", "-p", "course.from_zero.conftest", "--noconftest"]
        settings += [f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml", "--tb=native"]
        if pytest.main([*settings, *options], plugins=[report]) > pytest.ExitCode.TESTS_FAILED:
            os._exit(3)
    report.write("end", "passed")


if __name__ == "__main__":
    main(*sys.argv[1:3], **json.loads(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # even if the student's engine has left threads running
