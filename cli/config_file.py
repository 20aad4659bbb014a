"""`--config FILE.toml`: options for ask, serve and the screen, by name.

Top-level options apply to every program, a table such as [serve] to one program, and
[models."owner/name"] to one model, named as in `--model`. A model's table may contain program tables,
too. More specific tables override general ones, and the command line overrides the file.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from base.untrusted_files import read_some
from base.validation import shown

PROGRAMS = ("ask", "serve", "screen")
LONGEST = 1_000_000  # maximum length of a file in characters
# Options that are parsed before the file is read, or that exit immediately
NOT_IN_A_FILE = ("config", "book", "help", "version")


def expand(
    parser: argparse.ArgumentParser,
    program: str,
    arguments: Sequence[str] | None,
    models: Sequence[str] = (),
) -> list[str]:
    """Return the options of the `--config` file followed by the arguments.

    `models`: the models whose tables apply; later ones override earlier ones. By default, the model
    named by `--model` or by the file, else the demo.
    """
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", nargs="?", action="append", default=[])
    early.add_argument("--model", nargs="?")
    known, _ = early.parse_known_args(given)
    if len(known.config) > 1:
        parser.error("--config is given twice; give one file")
    if known.config in ([], [None]):  # the parser itself refuses --config without a file
        return given
    file = known.config[0]
    try:
        options = options_of(read_toml(file), program, models or (known.model,))
        # A quoted key may be any text
        if unfit := [name for name in options if not re.fullmatch(r"[\w-]+", name)]:
            raise ValueError(f"{program} has no option {shown(unfit[0])}")
        words = [word for name, value in options.items() for word in words_of(parser, name, value)]
    except (OSError, ValueError) as error:
        parser.error(f"--config {shown(file)}: {getattr(error, 'strerror', None) or error}")
    _, unknown = parser.parse_known_args(words)
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--")
        parser.error(f"--config {shown(file)}: {program} has no option {name!r}")
    return [*words, *given]


def read_toml(file: str) -> dict[str, Any]:
    text = read_some(file, LONGEST)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def options_of(table: dict[str, Any], program: str, models: Sequence[str | None]) -> dict[str, Any]:
    """Return the file's options for this program and these models. None stands for the model that the
    file names."""
    tables = table.pop("models", {})
    check_table("models", tables)
    for name, value in tables.items():
        check_table(f"models.{name}", value)
    options = flat(table, program)
    for model in models:
        name = model or options.get("model", "demo")
        if isinstance(name, str):  # a server with a list of models applies their tables later
            options |= flat(tables.get(name, {}), program)
    return options


def check_table(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {shown(value)}, but it must be a table")


def flat(table: dict[str, Any], program: str) -> dict[str, Any]:
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    if unknown := [name for name in tables if name not in PROGRAMS]:
        raise ValueError(f"[{unknown[0]}] is not a table; use models, {', '.join(PROGRAMS)}")
    own = {name: value for name, value in table.items() if name not in tables}
    return spelled(own) | spelled(tables.get(program, {}))


def spelled(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with hyphens in their names, as on the command line."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = name.replace("_", "-")
        if option in found:
            raise ValueError(f"{name} is given twice; give it once")
        if option in NOT_IN_A_FILE:
            raise ValueError(f"{name} belongs on the command line; leave it out here")
        found[option] = value
    return found


def words_of(parser: argparse.ArgumentParser, name: str, value: Any) -> Iterator[str]:
    """Yield an option's command-line arguments: a switch, a value, or several values."""
    option = f"--{name}"
    default = parser.get_default(name.replace("-", "_"))
    if isinstance(value, bool):
        if not isinstance(default, bool):
            raise ValueError(f"{name} = {value}, but it is not a switch")
        yield from [option] * value
    elif isinstance(value, list):
        if not isinstance(default, list):
            raise ValueError(f"{name} = {shown(value)}, but it takes one value")
        for each in value:
            yield from words_of(parser, name, each)
    elif isinstance(value, (str, int, float)):
        yield f"{option}={value}"
    else:
        raise ValueError(f"{name}: give a string, a number, true, false or a list of these")
