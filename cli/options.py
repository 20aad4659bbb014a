"""Code that the programs share: options, one-line error messages, and exit codes.

After Ctrl-C a program exits with 130 and no message (the screen and the server with 0, because this is
the usual way to stop them). If SIGINT is ignored, as in a shell's background job, it stays ignored, except
by the screen and the server. If its output pipe is closed, a program exits silently with 141. After any
other failure to write output, such as a full disk, it prints one line and exits with 1.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TextIO

from base.installation import command, version
from base.validation import one_line, printable, read_whole, shown
from distributed.environment import backend, rank

BROWSER = "TEXTUAL_DRIVER" in os.environ  # textual-serve runs the screen through pipes


def say(line: str) -> None:
    """Print a message to standard error."""
    print(f"nanobatch: {printable(str(line))}", file=sys.stderr, flush=True)


class Unwritten(Exception):
    """Standard output cannot be written because the pipe is closed or the disk is full."""


class Stream:
    """A standard stream. Write errors on standard output raise `Unwritten`, so that no handler mistakes
    them for errors of another file. Write errors on standard error are ignored."""

    def __init__(self, file: TextIO, is_output: bool = False):
        self._file = file
        self._is_output = is_output

    def write(self, text: str) -> None:
        self._try(self._file.write, text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, act: Callable[..., Any], *given: str) -> None:
        try:
            act(*given)
        except OSError as error:
            if self._is_output:
                raise Unwritten from error

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program's `main` and exit with its return code, or with 130 after Ctrl-C."""
    # Rust panics in the tokenizer are caught and reported in one line, without a backtrace
    os.environ["RUST_BACKTRACE"] = "0"
    sys.stdout = sys.stdout and Stream(sys.stdout, is_output=True)
    sys.stderr = sys.stderr and Stream(sys.stderr)
    try:
        try:
            code = main()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except Unwritten as error:
        code = unwritten(error)
    sys.exit(code)


def unwritten(error: Unwritten) -> int:
    """Return the exit code after standard output failed. Print the reason unless the pipe was closed."""
    sys.stdout = None  # prevents Python from flushing it at exit
    if isinstance(error.__cause__, BrokenPipeError):
        return 141
    why = one_line(error.__cause__)
    say(f"standard output cannot be written: {why}")
    return 1


def is_folder(model: str) -> bool:
    return bool(model) and os.path.isdir(os.path.expanduser(model))


def is_gguf_file(model: str) -> bool:
    """True for any file, because GGUF is the only supported single-file format."""
    return os.path.isfile(os.path.expanduser(model))


def read_model(model: str) -> str:
    """Check `--model` and return it unchanged. Refuse malformed names here, before a slow request to the hub."""
    is_here = model == "demo" or is_folder(model) or is_gguf_file(model)
    is_name = model.startswith("ollama:") or (model.count("/") == 1 and model[0] not in "./~")
    if not is_here and not is_name:
        raise ValueError(
            f"--model {shown(model)} is not a folder, a GGUF file, or a hub id of the form owner/name"
        )
    return model


def read_named_model(text: str) -> tuple[str, str]:
    """Parse a server's `--model`: MODEL or NAME=MODEL. Return the name and the model."""
    name, sign, model = text.partition("=")
    if not sign or is_folder(text) or is_gguf_file(text):
        return name_of(read_model(text)), text
    if not re.fullmatch(r"[\w.:/-]{1,100}", name):
        raise ValueError(
            f"--model {shown(text)}: a name may have only letters, digits and . : / - _"
        )
    return name, read_model(model)


def read_size(option: str, text: str) -> int:
    """Parse a size such as 500M or 12GB. Return bytes."""
    from engine.slot_files import read_nbytes

    nbytes = read_nbytes(text)
    if nbytes is None:
        raise ValueError(f"{option} {shown(text)}: give a size such as 500M or 2G")
    return nbytes


def name_of(model: str) -> str:
    """Return a model's name for clients and the screen.

    For a folder in the hub's cache it is owner/name, because the folder's own name is a hash.
    """
    if not is_folder(model) and not is_gguf_file(model):
        return model
    path = os.path.abspath(os.path.expanduser(model))
    hub = re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+$", path)
    return f"{hub[1]}/{hub[2]}" if hub else os.path.basename(path)


def on_a_terminal() -> bool:
    return BROWSER or all(
        stream and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )


