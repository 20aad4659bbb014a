"""`--config FILE.toml`: options of ask, serve and the screen, by their names.

The top of the file is for every program, a table such as [serve] for one of them, and
[models."owner/name"] for one model, named as `--model` takes it. Tables of programs may be in there,
too. The more special table wins over the others, and the command line over all of them.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from base.validation import shown

PROGRAMS = ("ask", "serve", "screen")


def expand(
    parser: argparse.ArgumentParser, program: str, arguments: Sequence[str] | None
) -> list[str]:
    """The options of the file that `--config` names, and then the arguments."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--model", nargs="?")
    known, _ = early.parse_known_args(given)
    if not known.config:
        return given
    try:
        options = options_of(read(known.config), program, known.model)
        words = [word for name, value in options.items() for word in words_of(name, value)]
    except (OSError, ValueError) as error:
        parser.error(f"--config {shown(known.config)}: {getattr(error, 'strerror', None) or error}")
    parser.allow_abbrev = False  # in a file, names are written out
    _, unknown = parser.parse_known_args(words)
    parser.allow_abbrev = True
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--")
        parser.error(f"--config {shown(known.config)}: {program} has no option {name!r}")
    return [*words, *given]


def read(file: str) -> dict[str, Any]:
    with open(file, "rb") as opened:
        return tomllib.load(opened)


def options_of(table: dict[str, Any], program: str, model: str | None) -> dict[str, Any]:
    """Of the file's tables, what is for this program and this model."""
    models = table.pop("models", {})
    options = flat(table, program)
    found = models.get(model or options.get("model", "demo"), {})
    return options | flat(found, program)


def flat(table: dict[str, Any], program: str) -> dict[str, Any]:
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    if unknown := [name for name in tables if name not in PROGRAMS]:
        raise ValueError(f"[{unknown[0]}] is no table; use models, {', '.join(PROGRAMS)}")
    options = {name: value for name, value in table.items() if name not in tables}
    return options | tables.get(program, {})


def words_of(name: str, value: Any) -> Iterator[str]:
    """An option as on the command line: a switch, a value, or several."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        yield from [option] * value
    elif isinstance(value, list):
        for each in value:
            yield from words_of(name, each)
    elif isinstance(value, (str, int, float)):
        yield f"{option}={value}"
    else:
        raise ValueError(f"{name}: give a text, a number, true, false or a list of these")
