"""The benchmark: how fast is nanobatch, and what does it spend its time on?

An engine has several speeds. A user feels the time to the first token (TTFT) and the gaps between
tokens; the owner of the machine counts the tokens of all users. Both depend on how many requests
there are, and when they arrive. (Here, a row is one sequence of the batch.)

    decode    B rows decode, and nothing else happens: how fast is a step?
    closed    c users, each of whom sends a prompt when the previous answer has finished
    open      prompts arrive at random times, however many are waiting: at which load does the queue grow without bound?
    steps     a breakdown of one decode step, and the least time that this machine could need for it (roofline)
    long      a prompt of 2,000 tokens arrives while seven rows decode: how much does each delay the other?
    chat      the fifth turn of a conversation: does it cost only its new tokens?
    speculate dictated answers that repeat earlier text much or little: what does prompt lookup gain, or cost?
    quality   perplexity with float arithmetic, with 8-bit activations, and of llama.cpp (measured by itself)
    same      how many of a peer's tokens equal ours: timings of a different computation cannot be compared

`--vs` also measures other engines, in all parts that they support. Each gets a column, which shows its
figures and their ratio to ours:

    --vs mlx-lm            on the system's OpenBLAS, the best that its users can put under MLX (`benchmarks/peers.py`)
    --vs llama.cpp         with its own matrix products, and one thread per core
    --vs ../before         another checkout of nanobatch: is the new version faster?
    --vs mine              a folder with chapters of the core, such as a student's
    --vs widened           this checkout with packed weights converted to float32 (`--shape 1b --bits 4`)
    --vs float             this checkout with 32-bit activations
    --vs .@rows:avx2       a checkout, here this one, with NANOBATCH_BLAS=rows:avx2
    --vs mlx-lm@off        mlx-lm on the BLAS of MLX's wheel for Linux, which is slow
    --vs mlx-lm,llama.cpp  several

How the comparison is fair. All engines have the same weights in the same precision; llama.cpp gets
packed weights in its own format. All get the same prompts at the same times, answer greedily, and never
stop early. One loop (`drive` in `benchmarks/driver.py`) sends requests to all engines. Each sample runs in
a separate process, and warms up on a burst of the same shapes. Columns take turns (A B, B A, A B), so
a machine that slows down slows all of them. A table shows the median of the samples, and in brackets
the lowest and the highest. One thing differs: nanobatch turns its tokens into text, a peer leaves that
to its caller. Nothing is drafted unless `--speculate` is given, because the peers draft nothing.

A token counts once the loop has it as a Python number. In an open loop, TTFT is measured from when the
prompt was due, not from when a busy loop sent it. Otherwise a slow engine would look faster than it is.

    python bench.py                                          about a minute, on the demo model
    python bench.py --shape 15m --vs mlx-lm --parts decode,closed,open --json run.json
    python bench.py --from run.json                          print the tables of a file; measure nothing
    python docs/make/plot.py run.json run.svg                `decode` and `open` as curves
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from base import installation
from base.atomic_write import check_writable, write_whole
from base.validation import one_line, read_whole, shown
from benchmarks.driver import CLOCKS, Failure, describe_machine, take_all, take_sample
from benchmarks.peers import PEERS, make_gguf, obstacle
from benchmarks.plan import (
    OF_ANY_CLOCK,
    PARTS,
    ROWS,
    SHAPES,
    Spec,
    make_model,
    make_plan,
    our_column,
    read_rivals,
)
from benchmarks.report import load_data, show
from cli import options
from distributed import environment
from models.config import read_config
from models.model_finder import find
from policies import DEFAULT, POLICIES


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = options.CommandLine(
        "bench.py", description="Measure nanobatch, and compare it with others."
    )
    add = parser.add_argument
    usual = "decode,closed,steps"
    add("--model", help="a model folder, a GGUF file, a hub id, or 'demo' (the default)")
    add("--shape", choices=SHAPES, help="random weights of this shape instead")
    says = (
        f"measure these, too: {', '.join(PEERS)}, float, widened, the folder of another checkout; "
        "mlx-lm@off: on that NANOBATCH_BLAS"
    )
    add("--bits", type=int, choices=(4, 8, 16, 32), default=32, help="of a weight of --shape")
    add("--vs", default="", metavar="NAME,...", help=says)
    add("--parts", default=usual, help=f"among {','.join(PARTS)} (default: {usual})")
    add(
        "--policy",
        default=DEFAULT,
        choices=POLICIES,
        help="for all parts but open, which compares them",
    )
    add("--speculate", default="0", metavar="N", help="as in `ask` (default: 0, as in peers)")
    add("--rows", default="1,4,8,16", help="rows of decode, users of closed (default: 1,4,8,16)")
    whole = parser.add_whole
    whole("--prompt", 1, 100_000, "tokens of a prompt (default: 128)", default=128)
    whole("--output", 2, 100_000, "tokens of an answer (default: 64)", default=64)
    whole("--samples", 1, 100_000, "processes for each figure (default: 3)", default=3)
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="'processor': seconds are processor time of all threads, for a busy machine",
    )
    add("--json", metavar="FILE", help="write all measurements, after each sample")
    add(
        "--from",
        dest="source",
        metavar="FILE",
        help="show a file that --json wrote; measure nothing",
    )
    parser.add_attention()
    add("--sample", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        options.read_speculate(args.speculate)
        args.rows = [read_whole("--rows", count, 1, 1024) for count in args.rows.split(",")]
        args.parts = args.parts.split(",")
        args.rivals = read_rivals(args.vs, args.policy)
        check(args)
        if args.json:
            remedy = "name a file in a folder that exists and is writable"
            with options.about(f"--json {shown(args.json)}", remedy):
                check_writable(args.json)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the options ask for something that cannot be measured."""
    if args.bits != 32 and not args.shape:
        raise ValueError(f"--bits {args.bits} is for --shape; a model's bits are fixed")
    if args.model is not None and args.shape:
        words = f"--model {args.model} and --shape {args.shape} are mutually exclusive"
        raise ValueError(f"{words}; give one")
    if "quality" in args.parts:
        if args.parts != ["quality"] or args.rivals or args.shape:
            raise ValueError("quality is measured by itself: give --parts quality and a --model")
        try:
            import numpy  # noqa: F401
        except ImportError:
            raise ValueError("quality is computed by numpy; run pip install numpy") from None
        return
    engines = [rival.engine for rival in args.rivals]
    if "mlx-lm" in engines and (args.model or "").lower().endswith(".gguf"):
        raise ValueError("mlx-lm does not read GGUF files; compare with --vs llama.cpp")
    for part in args.parts:
        if part not in PARTS:
            words = f"--parts: {shown(part)} is not a part"
            raise ValueError(f"{words}; choose among {','.join(PARTS)}")
        if args.clock != "wall" and part not in OF_ANY_CLOCK:
            words = f"--clock {args.clock} is for {' and '.join(OF_ANY_CLOCK)}"
            raise ValueError(f"{words}; leave {part} out of --parts")
    peers = [rival.engine for rival in args.rivals if rival.engine in PEERS]
    for rival in args.rivals:
        if rival.engine in PEERS and (why := obstacle(rival.engine, rival.environment)):
            raise ValueError(f"{why}; or leave out --vs {rival.name}")
    if "same" in args.parts and not peers:
        raise ValueError(f"same compares with a peer; add --vs {' or --vs '.join(PEERS)}")
    if environment.backend() and args.rivals:
        raise ValueError("ranks measure one engine; leave out --vs")


