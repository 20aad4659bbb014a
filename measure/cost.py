"""What does the screen cost the engine? Tokens a second without it and with it, in turn, in one
process.

    python measure/cost.py [--model M] [--size 120x40] [--rounds 5] [--burst 48] [--queued 5000]
    [--rate 200]

The screen is open in a pseudo-terminal of that size. The same burst runs again and again, in turn
with and without the screen looking at the engine. The medians are compared, so that a noisy machine
is noisy for both.

`--queued`: behind the burst, so many more wait meanwhile. `--rate`: so many more come in a second
meanwhile, and wait. Both are cancelled when the burst has ended.
"""

import argparse
import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tui
from screen.room import EngineRoom
from screen.session import Session
from screen.state import State
from screen.widgets import thrifty


async def rates(app: tui.Screen, args: argparse.Namespace) -> dict[bool, list[float]]:
    """Tokens a second of each burst: by whether the screen looks meanwhile."""
    found = {False: [], True: []}
    look = app.look
    room = app.session.room
    asks = app.session.asks(args.burst)
    await app.until(lambda: app.state.view.stage == "ready")
    for looks in (False, True) * args.rounds:
        app.look = look if looks else lambda: None
        room.pause(True)
        before = room.look().engine
        room.fire([*asks, *asks[:1] * args.queued])
        room.set_load(args.rate, asks[:1])
        last = before.submitted + len(asks)
        while room.look().heard < room.posted:
            await asyncio.sleep(0.05)
        room.pause(False)
        began = room.clock()
        while any(id <= last for id in list(room.own)):
            await asyncio.sleep(0.02)
        seconds = room.clock() - began
        after = room.engine.snapshot()
        room.set_load(0.0)
        room.cancel(None)
        while (view := room.look()).heard < room.posted or view.busy:
            await asyncio.sleep(0.05)
        found[looks].append((after.output_tokens - before.output_tokens) / seconds)
    return found


def show(args: argparse.Namespace) -> dict[bool, list[float]]:
    """The screen, in the terminal in which this process runs."""
    room = EngineRoom(partial(tui.load_engine, tui.parse_arguments(["--model", args.model])))
    app = tui.Screen(Session(room, State(args.model)))

    async def measure() -> None:
        app.set_interval(0.1, thrifty(lambda: app.look()))
        app.exit(await rates(app, args))

    app.LOOKS = 3600  # the interval above looks, or does not
    app.call_later(lambda: app.run_worker(measure()))
    room.start()
    found = app.run()
    room.stop(10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=int, default=48)
    parser.add_argument("--queued", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    answers, answer = os.pipe()
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        os.write(answer, json.dumps(list(show(args).values())).encode())
        os._exit(0)
    os.close(answer)
    with suppress(OSError):  # on Linux the end of a terminal is an error
        while os.read(terminal, 65536):
            pass
    alone, looking = map(median, json.loads(os.read(answers, 65536)))
    what = f"{args.size}, {args.queued:,} queued, {args.rate:g} a second"
    share = f"{looking / alone:.1%}"
    print(f"{what}: {alone:,.0f} tokens/s alone, {looking:,.0f} with the screen: {share}")


if __name__ == "__main__":
    main()