@contextmanager
def about(option: str, remedy: str) -> Iterator[None]:
    """Add the option and the remedy to an error's message."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option}: {getattr(error, 'strerror', None) or error}; {remedy}"
        ) from None


def read_key(option: str, variable: str, key: str) -> str:
    """Check a key. An empty one, as from an unset variable, is refused: it would give everybody access."""
    if not key or key != key.strip():
        raise ValueError(
            f"{option} or ${variable} is empty or has spaces around it; give a key, or leave both out"
        )
    return key


def read_host(name: str) -> str:
    """Parse `--allow-host`: a host's name, or the origin that an app such as a browser's extension sends."""
    is_app = re.fullmatch(r"(?!https?:)[a-z][a-z0-9+.-]*://[\w.-]+(:\d+)?", name)
    if not is_app and not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", name):
        raise ValueError(
            f"{shown(name)} is not a host; give only its name, without scheme, port or star, or an app's "
            "origin such as app://obsidian.md"
        )
    return name


def read_network(text: str) -> Any:
    """Parse `--trust-proxy`: an address, or a network such as 10.0.0.0/8."""
    import ipaddress

    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(
            f"--trust-proxy {shown(text)} is neither an address nor a network such as 10.0.0.0/8"
        ) from None


def read_speculate(text: str) -> int | None:
    """Parse `--speculate`. None means auto: use as many draft tokens as save time."""
    try:
        return None if text == "auto" else read_whole("--speculate", text, 0, 64)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def read_slot_cache(text: str) -> str:
    """Parse `--slot-cache`. Create and check the folder before the model is loaded."""
    from engine.slot_files import SlotFolder

    if backend():
        raise ValueError("--slot-cache: several ranks share the model's slots; leave it out")
    try:
        SlotFolder(text)
    except ValueError as error:
        raise ValueError(str(error).replace("slot cache", "--slot-cache", 1)) from None
    return text


def read_state_memory(text: str) -> int:
    """Parse `--state-memory`. Return bytes."""
    return read_size("--state-memory", text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_engine` as arguments for `Engine.load`, without the model."""
    names = ("slots", "max_len", "policy", "step_ms", "speculate", "kv", "attention", "activations")
    return {name: getattr(args, name) for name in (*names, "slot_cache", "state_memory")}


class ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_) -> NoReturn:
        print(version())
        parser.exit()


