"""The engine room."""

from __future__ import annotations

import argparse
import gc
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from screen.ink import clean

if TYPE_CHECKING:
    from nanobatch import Engine
    from parts.answers import Handle, Metrics, Snapshot


# Two prompts that begin alike, and the beginning is longer than a chunk: the second takes its rows over from the first.
EVENING = (
    "It is late, and the children are in bed. They have had their supper, they have brushed their teeth, and the lamp "
    "by the window is still on. They want to hear one more story before they go to sleep, and it should be a story "
    "with a good end."
)
# Short answers between long ones: that is where the policies differ. (prompt, longest answer in tokens)
BURST = (
    ("Tell me a story about a fox and a lantern.", 320),
    ("What is 3 + 4?", 16),
    ("Count from 7 to 19.", 64),
    ("What is a slot?", 48),
    ("Spell the word lantern.", 32),
    (f"{EVENING} Tell me a long story about a fox.", 320),
    ("Is fox in this list: owl, fox, bee?", 24),
    ("Say the alphabet from f.", 64),
    ("Why batch?", 48),
    ("Reverse the word stone.", 32),
    ("Tell me a long story about a girl and a kite.", 320),
    ("Name the days from Tuesday.", 32),
    ("Repeat: the cat sat on the mat.", 24),
    ("What is 12 + 9?", 24),
    (f"{EVENING} Tell me a story about a cat and a drum.", 320),
    ("Count from 30 to 41.", 64),
)


class Ask(NamedTuple):
    """A prompt, and how it wants to be answered."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None


@dataclass(frozen=True)
class Settings:
    """What is fired next is fired like this. `/set` changes it."""

    temperature: float = 0.0
    max_tokens: int = 320
    seed: int | None = None
    burst: int = 24
    rate: float = 2.0  # of the steady load, requests a second


class Stopwatch:
    """The engine's clock: seconds since the start. It stands still while the engine is paused.

    So TTFT and tokens/s tell what the engine does, not how long somebody looked at it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._lost = now, now()
        self._stopped: float | None = None

    def __call__(self) -> float:
        return (self._now() if self._stopped is None else self._stopped) - self._lost

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = self._now()

    def go(self) -> None:
        if self._stopped is not None:
            self._lost += self._now() - self._stopped
            self._stopped = None


@dataclass(frozen=True)
class RequestView:
    """One request at one moment, its text included."""

    id: int
    prompt: str
    policy: str  # the one in force when it came
    arrived: float
    metrics: Metrics
    ended: float | None = None
    text: str = ""
    reason: str | None = None
    error: str | None = None


class Leg(NamedTuple):
    """One half of a race: the same burst under one policy."""

    policy: str
    first_step: int
    last_step: int | None  # None while it runs
    requests: tuple[int, ...]


class Fault(NamedTuple):
    """Something went wrong. If a prompt could not be fired, here it is again."""

    message: str
    prompt: str | None = None


@dataclass(frozen=True)
class View:
    """What the screen may know of the engine at one moment."""

    stage: str = "loading"  # "loading" | "ready" | "failed"
    done: tuple[str, ...] = ()  # what loading has done so far; the last line is what it does now
    error: str = ""
    now: float = 0.0
    since: float = 0.0  # when loading was over: warming up is not shown
    max_len: int = 0
    chunk: int = 0
    budget: int = 0
    far: int = 0
    policy: str = "continuous"
    switching_to: str | None = None
    paused: bool = False
    stepping: int = 0  # steps that are still to be run by hand
    load: float = 0.0  # requests a second that come by themselves
    engine: Snapshot | None = None
    planned: int = 0  # steps; the newest of them is still on the device, and in no record yet
    requests: tuple[RequestView, ...] = ()  # oldest first
    racing: bool = False
    legs: tuple[Leg, ...] = ()
    faults: tuple[Fault, ...] = ()
    heard: int = 0  # how many wishes have been fulfilled

    @property
    def busy(self) -> bool:
        engine = self.engine
        return self.racing or bool(engine and (engine.queue or any(s.request is not None for s in engine.slots)))


def wish(method: Callable) -> Callable:
    """What anybody may call: it is written down and returns at once; the engine room does it between two steps."""

    def post(self: EngineRoom, *arguments) -> None:
        self.posted += 1
        self._wishes.put((method, arguments))
        self._wake.set()

    return post


Loader = Callable[[Callable[[str], None], Callable[[], float]], "Engine"]  # it is given `report` and a clock


