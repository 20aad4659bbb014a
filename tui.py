"""Watch an LLM serving engine work: slots, queue, timeline, charts and answers in a terminal.

Each part of `screen/` depends only on those above it:

    workload.py       the prompts of a burst, and the settings of a prompt
    engine_view.py    an immutable snapshot of all that the screen shows of an engine
    engine_client.py  what all engine clients share, and the client that owns an engine
    remote_client.py  the client for a server's `/watch`
    timeline_columns.py   steps as columns of the timeline; busy_period_stats.py: the statistics of a busy period
    undisturbed_times.py    step times without interruptions
    state.py          the state from which the picture is drawn
    draw/             pure functions from the state to lines of text
    page.py           the record that describes a page; pages/ has one file for each page
    keys.py           all keys and pages in one table, including those of experiments; footer and help
    commands.py       prompts, commands and scripts; the plain log of a run without a screen
    app.py            the Textual app

This file is the command line, and passes the experiments to the screen. The picture depends only on
`State` and on the size, so every picture can be tested without a terminal, and the engine never waits
for the screen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from base import error_reports, foreign_modules, installation, machine
from base.atomic_write import check_writable, write_whole
from base.installation import command
from base.untrusted_files import read_some
from base.validation import read_whole, shown
from cli import config_file
from cli import options as cli
from cli.http_client import base_of
from cli.options import BROWSER, about, on_a_terminal
from cli.terminal_chat import History, history_file, state_folder
from distributed import environment
from engine.snapshot import RequestView
from experiments import (
    fault_injection,
    long_prompt,
    race,
    request_latency,
    same_answer,
    step_cost,
    tour,
)
from policies import POLICIES
from screen import export_recording as record
from screen.app import Offer, Screen
from screen.commands import Session, orders_of, run_plain, script_help
from screen.engine_client import LocalEngineClient
from screen.keys import Menu
from screen.pages.busy_periods import farewell
from screen.remote_client import RemoteEngineClient, address_of
from screen.state import State
from screen.workload import BURST, CHUNK, Ask, Settings

if TYPE_CHECKING:
    from nanobatch import Engine

# In the order in which footer and help list them
MENU = Menu(
    (
        *race.PAGES,
        request_latency.PAGE,
        step_cost.PAGE,
        same_answer.PAGE,
        fault_injection.PAGE,
        long_prompt.PAGE,
        tour.PAGE,
    )
)
TALK = 2048  # tokens per slot (without --serve) and per answer, except for the demo
PROMPTS = 10_000_000  # maximum number of characters in a --prompts file
WRITTEN = ("screenshot", "record")  # options that write a file at the end


# --- the command line ---------------------------------------------------------------------------


def options() -> cli.CommandLine:
    parser = cli.CommandLine("tui.py", description="Watch an LLM serving engine work.")
    add = parser.add_argument
    says = "2048; demo: 400; with --serve: 8192; less if the model or the memory allows less"
    parser.add_engine(POLICIES, "8, or what fits", says)
    add("--prompts", metavar="FILE", help="prompts to fire at start, and with b: one per line")
    parser.add_whole("--seed", 0, 2**31 - 1, "the same seed gives the same tokens")
    add(
        "--plain",
        action="store_true",
        help="no screen: prompts are read, and events written, as lines (as if there is no terminal)",
    )
    add("--tour", action="store_true", help="start with the tour: it asks before it shows")
    add("--script", default="", help=script_help(MENU))
    add(
        "--screenshot",
        metavar="FILE.svg",
        help="without a terminal, run the script, write the picture, and exit",
    )
    add("--size", default="120x40", help="size of the screenshot in characters (default: 120x40)")
    add(
        "--record",
        metavar="FILE.json",
        help=f"at the end, write what ran last; {command('docs/make/page.py')} makes a page of it: {record.HOLDS}",
    )
    says = "serve programs that speak OpenAI's protocol (default: 4 slots)"
    parser.add_read("--serve", address_of, says, metavar="[HOST:]PORT")
    parser.add_max_tokens("with --serve: ")
    parser.add_keys()
    says = "watch a server, such as http://127.0.0.1:8000, instead of an engine of its own"
    parser.add_read("--watch", partial(base_of, "--watch"), says, metavar="URL")
    add(
        "--key",
        default="",
        help="with --watch: the server's watch key, or its API key (--api-key fires prompts)",
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options. A wrong value ends the program with one line and exit code 2."""
    parser = options()
    args = parser.parse_args(config_file.expand(parser, "screen", arguments))
    args.max_queue = 256
    try:
        if args.serve and args.watch:
            raise ValueError("--serve runs a server and --watch watches another one; choose one")
        if args.max_tokens and not args.serve:
            raise ValueError(
                "--max-tokens limits answers over HTTP, so it needs --serve; "
                f"/set max={args.max_tokens} limits those of prompts typed here"
            )
        check_tour(args)
        args.size = tuple(read_whole("--size", side, 1, 1000) for side in args.size.split("x", 1))
        if len(args.size) != 2:
            raise ValueError("--size needs two numbers, such as 120x40")
        if args.screenshot and not args.screenshot.endswith(".svg"):
            raise ValueError(
                f"--screenshot {shown(args.screenshot)} will be an SVG; give a name that ends in .svg"
            )
        args.plain = not args.screenshot and (args.plain or not on_a_terminal())
        with about("--script", f"{command('tui.py')} --help says more"):
            orders_of(args.script, MENU, args.plain)
        args.asks = read_prompts(args.prompts)
        for option in WRITTEN:
            remedy = "name a file in a folder that exists and is writable"
            if file := getattr(args, option):
                with about(f"--{option} {shown(file)}", remedy):
                    check_writable(file)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def check_tour(args: argparse.Namespace) -> None:
    """Refuse options that the tour cannot honour, because it sends its own prompts."""
    others = ("script", "prompts", "screenshot", "serve", "watch")
    given = [name for name in others if getattr(args, name)]
    if args.tour and given:
        raise ValueError(f"--tour fires prompts of its own; leave --{given[0]} out")