def measure_all(args: argparse.Namespace) -> dict:
    """Take all samples of all parts. Return them in the form of a `--json` file."""
    data = {
        "command": installation.command("bench.py", *sys.argv[1:]),
        "machine": describe_machine(args.rivals),
        "records": [],
    }
    with ExitStack() as stack:
        if args.shape:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanobatch-"))
            folder = make_model(Path(temporary), args.shape, args.bits)
            if any(rival.engine == "llama.cpp" for rival in args.rivals):
                make_gguf(folder, folder)  # once for all samples
        else:
            # Absolute, because another checkout's samples run in that checkout's folder
            folder = find(args.model or "demo").absolute()
        usual = Spec(
            part="",
            contestant="",
            folder=str(folder),
            vocabulary=read_config(folder, has_head=False).V,
            rows=ROWS,
            prompt=args.prompt,
            output=args.output,
            clock=args.clock,
            kv=args.kv,
            attention=args.attention,
        )
        ours = our_column(args.policy, args.speculate)
        plan = make_plan(args.parts, args.rows, usual, ours, args.rivals)
        total = args.samples * sum(len(setup.columns) for setup in plan)
        for _ in take_all(plan, args.samples, data["records"], progress(total)):
            # Write the file after each sample, so that an interrupted run is not lost
            if args.json and not environment.rank():
                write_whole(args.json, json.dumps(data, indent=1))
    return data


def progress(total: int) -> Callable[[str], None]:
    """Return a function to call before each sample with its description. It writes a line to standard
    error; on a terminal each line replaces the previous one."""
    began = time.perf_counter()
    number = count(1)
    is_terminal = sys.stderr.isatty()

    def report(stage: str) -> None:
        seconds = time.perf_counter() - began
        line = f"nanobatch: {next(number)} of {total} after {seconds:.0f} s: {stage}"
        if not environment.rank():
            start, end = ("\r\033[K", "") if is_terminal else ("", "\n")
            print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    return report


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.sample:
        return take_sample(args.sample)
    # Exit by an exception, so that the sample's process is stopped, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.parts == ["quality"]:
            from benchmarks import quality

            quality.show(find(args.model or "demo").absolute())
            return 0
        data = load_data(args.source) if args.source else measure_all(args)
        if not environment.rank():
            show(data)
    except (ValueError, Failure, OSError) as error:
        options.say(one_line(error))
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    options.run(main)
