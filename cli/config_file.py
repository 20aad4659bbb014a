"""`--config FILE.toml`: options of ask, serve and the screen, by their names.

The top of the file is for every program, a table such as [serve] for one of them, and
[models."owner/name"] for one model, named as `--model` takes it. Tables of programs may be in there,
too. The more special table wins over the others, and the command line over all of them.
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
LONGEST = 1_000_000  # characters of a file
# Read before the file is, or answered with an exit
NOT_IN_A_FILE = ("config", "book", "help", "version")


def expand(
    parser: argparse.ArgumentParser,
    program: str,
    arguments: Sequence[str] | None,
    models: Sequence[str] = (),
) -> list[str]:
    """The options of the file that `--config` names, and then the arguments. `models`: whose tables
    count, the last most; by default that of the model which `--model` or the file names."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", nargs="?", action="append", default=[])
    early.add_argument("--model", nargs="?")
    known, _ = early.parse_known_args(given)
    if len(known.config) > 1:
        parser.error("--config is given twice; give one file")
    if known.config in ([], [None]):  # the parser itself refuses one without a file
        return given
    file = known.config[0]
    try:
        options = options_of(read_toml(file), program, models or (known.model,))
        if unfit := [name for name in options if not re.fullmatch(r"[\w-]+", name)]:
            raise ValueError(f"{program} has no option {shown(unfit[0])}")  # a quoted key
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
    """The options for this program and these names of a model, from the file's tables. None: the
    model that the file names."""
    tables = table.pop("models", {})
    check_table("models", tables)
    for name, value in tables.items():
        check_table(f"models.{name}", value)
    options = flat(table, program)
    for model in models:
        name = model or options.get("model", "demo")
        if isinstance(name, str):  # a server may have a list of them, and reads the tables later
            options |= flat(tables.get(name, {}), program)
    return options


def check_table(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {shown(value)}, but it must be a table")


def flat(table: dict[str, Any], program: str) -> dict[str, Any]:
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    if unknown := [name for name in tables if name not in PROGRAMS]:
        raise ValueError(f"[{unknown[0]}] is no table; use models, {', '.join(PROGRAMS)}")
    own = {name: value for name, value in table.items() if name not in tables}
    return spelled(own) | spelled(tables.get(program, {}))


def spelled(options: dict[str, Any]) -> dict[str, Any]:
    """Spell names with hyphens, as on the command line."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = name.replace("_", "-")
        if option in found:
            raise ValueError(f"{name} is there twice; give it once")
        if option in NOT_IN_A_FILE:
            raise ValueError(f"{name} belongs on the command line; leave it out here")
        found[option] = value
    return found


def words_of(parser: argparse.ArgumentParser, name: str, value: Any) -> Iterator[str]:
    """An option as on the command line: a switch, a value, or several."""
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
        raise ValueError(f"{name}: give a text, a number, true, false or a list of these")
