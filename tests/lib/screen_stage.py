"""A session on a word engine that only the test steps, without a screen or with one."""

import asyncio
import inspect
import os
import random
import time
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

from word_engine import Clock, word_engine

from engine.loop import Stopwatch
from nanobatch import Engine
from screen import state, workload
from screen.commands import Session
from screen.draw import style
from screen.draw.canvas import Canvas
from screen.engine_client import LocalEngineClient
from screen.state import State
from screen.workload import Settings
from tui import MENU, Screen

GOLDEN = Path(__file__).parents[1] / "screen" / "golden"


class Stage:
    """A session on a word engine that only the test steps."""

    def __init__(self, prompts=workload.BURST, **options):
        self.time = Clock()
        self.client = LocalEngineClient(
            lambda report, clock: self.load_engine(report, clock, **options)
        )
        self.client.clock = Stopwatch(self.time)
        self.client.others = SimpleNamespace(
            used_cores=lambda: 0.0, cores=2
        )  # because this machine may be busy
        self.state = State("words", settings=Settings(burst=12), prompts=prompts)
        self.session = Session(self.client, self.state, MENU)
        self.earlier = None  # prompts of earlier sessions

    def load_engine(self, report, clock, **options) -> Engine:
        for stage in ("starting", "reading 12 MiB of weights", "allocating the slab: 8 slots"):
            report(stage)
        return word_engine(clock, self.time, **options)

    @property
    def engine(self) -> Engine:
        return self.client.engine

    def load(self) -> "Stage":
        self.client.load()
        self.session.refresh()
        return self

    def turns(self, count: int = 1) -> "Stage":
        for _ in range(count):
            self.client.loop.turn()
            self.session.refresh()
        return self

    def finish(self) -> "Stage":
        """Step until all work is done."""
        for _ in range(5000):
            if wait := self.client.loop.turn():
                time.sleep(wait)
            self.session.refresh()
            if self.session.settled:
                return self
        raise AssertionError("this never ends")

    def obey(self, order: str) -> str:
        return self.session.obey(order)

    def lines(self, draw, width: int, height: int) -> list[str]:
        """Return what a function draws for this stage, as plain text."""
        return plain(drawn(draw, self.state, width, height))

    def prompt(self, request: int) -> str:
        return state.prompt_of(self.state.requests[request])

    def cells(self, slot: int) -> str:
        return "".join(style.GLYPHS[column.cells[slot].kind] for column in self.state.history)


class Show:
    """A stage with a screen."""

    def __init__(self, pilot, stage: Stage):
        self.pilot, self.stage, self.app = pilot, stage, pilot.app
        self.state = stage.state

    async def turns(self, count: int = 1) -> None:
        """Run turns. The screen is updated once, after the last one."""
        for _ in range(count):
            self.stage.client.loop.turn()
            self.stage.session.refresh()
        self.stage.client.update_view()
        self.app.poll()
        self.app.paint()
        await self.pilot.pause()

    async def press(self, *keys: str, turns: int = 1) -> None:
        await self.pilot.press(*keys)
        await self.turns(turns)

    async def sees(self, part: str) -> None:
        """Wait until this text is on the screen."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if part in self.text():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"{part!r} is not on the screen:\n{self.text()}")

    def text(self) -> str:
        """Return the screen's content as plain text."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


def show(
    scenario, stage: Stage | None = None, size: tuple[int, int] = (80, 24), load: bool = True
) -> Stage:
    """Run `scenario(show)` on a screen of this size."""
    stage = stage or Stage()

    async def main() -> None:
        app = Screen(stage.session, earlier=stage.earlier)
        app.POLL_S = 3600  # the test updates the view
        async with app.run_test(size=size, notifications=True) as pilot:
            it = Show(pilot, stage)
            if load:
                stage.client.load()
                app.poll()
            await pilot.pause()
            await scenario(it)

    asyncio.run(main())
    return stage


def on_screen(size: tuple[int, int] = (80, 24), load: bool = True, make=Stage):
    """Run a test, which is a coroutine, with a screen as its first argument."""

    def decorate(test):
        @wraps(test)
        def run(**parameters):
            show(partial(test, **parameters), make(), size, load)

        del run.__wrapped__  # otherwise pytest would take the screen for a fixture
        names = [*inspect.signature(test).parameters.values()][1:]
        run.__signature__ = inspect.Signature(names)
        return run

    return decorate


def drawn(draw, state: State, width: int, height: int) -> list[style.Line]:
    """Return all lines that a function draws on a canvas of this size, including those that do not fit."""
    on = Canvas(style.DARK, width, height)
    draw(state, on)
    return on.lines


def plain(lines: list[style.Line]) -> list[str]:
    return ["".join(segment.text for segment in line) for line in lines]


def like_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("NANOBATCH_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    before = path.read_text() if path.exists() else "no picture yet"
    assert text + "\n" == before, f"{path.name} differs; NANOBATCH_GOLDEN=write if it is meant"


def draft_at_random(engine: Engine, dice: random.Random) -> None:
    """Draft at random up to four of the right tokens, in some drafts with a wrong last token."""

    def draft(decoding, left):
        found = {}
        for r in decoding:
            most = min(left, r.max_tokens - r.planned - 1, dice.randint(0, 4))
            if most < 1 or r.planned != r.committed or r.drafting.source is None:
                continue
            tokens = [engine.runner.says(r.slot, r.planned + i) for i in range(most)]
            if dice.random() < 0.4:
                tokens[-1] += 1
            found[r.id] = tuple(tokens)
            left -= most
        return found

    engine.drafter.most = 4
    engine.sched.draft = draft
    engine.drafter.should_read_now = lambda plan: dice.random() < 0.5


def disturb(stage: Stage, seconds: float) -> None:
    """Simulate other programs that delay two of five steps, by this long on average."""
    dice, begin = random.Random(0), stage.engine.runner.start_forward

    def disturbed(order):
        flight = begin(order)
        flight.cost += dice.expovariate(1 / seconds) * (dice.random() < 0.4)
        return flight

    stage.engine.runner.start_forward = disturbed


def turned_by_company(stage: Stage, many: int, wrong: str) -> list[int]:
    """Make the runner depend on the batch: when at least `many` requests decode in a step, change the sixth
    word of an answer (`wrong` = "token"), or its probability. Return a list that receives the slots."""
    runner = stage.engine.runner
    finish = runner.start_sampling
    turned = []

    def bent(flight, picks):
        flight = finish(flight, picks)
        decoding = sum(pick.index > 0 for (pick,) in picks.values())
        for slot, (pick,) in picks.items():
            place = slot, pick.index
            if pick.index == 5 and decoding >= many and place in flight.outputs:
                found = flight.outputs[place].logprob
                if wrong == "token":
                    flight.tokens[slot] = [stage.engine.text.token(" wolf")]
                else:
                    entry = found._replace(logprob=found.logprob + 2**-20)
                    flight.outputs[place] = flight.outputs[place]._replace(logprob=entry)
                turned.append(slot)
        return flight

    runner.start_sampling = bent
    return turned
