"""How far do races in a row differ, with busy programs beside them? And does compare's replay take
as long as what ran?

    python measure/races.py [--races 8] [--busy 2] [--burst 24] [--model demo]

Each race is the same burst under static, then under continuous. After it, the last leg is replayed
under its own policy. `--busy` so many processes that do nothing but keep a processor busy.
"""

import argparse
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tui
from screen.room import EngineRoom
from screen.session import Session
from screen.state import State


def spread(values: list[float], unit: str = "s") -> str:
    return f"{min(values):.2f} to {max(values):.2f} {unit}, highest / lowest {max(values) / min(values):.2f}"


def run(session: Session, races: int, burst: int) -> dict[str, list[float]]:
    state, out = session.state, {}
    while not session.settled or state.view.stage != "ready":
        time.sleep(0.05)
        session.look()
    for number in range(1, races + 1):
        session.obey(f"/race {burst}")
        while not session.settled or not state.raced or state.view.racing:
            time.sleep(0.05)
            session.look()
        static, continuous = state.raced.runs
        session.obey("/compare")
        own, real = (
            state.contest.runs[0],
            re.search(r"steps, ([\d.]+) (m?)s on that clock", state.contest.note),
        )
        ran = float(real[1]) / (1000 if real[2] else 1)
        for leg in (static, continuous):
            print(
                f"{number} {leg.policy}: {len(leg.columns)} steps, {leg.makespan:.2f} s; in all {leg.on_the_engines}",
                flush=True,
            )
            out.setdefault(leg.policy, []).append(leg.makespan)
            out.setdefault(f"{leg.policy} on the engine's clock", []).append(leg.took)
        out.setdefault("static / continuous", []).append(static.makespan / continuous.makespan)
        out.setdefault("the same on the engine's clock", []).append(static.took / continuous.took)
        out.setdefault("replay / what ran", []).append(own.makespan / ran)
        state.raced = None
    return out


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, default in (("races", 8), ("busy", 2), ("burst", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)
    ]
    room = EngineRoom(partial(tui.load_engine, tui.parse_arguments(["--model", args.model])))
    try:
        room.start()
        figures = run(Session(room, State(args.model)), args.races, args.burst)
    finally:
        room.stop(10)
        for other in others:
            other.kill()
    for name, values in figures.items():
        print(f"{name}: {spread(values, '' if '/' in name or 'same' in name else 's')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