class CommandLine(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage, and exits with 2."""

    def __init__(self, name: str, **options):
        """`name`: the program, such as ask.py."""
        # No abbreviations, because --config is also parsed earlier, where only its full name is recognized
        super().__init__(command(name).removeprefix("python "), allow_abbrev=False, **options)
        self.add_argument(
            "--version", action=ShowVersion, nargs=0, help="say which version this is, and exit"
        )

        def gone(folder: str) -> NoReturn:
            raise ValueError(f"--book was removed: use python course/run.py {shown(folder)} {name}")

        old = os.environ.get("NANOBATCH_BOOK")
        self.add_read("--book", gone, argparse.SUPPRESS, default=old)

    def parse_known_args(self, *arguments):
        try:
            rank()  # raises ValueError if the environment variables for ranks are invalid
        except ValueError as error:
            self.error(str(error))
        return super().parse_known_args(*arguments)

    def error(self, message: str) -> NoReturn:
        # Drop argparse's prefix if our own message begins with the option, too
        message = re.sub(r"^argument [^:]+: (?=--)", "", message)
        self.exit(2, f"nanobatch: {one_line(message)}\n")

    def add_read(self, name: str, read: Callable[[str], Any], says: str, **how: Any) -> None:
        """Add an option that `read` parses. Report its error messages, which argparse would replace."""

        def reads(text: str) -> Any:
            try:
                return read(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        self.add_argument(name, type=reads, help=says, **how)

    def add_whole(self, name: str, least: int, most: float, says: str, **how: Any) -> None:
        self.add_read(name, lambda text: read_whole(name, text, least, most), says, **how)

    def add_max_tokens(self, when: str = "") -> None:
        says = (
            f"{when}longest answer to a request without a limit (default: to the end of the slot)"
        )
        self.add_whole("--max-tokens", 1, 2**24, says)

    def add_model(self, is_checked: bool = True) -> None:
        says = "a model folder, a GGUF file, a hub id such as owner/name, or 'demo'"
        if is_checked:
            self.add_read("--model", read_model, says, default="demo")
        else:
            self.add_argument("--model", help=f"{says}; with --url a name that the server knows")

    def add_models(self) -> None:
        """Add `--model` for a program that serves several models."""
        says = (
            "a model folder, a GGUF file, a hub id such as owner/name, or 'demo'; NAME=MODEL names "
        )
        says += "it (repeatable; default: all that --list finds, each loaded by its first request)"
        self.add_read("--model", read_named_model, says, action="append", default=[])

    def add_engine(
        self,
        policies: Iterable[str],
        slots: str,
        max_len: str,
        has_models: bool = False,
        is_checked: bool = True,
    ) -> None:
        """Add the options of every program that loads a model.

        `slots`, `max_len`: the defaults, in words. `has_models`: the program may have several models.
        `is_checked`: False if the model may be a name that only a server knows.
        """
        if has_models:
            self.add_models()
        else:
            self.add_model(is_checked)
        self.add_whole("--slots", 1, 4096, f"sequences that run at once (default: {slots})")
        says = f"length of a slot, prompt and answer together (default: {max_len})"
        self.add_whole("--max-len", 2, 2**24, says)
        says = "when waiting requests are admitted"
        usual, *_ = policies
        self.add_argument("--policy", default=usual, choices=policies, help=says)
        says = "milliseconds of a step while requests decode, which limits how much of a prompt it reads "
        says += "(default: 200, or four times a step without a prompt if that is longer)"
        self.add_whole("--step-ms", 1, 3_600_000, says, metavar="MS")
        says = (
            "try up to N draft tokens of each answer a step; 0: none (default: auto, where it pays)"
        )
        self.add_read("--speculate", read_speculate, says, metavar="N")
        self.add_attention()
        self.add_activations()
        says = "save conversations in this private folder, and continue them after a restart "
        says += "(default size: 8G)"
        self.add_read("--slot-cache", read_slot_cache, says, metavar="DIR[:SIZE]")
        says = "memory for states that other prompts may start from, such as 500M: for Qwen 3.5 "
        says += "(default: two a slot)"
        self.add_read("--state-memory", read_state_memory, says, metavar="SIZE")
        says = "read options from this file, by name (docs/deploy.md)"
        self.add_argument("--config", metavar="FILE.toml", help=says)

    def add_attention(self) -> None:
        says = "how keys and values are stored (default: auto, float16 with weights of 16 bits or fewer)"
        self.add_argument("--kv", default="auto", choices=("auto", "float32"), help=says)
        says = "plain: the formula in llama.py, in place of the operation that has the same bits"
        self.add_argument("--attention", default="auto", choices=("auto", "plain"), help=says)

    def add_activations(self) -> None:
        says = "bits of an activation next to packed weights: auto is 8 where our own product "
        says += "multiplies, as in llama.cpp; 32 has mlx-lm's tokens (default: auto)"
        choices = {"auto": "auto", "8": 8, "32": 32}

        def read_bits(text: str) -> str | int:
            if text not in choices:
                raise ValueError(f"--activations {shown(text)}: choose auto, 8 or 32")
            return choices[text]

        self.add_read("--activations", read_bits, says, default="auto", metavar="auto|8|32")

    def add_keys(self) -> None:
        """Add the options of every program that runs a server."""
        says = "what clients must give ($NANOBATCH_API_KEY)"
        self._add_key("--api-key", "NANOBATCH_API_KEY", says)
        says = "shows texts to /watch; where any key is set, nothing else does"
        self._add_key("--watch-key", "NANOBATCH_WATCH_KEY", says)
        some = {"action": "append", "default": [], "metavar": "NAME"}
        says = "a proxy's, a page's host, or an app's origin such as app://obsidian.md (repeatable)"
        self.add_read("--allow-host", read_host, says, **some)
        says = "believe X-Forwarded-For from this address or network (repeatable)"
        self.add_read("--trust-proxy", read_network, says, **some | {"metavar": "ADDRESS"})
        says = "another name that clients may give the model (repeatable); '*' is any"
        self.add_argument("--alias", help=says, **some)

    def _add_key(self, option: str, variable: str, says: str) -> None:
        # argparse also parses a default if it is a string
        read = partial(read_key, option, variable)
        self.add_read(option, read, says, default=os.environ.get(variable))