def tour_offer() -> Offer | None:
    """Return the offer of the tour, or None if the user's answer could not be saved."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return Offer(tour.OFFER, tour.DECLINED, folder / "tour")


def read_prompts(file: str | None) -> list[str]:
    """Return the prompts in the `--prompts` file, one per line; none without a file."""
    if not file:
        return []
    with about(f"--prompts {shown(file)}", "name a text file with a prompt on each line"):
        lines = read_some(file, PROMPTS).splitlines()
        prompts = [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError("it has no prompts")
        return prompts


def load_engine(
    args: argparse.Namespace, report: Callable[[str], None], clock: Callable[[], float]
) -> Engine:
    """Load the engine. MLX is first imported here."""
    report("starting MLX")
    from kernels import library

    library.say = report  # show its messages among the stages of loading
    from kernels import device
    from nanobatch import Engine

    options = cli.engine_options(args) | {"usual_len": TALK}
    # The demo's texts are short. With these sizes they fill a slot, and some prompts need two chunks
    if args.model == "demo":
        options |= {"max_len": args.max_len or 400, "chunk": CHUNK}
    engine = Engine.load(args.model, report=report, clock=clock, **options)
    report(f"warming up; matrix product {foreign_modules.labelled(device.named())}")
    with error_reports.shown("the first step failed"):
        engine.runner.warm_up()
    return engine


def open_client(args: argparse.Namespace) -> LocalEngineClient | RemoteEngineClient:
    """Return a client with its own engine, or one that watches a server. The port of `--serve` is bound here,
    before anything is loaded."""
    if args.watch:
        return RemoteEngineClient(
            args.watch, args.key or args.watch_key or args.api_key, args.api_key or args.key
        )
    if not args.serve:
        return LocalEngineClient(partial(load_engine, args))
    import serve

    host, port = args.serve
    server = serve.bind(args, host, port, f"--serve {host}:{port}")
    return LocalEngineClient(partial(serve.load, args), server.start(), cli.name_of(args.model))


def failed(state: State) -> int:
    """Return the screen's exit code. If the model could not be loaded, print why and return 2."""
    if state.view.stage != "failed":
        return 0
    cli.say(state.view.error or state.printed)
    return 2


def recording_of(args: argparse.Namespace, session: Session) -> tuple[str, str]:
    """Return the last run as a recording, and a description of it."""
    session.refresh()
    engine = session.client.engine if isinstance(session.client, LocalEngineClient) else None
    about = {
        "command": command_of(args),
        "version": installation.version(),
        "processor": machine.processor(),
        "model": cli.name_of(session.state.model).partition(" @ ")[0],
        "engine": engine.summary if engine else "",
    }

    def ids(request: RequestView) -> Sequence[int]:
        is_ours = engine and isinstance(request.origin, Ask)
        found = engine.text.ask(request.prompt) if is_ours else ()
        # In a conversation, the prompt contains more than the question
        return found if len(found) == request.metrics.prompt_tokens else ()

    recording = record.record(session.state, about, ids)
    return record.as_text(recording), record.contents(recording)


