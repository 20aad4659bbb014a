"""The command `nanobatch`, as a wheel installs it: it becomes the program that is asked for.

The problem. In a checkout a program runs from its own folder, which Python searches first. So
`import sched` finds chapter 3 of the book. In site-packages that module would lose against the
standard library's, and our `kv` and `parts` might hide somebody else's.

The way out. A wheel carries the whole checkout as one folder, `nanobatch_checkout/`. The command
starts a program in that folder by its path, as a user of a checkout does. So both run alike, and no
other program sees our modules. For `import nanobatch` there is the file `nanobatch.py` beside this
one: it says where the engine is.

Where next: `ask.py`, the smallest of the programs.
"""

import os
import shutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "screen": "tui.py",
    "ask": "ask.py",
    "serve": "serve.py",
    "verify": "verify.py",
    "bench": "bench.py",
    "page": "docs/make/page.py",
}
USAGE = """nanobatch [OPTION ...]       the screen, with the options of `nanobatch screen --help`
nanobatch ask [PROMPT ...]   prompts in, answers out; without a prompt, a dialogue
nanobatch serve              an HTTP server for programs that speak OpenAI's or Anthropic's protocols
nanobatch verify             does an answer keep its bits in any company?
nanobatch bench              how fast is it here?
nanobatch learn FOLDER       a copy to read, run and change: ladder, exercises, book
nanobatch page IN.json OUT   a recording as a page that plays in any browser
The programs take --help; `nanobatch --version` says what you have."""
LEARN = """{folder} holds all of nanobatch, to read and to change. Begin with README.md there. The ladder:
    cd {folder}
    {python} course/ladder/1_one_token.py
For exercises and tests, which need pytest, give it an environment of its own:
    python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[cpu,test]'"""


def main() -> int:
    word, *rest = sys.argv[1:] or [""]
    if word in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if word == "learn":
        return learn(rest)
    if not word or word.startswith("-"):  # options of the screen
        word, rest = "screen", sys.argv[1:]
    if word not in PROGRAMS:
        return refuse(f"{word!r} is no command; choose among {', '.join(PROGRAMS)} and learn")
    program = str(CHECKOUT / PROGRAMS[word])
    return os.execv(sys.executable, [sys.executable, program, *rest])  # it never returns


def learn(arguments: list[str]) -> int:
    """Copy the checkout to where one may write."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return refuse("learn takes the name of a new folder: nanobatch learn FOLDER")
    folder = Path(arguments[0]).expanduser().absolute()
    try:
        unwanted = shutil.ignore_patterns("__pycache__", ".*_cache", ".git", ".venv", "build")
        shutil.copytree(CHECKOUT, folder, ignore=unwanted)
        for path in (folder, *folder.rglob("*")):  # site-packages may be closed to writers
            path.chmod(path.stat().st_mode | 0o200)
    except FileExistsError:
        return refuse(f"{folder} exists already; name a new folder")
    except (OSError, shutil.Error) as error:
        return refuse(f"{folder} cannot be written ({error}); name a folder elsewhere")
    print(LEARN.format(folder=folder, python=sys.executable))
    return 0


def refuse(line: str) -> int:
    print(f"nanobatch: {line}", file=sys.stderr)
    return 2
