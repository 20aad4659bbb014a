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
import os
import pty
import statistics
import struct
import sys
import termios
import threading
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tui
from screen.room import Ask, EngineRoom
from screen.session import Session
from screen.state import State
from screen.widgets import thrifty


async def rounds(
    app: tui.Screen, asks: list[Ask], args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Tokens a second of each burst: while the screen looks, and while it does not."""
    looking, alone = [], []
    look, room, state = app.look, app.session.room, app.state
    await app.until(lambda: state.view.stage == "ready")
    for i in range(2 * args.rounds):
        app.look = look if i % 2 else lambda: None
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
        ended, after = room.clock(), room.engine.snapshot()
        room.set_load(0.0)
        room.cancel(None)
        while (view := room.look()).heard < room.posted or view.busy:
            await asyncio.sleep(0.05)
        rate = (after.output_tokens - before.output_tokens) / (ended - began)
        (looking if i % 2 else alone).append(rate)
    return looking, alone


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=int, default=48)
    parser.add_argument("--queued", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    threading.Thread(
        target=lambda: [None for _ in iter(lambda: os.read(master, 65536), b"")], daemon=True
    ).start()
    terminal = os.fdopen(slave, "w")
    stdin, out = os.dup(0), sys.stdout
    os.dup2(slave, 0)
    sys.__stdin__ = sys.stdin = os.fdopen(os.dup(slave), "r")
    sys.__stderr__ = terminal
    room = EngineRoom(partial(tui.load_engine, tui.parse_arguments(["--model", args.model])))
    state = State(args.model)
    app, result = tui.Screen(Session(room, state)), []
    asks = app.session.asks(args.burst)

    async def measure() -> None:
        app.set_interval(0.1, thrifty(lambda: app.look()))
        result.extend(await rounds(app, asks, args))
        app.exit()

    app.LOOKS = 3600  # the interval above looks, or does not
    app.call_later(lambda: app.run_worker(measure()))
    room.start()
    app.run()
    room.stop(10)
    os.dup2(stdin, 0)
    looking, alone = map(statistics.median, result)
    what = f"{args.size}, {args.queued:,} queued, {args.rate:g} a second"
    print(
        f"{what}: {alone:,.0f} tokens/s alone, {looking:,.0f} with the screen: {looking / alone:.1%}",
        file=out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