def write_files(args: argparse.Namespace, session: Session, picture: str) -> bool:
    """Write the files that options ask for. If one cannot be written, print why and return False."""
    makers = {
        "screenshot": lambda: (picture, ""),
        "record": lambda: recording_of(args, session),
    }
    is_done = True
    for option in WRITTEN:
        file = getattr(args, option)
        # There is no picture if the model could not be loaded
        if not file or (option == "screenshot" and not picture):
            continue
        try:
            text, holds = makers[option]()
            write_whole(file, text)
            said = holds and f"{shown(file, 200)} holds {holds}"
        # For example, nothing has run, the folder was removed, or the disk is full
        except (ValueError, OSError) as error:
            is_done = False
            said = f"--{option} {shown(file, 200)}: {getattr(error, 'strerror', None) or error}"
        if said:
            cli.say(said)
    return is_done


def command_of(args: argparse.Namespace) -> str:
    """Return the command that repeats the run, without folders and API keys."""
    words: list[str] = []
    if args.model != "demo":
        words += ["--model", cli.name_of(args.model)]
    for option in ("slots", "max_len", "seed"):
        value = getattr(args, option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    if args.policy != next(iter(POLICIES)):
        words += ["--policy", args.policy]
    if args.script:
        words += ["--script", args.script]
    if args.watch:
        words += ["--watch", "URL"]
    return command("tui.py", *words, "--record", "run.json")


def run_screen(args: argparse.Namespace, session: Session) -> tuple[int, str]:
    """Run the screen. Return the exit code, and the picture if one was asked for."""
    offer = tour_offer() if session.eases else None
    earlier = History(history_file())
    app = Screen(session, args.script, bool(args.screenshot), args.tour, offer, earlier)
    app.run(headless=bool(args.screenshot), size=args.size if args.screenshot else None)
    code = app.return_code or 0
    # In a browser the app normally stops without a code
    if app.return_code is None and not BROWSER:
        cli.say("the screen stopped because of a bug in it")
        code = 1
    # A planted fault was shown, and is not a fault of ours
    planted = f"{fault_injection.Planted.__name__}: "
    faults = [block for block in session.state.tracebacks if planted not in block.splitlines()[-1]]
    for block in faults[-5:]:
        cli.say(block)
    if session.state.periods and not (args.screenshot or BROWSER):
        print("\n".join(farewell(session.state, shutil.get_terminal_size().columns)))
    return code or failed(session.state), app.picture


def print_if_possible(line: str) -> None:
    """Print a line. A server continues even if its log cannot be written."""
    with suppress(cli.Unwritten):
        print(line, flush=True)


def run_log(args: argparse.Namespace, session: Session) -> int:
    """Run without a screen, and print a log."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    write = print_if_possible if args.serve else partial(print, flush=True)
    try:
        if args.tour:
            return tour.run_plain_tour(session)
        stays = bool(args.serve or args.watch)
        return run_plain(session, args.script, write, stays)
    except cli.Unwritten as error:
        return cli.unwritten(error)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if environment.rank() and not args.watch:  # only rank 0 shows the screen
        import serve

        return serve.follow(args)
    if args.record:
        cli.say(f"{shown(args.record)} will hold {record.HOLDS}")
    most = Settings().max_tokens if args.model == "demo" else TALK
    settings = Settings(max_tokens=most, seed=args.seed)
    prompts = [(prompt, settings.max_tokens) for prompt in args.asks] or BURST
    try:
        client = open_client(args)
        client.start()
    except ValueError as error:
        cli.say(error)
        return 2
    session = Session(client, State(args.model, settings=settings, prompts=prompts), MENU)
    if args.asks:
        client.fire(session.asks(len(prompts)))
    # The first burst of the demo runs slowly, except in a script or a log
    scripted = args.script or args.asks or args.screenshot or args.serve or args.watch
    session.eases = args.model == "demo" and not args.plain and not scripted
    code = 1
    picture = ""
    try:
        if args.plain:
            code = run_log(args, session)
        else:
            code, picture = run_screen(args, session)
    except KeyboardInterrupt:
        code = 130
    finally:
        # A signal is the normal way to stop a server
        code = 0 if args.serve and code in (130, 143) else code
        client.drain()
        if not write_files(args, session, picture):
            code = code or 1
        # A download or a very long step cannot be interrupted, so exit without waiting for it
        if not client.stop(patience=0.6):
            if sys.stdout:
                sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    cli.run(main)
