"""Try an installed nanobatch, as a user does who cannot write to it.

    python .ci/installed.py ~/.local/bin/nanobatch
    python .ci/installed.py env/bin/nanobatch env/bin/python     a Python snippet, too

It runs ask, verify, the screen as a log, page, serve with one request, and the snippet in an empty
folder. Root runs them as the user `nobody`, to whom site-packages is read-only. A line says what is
wrong, and there is none if all is well.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANSWER = "3, 4, 5, 6."
SNIPPET = """
import sched
from nanobatch import Engine, SamplingParams
with Engine.load("demo", slots=1) as engine:
    prompt = engine.text.ask("Count from 3 to 6.")
    print(engine.submit(prompt, SamplingParams(max_tokens=40)).result().text, sched.scheduler)
"""
COMMANDS = {  # what each must print
    "--version": r"^nanobatch \d",
    "ask Count": r"\[stop: ",
    "models": "demo ",
    # Without the C libraries nothing is promised
    "verify --ways company,threads": "Not one bit differs|Nothing is promised here",
    "--plain --script race24 --record run.json": "holds 2 runs",
    "page run.json out.html": r"^out.html: \d",
}
START_S = 120


def user(folder: Path) -> dict[str, Any]:
    """How to start a process in the folder, as somebody who may write nowhere else."""
    found = {"cwd": folder, "env": os.environ | {"HOME": str(folder)}}
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        found |= {"user": "nobody", "extra_groups": []}
    return found


def said(words: list[str], options: dict[str, Any]) -> str:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, timeout=600, check=False, **pipes, **options)
    return done.stdout if not done.returncode else f"exit code {done.returncode}: {done.stdout}"


def served(command: str, options: dict[str, Any]) -> str:
    """The answer of a server to one request."""
    log = options["cwd"] / "serve.log"
    with log.open("w") as file:
        words = [command, "serve", "--port", "0"]
        server = subprocess.Popen(words, stdout=file, stderr=file, **options)
    try:
        end = time.monotonic() + START_S
        while not (found := re.search(r" at (http://\S+)/v1;", log.read_text())):
            if server.poll() is not None or time.monotonic() > end:
                return log.read_text()
            time.sleep(0.1)
        body = json.dumps({"messages": [{"role": "user", "content": "Count from 3 to 6."}]})
        headers = {"Content-Type": "application/json"}
        address = f"{found[1]}/v1/chat/completions"
        request = urllib.request.Request(address, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.wait(60)


def wrong(command: str, python: str | None) -> Iterator[str]:
    """What does not work, one line each."""
    with tempfile.TemporaryDirectory() as name:
        options = user(Path(name))
        for words, wanted in COMMANDS.items():
            found = said([command, *words.split()], options)
            if not re.search(wanted, found, re.MULTILINE):
                yield f"nanobatch {words} printed {found!r}"
        page = Path(name) / "out.html"
        if page.exists() and "from sched import" not in page.read_text():
            yield "the page's scheduler has no imports by short names"
        if ANSWER not in (found := served(command, options)):
            yield f"nanobatch serve answered {found!r}"
        if python:
            found = said([python, "-c", SNIPPET], options)
            if ANSWER not in found or "sched.scheduler" not in found:
                yield f"the snippet printed {found!r}"


def main() -> int:
    command, python, *_ = [*sys.argv[1:], None]
    found = list(wrong(command, python))
    for line in found:
        print(f"nanobatch: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