class EngineRoom:
    """The one thread that owns the engine. Everything else has wishes, and looks at `view`."""

    REMEMBERED = 500  # requests that have ended and can still be opened

    def __init__(self, load: Loader, period: float = 0.08):
        self.view = self._draft = View()  # what the others see; the next one, while the thread works on it
        self.clock = Stopwatch()
        self.engine: Engine | None = None
        self.posted = 0  # wishes
        self._wishes: queue.SimpleQueue = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="engine room")  # no daemon: MLX would abort at exit
        self._load, self._period, self._published = load, period, 0.0
        self._open: dict[int, tuple[Handle, RequestView]] = {}
        self._ended: deque[RequestView] = deque(maxlen=self.REMEMBERED)
        self._next_arrival = 0.0
        self._dice = random.Random(0)
        self._crowd: Sequence[Ask] = ()  # those whom the steady load picks from
        self._race: Sequence[Ask] = ()

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Ask the thread to end; True if it has. A download, or a step of seconds, cannot be interrupted."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    # --- the thread

    def _live(self) -> None:
        try:
            self.load()
            while not self._stopping and self.view.stage == "ready":
                self._wake.wait(self.turn())
        finally:
            if self.engine:
                self.engine.close()

    def load(self) -> None:
        try:
            self.engine = self._load(self._report, self.clock)
        except BaseException as error:  # a thread that raises is invisible; and a missing backend exits
            said = "" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            self.view = replace(self.view, stage="failed", error=clean(said))
            return
        gc.collect()
        gc.freeze()  # what loading has left is never garbage: the collector need not look at it in mid-step
        sched = self.engine.sched
        self._note(stage="ready", since=self.clock(), policy=sched.policy)
        self._note(max_len=sched.max_len, chunk=sched.chunk, budget=sched.budget, far=sched.far)
        self.publish()

    def _report(self, stage: str) -> None:
        if self._stopping:
            raise SystemExit
        self._note(done=(*self._draft.done, clean(stage)))
        self.view = self._draft

    def _note(self, **changes) -> None:
        self._draft = replace(self._draft, **changes)

    def _fault(self, message: str, prompt: str | None = None) -> None:
        self._note(faults=(*self._draft.faults, Fault(clean(message), prompt)))

    def publish(self) -> None:
        self._published = time.perf_counter()
        requests = (*self._ended, *(self._look(*entry) for entry in self._open.values()))
        self._note(now=self.clock(), engine=self.engine.snapshot(), planned=self.engine.sched.steps)
        self._note(requests=requests, racing=bool(self._race))
        self.view = self._draft

    def turn(self) -> float | None:
        """Do what is wished, fire what the load wants, run a step, show it. Answers with how long to sleep then."""
        self._wake.clear()
        while not self._wishes.empty():
            method, arguments = self._wishes.get()
            method(self, *arguments)
            self._note(heard=self._draft.heard + 1)
        now = self._draft
        if now.paused and not now.stepping:
            self.clock.stop()
            self.publish()
            return None
        self.clock.go()
        self._arrive()
        self._run_race()
        worked = self._step()
        self._note(stepping=max(0, now.stepping - 1) if worked else 0)
        if not worked or now.paused or time.perf_counter() - self._published >= self._period:
            self.publish()
        if worked or self._race:
            return 0
        return self._next_arrival - self.clock() if now.load else None

    def _step(self) -> bool:
        """One step of the engine. It runs ahead: after a rest its first call starts a step and records none yet."""
        before = self._newest() if self._draft.stepping else None
        try:
            worked = self.engine.step()
            if worked and self._newest() == before:
                worked = self.engine.step()
        except BaseException as error:  # all that was open has ended with this error; the next request is welcome
            self._fault(f"the engine failed: {type(error).__name__}: {error}")
            worked = False
        for handle, view in list(self._open.values()):
            if handle.finish_reason:
                self._ended.append(self._look(handle, view))
                del self._open[handle.id]
                if handle.error:
                    self._fault(f"r{handle.id} failed: {handle.error}")
        self._switch_if_drained()
        return worked

    def _newest(self) -> int:
        steps = self.engine.snapshot().steps
        return steps[-1].step if steps else 0

    def _look(self, handle: Handle, view: RequestView) -> RequestView:
        """The request as it is now. Those who still wait have not changed."""
        if not handle.tokens and handle.finish_reason is None:
            return view
        ended = self.clock() if handle.finish_reason else None
        view = replace(view, text=clean(handle.text), metrics=handle.metrics, reason=handle.finish_reason, ended=ended)
        return replace(view, error=clean(handle.error)) if handle.error else view

    # --- firing and cancelling

    def _fire(self, asks: Sequence[Ask], policy: str = "") -> list[int]:
        fired = []
        for ask in asks:
            try:
                handle = self._submit(ask)
            except (ValueError, RuntimeError) as error:  # it does not fit a slot, or the line is full
                self._fault(f"not fired: {error}", ask.prompt)
                break
            policy = policy or self._draft.policy
            view = RequestView(handle.id, clean(ask.prompt), policy, self.clock(), handle.metrics)
            self._open[handle.id] = handle, view
            fired.append(handle.id)
        return fired

    fire = wish(_fire)

    def _submit(self, ask: Ask) -> Handle:
        """`max_tokens` is a wish: where a slot has not that much room, the answer may be as long as the room."""
        from nanobatch import Sampling

        text = self.engine.text
        chat = text.has_template and ask.prompt
        ids = text.encode_chat([{"role": "user", "content": ask.prompt}]) if chat else text.encode(ask.prompt)
        longest = max(1, min(ask.max_tokens, self.engine.sched.max_len - len(ids)))
        return self.engine.submit(ids, Sampling(max_tokens=longest, temperature=ask.temperature, seed=ask.seed))

    @wish
    def cancel(self, request: int | None) -> None:
        """One request, or all."""
        if request is None:
            self._end_race()
        for handle, _ in self._open.values():
            if request in (None, handle.id):
                handle.cancel()

    @wish
    def set_load(self, rate: float, asks: Sequence[Ask] = ()) -> None:
        self._note(load=rate)
        self._crowd = asks
        if rate:
            self._next_arrival = self.clock() + self._dice.expovariate(rate)

    def _arrive(self) -> None:
        """A steady load is a Poisson process: the gaps between its arrivals are exponentially distributed."""
        rate = self._draft.load
        while rate and not self._race and self.clock() >= self._next_arrival:
            self._fire([self._dice.choice(self._crowd)])
            self._next_arrival += self._dice.expovariate(rate)

    # --- stopping and going

    @wish
    def pause(self, paused: bool) -> None:
        self._note(paused=paused, stepping=0)

    @wish
    def step(self, count: int) -> None:
        """Run so many steps, and pause."""
        self._note(paused=True, stepping=self._draft.stepping + count)

    # --- policies

    @wish
    def switch(self, policy: str) -> None:
        """Drain, then switch. While draining the policy is `static`: it admits nobody while anybody runs."""
        if self._race:
            self._fault("a race is running; it sets the policies itself")
            return
        self._note(switching_to=policy)
        self.engine.sched.policy = "static"
        self._switch_if_drained()

    def _switch_if_drained(self) -> None:
        target = self._draft.switching_to
        if target and not self.engine.sched.running:
            self.engine.sched.policy = target
            self._note(policy=target, switching_to=None)

    @wish
    def race(self, asks: Sequence[Ask]) -> None:
        """Once everything has ended: these asks under static, then again under continuous. It ends a pause."""
        self._note(paused=False, stepping=0)
        if not self._race:
            self._race = asks
            self._note(legs=())

    def _run_race(self) -> None:
        """Between two steps, with nobody in the house: one leg is over, and the next begins."""
        sched, legs = self.engine.sched, self._draft.legs
        if not self._race or sched.running or sched.waiting or self._draft.switching_to:
            return
        if legs:
            legs = (*legs[:-1], legs[-1]._replace(last_step=sched.steps))
        if len(legs) < 2:
            sched.reuse = False  # else the second leg would find the first one's prompts in the slots
            sched.policy = ("static", "continuous")[len(legs)]
            first, fired = sched.steps + 1, self._fire(self._race, sched.policy)
            legs = (*legs, Leg(sched.policy, first, None, tuple(fired)))
        self._note(legs=legs)
        if legs[-1].last_step or not legs[-1].requests:
            self._end_race()

    def _end_race(self) -> None:
        self._race, self.engine.sched.reuse = (), True
        if not self._draft.switching_to:
            self.engine.sched.policy = self._draft.policy


def policy_of(view: View) -> str:
    """The policy in force; a race has its own."""
    return view.legs[-1].policy if view.racing and view.legs else view.policy


def load_engine(args: argparse.Namespace, report: Callable[[str], None], clock: Callable[[], float]) -> Engine:
    """How the engine room gets its engine. Nothing before this has imported MLX."""
    report("starting MLX")
    from nanobatch import Engine, Sampling

    # The demo's answers are short: in shorter slots more can be seen.
    sizes = {"slots": args.slots, "max_len": args.max_len or (400 if args.model == "demo" else None)}
    engine = Engine.load(args.model, report=report, policy=args.policy, clock=clock, **sizes)
    report("warming up")
    engine.generate([[0]], Sampling(max_tokens=2, ignore_eos=True))
    engine.sched.start_over()  # what this has left in a slot is nobody's prompt
    engine.sched.free.sort()
    engine.sched.steps = 0
    return engine
