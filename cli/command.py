"""The `nanobatch` command of an installed package, which runs the program that its first argument names."""

import sys
from functools import partial
from importlib import import_module

from base import installation
from cli import options as cli

PACKAGE = __name__.removesuffix("cli.command")  # empty in an editable install
PROGRAMS = {  # word -> the module to run and the options to put before the user's
    "screen": ["tui"],
    "ask": ["ask"],
    "chat": ["ask", "--chat"],
    "serve": ["serve"],
    "verify": ["verify"],
    "bench": ["bench"],
    "models": ["ask", "--list"],
    "page": ["docs.make.page"],
}
USAGE = """nanobatch [OPTION ...]       the screen, with the options of `nanobatch screen --help`
nanobatch ask [PROMPT ...]   prompts in, answers out
nanobatch chat               a conversation
nanobatch serve              an HTTP server with OpenAI's and Anthropic's protocols
nanobatch verify             are answers batch-invariant on this machine?
nanobatch bench              how fast is it here?
nanobatch models [DIR]       the models on this machine or in a folder, and which can be served
nanobatch page IN.json OUT   a recording as a web page
nanobatch learn              where to find the course and the tests
Each takes --help; `nanobatch --version` prints the version."""
LEARN = """The course (ladder, stages, exercises) and tests are in the source: a clone, or nanobatch-{version}.tar.gz.
    python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[cpu,test]'
    python course/ladder/1_one_token.py"""
LEARN_HERE = """The course (course/README.md) begins with seven short programs. For the tests see CONTRIBUTING.md.
    cd {root}
    python course/ladder/1_one_token.py"""


def main() -> None:
    installation.is_command = True
    word, *rest = sys.argv[1:] or ["screen"]
    if word.startswith("-") and word not in ("-h", "--help", "--version"):
        word, rest = "screen", sys.argv[1:]
    cli.run(partial(start, word, rest) if word in PROGRAMS else partial(answer, word))


def start(word: str, arguments: list[str]) -> int:
    module, *options = PROGRAMS[word]
    sys.argv[1:] = [*options, *arguments]
    return import_module(PACKAGE + module).main()


def answer(word: str) -> int:
    """Handle a word that does not name a program, such as --help. Return the exit code."""
    if word in ("-h", "--help", "help"):
        print(USAGE)
    elif word == "--version":
        print(installation.version())
    elif word == "learn":
        where = LEARN if installation.IS_INSTALLED else LEARN_HERE
        print(where.format(version=installation.version_number(), root=installation.ROOT))
    else:
        cli.say(f"{word!r} is not a command; choose among {', '.join(PROGRAMS)} and learn")
        return 2
    return 0
