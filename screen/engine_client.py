"""The engine room owns the engine, and fulfils the screen's wishes. Also: the workload of a
burst.

The problem. A screen draws ten times a second and must never wait for an engine. An engine takes
hundreds of steps a second and must never wait for a screen. So they meet in two places only. A wish
(fire, cancel, pause, race, another policy) is written down, and the engine's loop fulfils it
between two steps. The screen sees a frozen `View`: the engine's snapshot, and the room's own
knowledge. `look` answers with a view.

All watchers speak one protocol, `Room`: `news`, a number, changes when there is something to
see; `look(since)` answers with a view; and the wishes. `EngineRoom` has an engine of its own. If
a door is open (`serve.py`), strangers ask the same engine, and the door's ledger joins the view.
`RemoteRoom` in `remote.py` sees an engine elsewhere.

The invariant: only the loop's thread steps or changes the engine, and loading it happens behind the
first frame.

Where next: `remote.py`, the other room; `state.py`, the memory of all views.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from analysis.contention import Others
from policies import POLICIES
from runtime.conversation import LEAST, outgrown
from runtime.engine_protocol import AnyEngine
from runtime.errors import show_fault
from runtime.handle import Handle
from runtime.loop import Loop, Stopwatch
from runtime.sampling_params import SamplingParams
from runtime.snapshot import ExpertsView, Limits, RequestView, Snapshot
from sched import QueueFull
from screen.draw.style import clean
from server.access_log import DoorView, Journal

DRAIN_S = 20.0  # at the end, clients' requests may go on so long

# --- the workload --------------------------------------------------------------------------------

# Two prompts begin with this text, longer than a chunk of the demo. So the second reuses
# rows of the first.
CHUNK = 64
EVENING = (
    "It is late, and the children are in bed. They have had their supper, they have brushed their teeth, and the lamp "
    "by the window is still on. They want to hear one more story before they go to sleep, and it should be a story "
    "with a good end."
)

# (prompt, longest answer in tokens). Short answers stand between long ones, since there the
# policies differ.
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
# The schema of "/json": 2.7 million parameters, and never a broken brace.
SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["who", "age", "likes"],
"properties": {"who": {"enum": ["a fox", "an owl", "a cat"]}, "age": {"type": "integer",
"minimum": 1, "maximum": 20}, "likes": {"type": "array", "minItems": 1, "maxItems": 3, "items":
{"type": "string", "pattern": "^[a-z ]{3,16}$"}}}}"""
SEEN = 6  # so many of the likeliest tokens are shown under glass
RIVALS = tuple(POLICIES)[1::-1]  # the policies of a race, in order: static, continuous


class Ask(NamedTuple):
    """A prompt, and the settings for the answer."""

    prompt: str
    max_tokens: int
    temperature: float | None  # None: as the model's makers advise
    seed: int | None
    schema: str = ""  # of the answer's JSON
    logprobs: int | None = None  # so many of the likeliest tokens, with log probabilities
    mute: bool = False  # no log tells of this prompt, one of a trial's hundreds
    client: str = ""  # the name of the client
    question: int = 0  # the number of a question in a conversation
    messages: Sequence[dict[str, str]] = ()  # of that conversation, the prompt at the end
    speculate: bool = True  # may tokens of the answer be drafted?
    read: Any = None  # the prompt in tokens, for the engine (`Prompt` in `text/tokenizer.py`)


def is_mute(request: RequestView) -> bool:
    return isinstance(request.origin, Ask) and request.origin.mute


class Settings(NamedTuple):
    """How the next prompts are fired. `/set` changes it."""

    temperature: float | None = None  # as the model's makers advise
    max_tokens: int = 320
    seed: int | None = None
    burst: int = 24
    rate: float = 2.0  # of the steady load, requests a second
    client: str = ""  # the name for prompts from here: `fair` goes by clients
    speculate: bool = True  # False: a token a step, so that all steps can be foretold

    @property
    def words(self) -> str:
        """As `/set` takes them."""
        seed = "none" if self.seed is None else self.seed
        temperature = "default" if self.temperature is None else f"{self.temperature:g}"
        figures = f"temperature={temperature} max={self.max_tokens} seed={seed}"
        client = f" client={self.client}" if self.client else ""
        return f"{figures} burst={self.burst} rate={self.rate:g}{client}"

    def ask(self, prompt: str, most: float = math.inf, number: int = 0) -> Ask:
        """A prompt with these settings, and an answer of at most `most` tokens. `number` makes
        seeds differ."""
        seed = None if self.seed is None else self.seed + number
        most = min(most, self.max_tokens)
        rest = {"client": self.client, "speculate": self.speculate}
        return Ask(prompt, most, self.temperature, seed, **rest)


# --- the knowledge of the screen -----------------------------------------------------------------


class Leg(NamedTuple):
    """One part of a race: the same burst under one policy."""

    policy: str
    first_step: int
    last_step: int | None  # None while the leg runs
    requests: tuple[int, ...]

    @property
    def stop(self) -> float:
        """The step behind the last one."""
        return math.inf if self.last_step is None else self.last_step + 1


class Race(NamedTuple):
    """How far a race is: a trial's finding."""

    legs: tuple[Leg, ...]
    to_race: tuple[str, ...]  # the policies of the legs to come
    lines: tuple[str, ...] = ()
    name: str = "race"
    so_far: str = ""  # the page of the race shows it


class Fault(NamedTuple):
    """Something went wrong. If a prompt could not be fired, the fault gives it back."""

    message: str
    prompt: str | None = None
    question: int = 0  # in a conversation: the refused one; without a prompt, the question waits


class Answer(NamedTuple):
    """The request that answers a question. The text is known here if the engine is elsewhere and
    shows none: the text so far; is the text whole?"""

    request: int
    text: str | None = None
    is_whole: bool = False


class Outgrown(ValueError):
    """A conversation has no room in a slot any more."""


class Finding(Protocol):
    """The findings of a trial so far. Each trial has a frozen record of its own."""

    name: str  # of the trial, and of the page for the findings
    so_far: str  # in a few words
    lines: Sequence[
        str
    ]  # the same in words, for a log: only lines are added from finding to finding


class AnyTrial(Protocol):
    """An experiment on the engine that runs (`trial.py`)."""

    found: Finding

    def run(self, room: EngineRoom) -> Iterator[Finding]: ...

    def takes_in(self, other: AnyTrial) -> bool: ...


class View(NamedTuple):
    """The screen's knowledge at one moment."""

    stage: str = "loading"  # "loading" | "ready" | "failed"
    done: tuple[str, ...] = ()  # the stages of loading so far; the last one goes on
    error: str = ""
    paused: bool = False
    stepping: int = 0  # steps to come, by hand
    slow: float = 0.0  # slow motion, steps a second; 0: full speed
    load: float = 0.0  # the steady load, requests a second
    faults: tuple[Fault, ...] = ()
    heard: int = 0  # how many wishes have been fulfilled
    engine: Snapshot | None = None
    door: DoorView | None = None  # None: no clients can ask
    # The engine is elsewhere: only our own prompts can be fired and cancelled
    watches: bool = False
    model: str = ""  # the name of a model elsewhere
    speaks: bool = True  # the model has a chat template, and so can be shown a conversation
    answers: Mapping[int, Answer] = {}  # by the number of a question
    temperature: float = 0.0  # of a prompt for which none is set
    life: int = 0  # changes when a view begins anew: another process has other numbers
    gone_s: float | None = None  # since then the other end is gone
    trying: bool = False  # a trial runs
    # The findings of the running trial, or of the last one: a record of its own, with a `name`
    trial: Finding | None = None
    experts: ExpertsView | None = None  # of the step of the last question
    others: float = 0.0  # cores in the hands of other programs, while none is idle
    cores: int = 0  # for this process
    # If the budget has been turned: (a step, the limits from this step on), the oldest first
    turns: tuple[tuple[int, Limits], ...] = ()

    @property
    def made_with(self) -> Limits:
        """The limits of the engine at first, whatever the budget is now."""
        return self.turns[0][1] if self.turns else self.engine.limits

    @property
    def works(self) -> bool:
        """Does any request wait or run?"""
        engine = self.engine
        return bool(
            engine and (engine.waiting or any(slot.request is not None for slot in engine.slots))
        )

    @property
    def busy(self) -> bool:
        return self.trying or self.works

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Of the running race, or of the last one."""
        return self.trial.legs if isinstance(self.trial, Race) else ()

    @property
    def racing(self) -> bool:
        return self.trying and isinstance(self.trial, Race)


# --- the rooms ----------------------------------------------------------------------------------


class Room:
    """The protocol of all watchers. If a room cannot fulfil a wish, the wish is refused."""

    def __init__(self) -> None:
        self.posted = 0  # how many wishes there have been
        self.own: Collection[int] = ()  # the open requests from here
        self._known = View()  # the view, before `look` adds the rest
        self._news = 1
        self._lock = threading.RLock()  # held while the view changes

    @property
    def news(self) -> int:
        """Another number whenever there is something new to see."""
        return self._news

    def look(self, since: View | None = None) -> View:
        """The whole view, with all news since an earlier look. For any thread."""
        return self._known

    def note(self, **changes) -> None:
        with self._lock:
            self._known = self._known._replace(**changes)
            self._news += 1

    def fault(self, message: str, *more) -> None:
        with self._lock:
            self.note(faults=(*self._known.faults, Fault(clean(message), *more)))

    def refuse(self, ask: Ask, error: BaseException | str) -> None:
        """This prompt is not fired."""
        if isinstance(error, Outgrown):
            self.fault(str(error), None, ask.question)
        else:
            self.fault(f"not fired: {error}", ask.prompt, ask.question)

    def note_answer(self, ask: Ask, *answer) -> None:
        if ask.question:
            with self._lock:
                self.note(answers={**self._known.answers, ask.question: Answer(*answer)})

    def start(self) -> None: ...

    def drain(self) -> None: ...

    def stop(self, patience: float) -> bool: ...

    def fire(self, asks: Sequence[Ask]) -> None: ...

    def cancel(self, request: int | None) -> None: ...

    def measure_roof(self) -> None:
        """Nothing is measured on a watched machine."""

    def ask_experts(self) -> None: ...

    def end_trial(self, name: str) -> None:
        """No trial runs on a watched engine."""

    def _refuse(self, *arguments) -> None:
        raise ValueError(
            "this screen only watches: it fires prompts and cancels its own, and changes nothing else"
        )

    pause = step = slow = switch = set_load = try_out = set_budget = _refuse


def wish(method: Callable) -> Callable:
    """Makes a method for any thread. The call returns at once; the loop runs the method
    between two steps."""

    def post(self: EngineRoom, *arguments) -> None:
        def fulfil() -> None:
            try:
                method(self, *arguments)
            finally:  # a failed wish counts, too; else a script would wait for it for ever
                self.note(heard=self._known.heard + 1)

        with self._desk:
            self.posted += 1
            (self.loop.wish if self.loop else self._early.append)(fulfil)

    return post


class AnyDoor(Protocol):
    """A door, as far as a room knows (`server/app.py`)."""

    journal: Journal

    def open(self, engine: AnyEngine, loop: Loop, name: str) -> None: ...

    def look(self, since: int = 0) -> DoorView: ...

    def drain(self, patience: float) -> None: ...

    def close(self) -> None: ...


class EngineRoom(Room):
    """Owns the engine and its loop. Other threads use its wishes, and `look`.

    `load` takes a `report` of stages and a `clock`.
    `door`: one that lets clients in. It is opened when the model, which has this name, is loaded.
    """

    def __init__(self, load: Callable[..., AnyEngine], door: AnyDoor | None = None, name: str = ""):
        super().__init__()
        self.clock = Stopwatch()
        self.engine: AnyEngine | None = None
        self.loop: Loop | None = None
        self.door = door
        self._name = name
        # Held while a wish is written down, and while the loop is made
        self._desk = threading.Lock()
        self._early: list[Callable[[], None]] = []  # wishes from before there was a loop
        self._stopping = False
        self._load = load
        self._loader = threading.Thread(target=self._begin, name="loader", daemon=True)
        # The engine forgets a handle when its request has ended, and so does this
        self.own: Mapping[int, Handle] = WeakValueDictionary()
        self.others = Others()
        self._dice = random.Random(0)
        self._next_arrival = 0.0
        self._slow_once = False  # slow motion ends with what runs now
        self._crowd: Sequence[Ask] = ()  # the steady load picks from these
        self._trial: AnyTrial | None = None
        self._findings: Iterator[Finding] = iter(())  # of the trial
        self._tried: set[int] = set()  # requests of the trial

    def start(self) -> None:
        self._loader.start()

    def _begin(self) -> None:
        self.load()
        if self.loop and not self._stopping:
            self.loop.start()

    def load(self) -> None:
        try:
            self.engine = self._load(report=self._report, clock=self.clock)
        # The view must tell of the error; a missing backend raises SystemExit
        except BaseException as error:
            # These are mistakes of a user's
            if not isinstance(error, (SystemExit, ValueError, OSError, RuntimeError)):
                show_fault("loading failed", error)
            said = "" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            self.note(stage="failed", error=clean(said))
            return
        gc.collect()
        # Objects from loading are never garbage, so the collector need not search there in mid-step
        gc.freeze()
        with self._desk:
            self.loop = Loop(self.engine, self._between, self.clock)
            for fulfil in self._early:
                self.loop.wish(fulfil)
        if self.door:
            self.door.open(self.engine, self.loop, self._name)
        text = self.engine.text
        usual = text.advice["temperature"]
        self.note(stage="ready", speaks=text.has_template, temperature=usual)

    def drain(self) -> None:
        """Shut the door: requests of clients go on to the end, for a while; a second Ctrl-C ends
        them."""
        with suppress(KeyboardInterrupt, OSError):
            if self.door and self.loop and any(call.requests for call in self.door.look().open):
                print(
                    "nanobatch: finishing what clients have asked; Ctrl-C ends it at once",
                    file=sys.stderr,
                )
            if self.door:
                self.door.drain(DRAIN_S)
        if self.door:
            self.door.close()

    def stop(self, patience: float) -> bool:
        """End the loop and close the engine. False if a download or a long step has not ended in
        time."""
        self._stopping = True
        if self._loader.is_alive():
            self._loader.join(patience)
        stopped = not self._loader.is_alive() and (self.loop is None or self.loop.stop(patience))
        if stopped and self.engine:
            self.engine.close()
        return stopped

    def _report(self, stage: str) -> None:
        if self._stopping:
            raise SystemExit
        self.note(done=(*self._known.done, clean(stage)))

    @property
    def news(self) -> int:
        # A refusal never reaches the engine
        return self._news + (self.door.journal.changes if self.door else 0)

    def look(self, since: View | None = None) -> View:
        known = self._known
        loop = self.loop
        if self.door:
            seen = since.door.seen if since and since.door else 0
            known = known._replace(door=self.door.look(seen))
        if known.stage != "ready":
            return known
        snapshot = self.engine.snapshot(since.engine if since else None)
        moves = {"paused": loop.paused, "stepping": loop.stepping, "slow": loop.slow}
        moves |= {"others": self.others.look(), "cores": self.others.cores}
        return known._replace(engine=snapshot, **moves)

    def _between(self) -> float | None:
        """Between two steps: the steady load, the trial, and the news. Answers with the seconds to
        the next arrival."""
        if not self.loop.paused or self.loop.stepping:
            self._arrive()
            self._go_on_trying()
        if not self.engine.has_work:
            self._end_slow_once()
        self._news += 1
        if self._trial and not (self.loop.paused or self.engine.has_work):
            return 0.0  # no step will wake the loop
        if not self._known.load or self.clock.stands:
            return None
        return self._next_arrival - self.clock()

    # --- firing and cancelling

    def read(self, ask: Ask) -> Ask:
        """Turn a prompt into tokens in the thread that wishes, for a chat template may take long.

        Before the model is loaded there is nothing to do so with, and nothing to hold up either.
        """
        if self.engine is None or ask.read:
            return ask
        text = self.engine.text
        chat = ask.messages and text.has_template
        ids = text.encode_chat(ask.messages) if chat else text.ask(ask.prompt)
        return ask._replace(read=text.read(ids)._replace(shown=ask.prompt))

    def _read(self, asks: Sequence[Ask]) -> list[Ask]:
        """The same for some, up to the first that cannot be read."""
        found = []
        for ask in asks:
            try:
                found.append(self.read(ask))
            except ValueError as error:
                self.refuse(ask, error)
                break
        return found

    def _fire(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            try:
                handle = self._submit(ask)
            # The prompt does not fit a slot, or the line is full
            except (ValueError, RuntimeError) as error:
                self.refuse(ask, error)
                break
            self.note_answer(ask, handle.id)

    def _submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """If a slot has less room than `max_tokens`, the answer gets that room."""
        engine = self.engine
        prompt = self.read(ask).read
        tokens = len(prompt.ids)
        room = engine.sched.max_len - tokens
        if room < LEAST and len(ask.messages) > 2 and engine.text.has_template:
            raise Outgrown(outgrown(tokens, engine.sched.max_len))
        if room < 1:
            holds = f"a slot holds {engine.sched.max_len:,}, prompt and answer together"
            raise ValueError(
                f"the prompt has {tokens:,} tokens, but {holds}; shorten it, or raise --max-len"
            )
        form = {"grammar": {"json": ask.schema}, "logprobs": SEEN} if ask.schema else {}
        settings = engine.text.advice | {"max_tokens": min(ask.max_tokens, room), "seed": ask.seed}
        if ask.temperature is not None:
            settings["temperature"] = ask.temperature
        sampling = SamplingParams(**settings, **{"logprobs": ask.logprobs, **form})
        told = {"client": ask.client, "speculate": ask.speculate}
        told["origin"] = ask._replace(messages=(), read=None)
        handle = engine.submit(prompt, sampling, prefix_cache=prefix_cache, **told)
        self.own[handle.id] = handle
        return handle

    def submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """For a trial: put a prompt in line, and keep the handle. A prompt that does not fit
        raises.

        `prefix_cache`: whether rows of a beginning may be taken over.
        """
        return self.keep(self._submit(ask, prefix_cache))

    def keep(self, handle: Handle) -> Handle:
        """A request of the trial: it ends with the trial."""
        self.own[handle.id] = handle
        self._tried.add(handle.id)
        return handle

    _post_fire = wish(_fire)

    def fire(self, asks: Sequence[Ask]) -> None:
        self._post_fire(self._read(asks))

    @wish
    def cancel(self, request: int | None) -> None:
        """Cancel one request of our own; None cancels all of them, and the trial."""
        if request is None:
            self._end_trial()
        for handle in list(self.own.values()):
            if request in (None, handle.id):
                handle.cancel()

    def set_load(self, rate: float, asks: Sequence[Ask] = ()) -> None:
        self._post_load(rate, self._read(asks))

    @wish
    def _post_load(self, rate: float, crowd: Sequence[Ask]) -> None:
        self.note(load=rate)
        self._crowd = crowd
        if rate:
            self._next_arrival = self.clock() + self._dice.expovariate(rate)

    def _arrive(self) -> None:
        """The steady load is a Poisson process: the gaps between its arrivals are exponentially
        distributed. While a trial runs, the load rests."""
        rate = self._known.load
        sched = self.engine.sched
        while rate and not self._trial and self.clock() >= self._next_arrival:
            if len(sched.waiting) >= sched.max_queue:  # so it would go on, with a fault for each
                self.note(load=0.0)
                self.fault(f"the steady load is off: the line is full ({sched.max_queue:,})")
                return
            self._fire([self._dice.choice(self._crowd)])
            self._next_arrival += self._dice.expovariate(rate)

    # --- stopping and going

    @wish
    def pause(self, paused: bool) -> None:
        (self.loop.pause if paused else self.loop.resume)()

    @wish
    def step(self, count: int) -> None:
        """Run this many steps, then pause."""
        self.loop.step(count)

    @wish
    def slow(self, rate: float, once: bool = False) -> None:
        """So many steps a second from now on; 0: full speed. `once`: until nothing is left to
        do."""
        self.loop.slow = rate
        self._slow_once = once

    # --- the budget

    @wish
    def set_budget(self, budget: int | str | None) -> None:
        """Bound the steps from now on; None: as the engine was made; "-" and "+": with a chunk
        half as wide, or twice."""
        if self._known.racing:
            self.fault("a race is running; its legs have one budget")
            return
        try:
            self.turn_budget(budget)
        except ValueError as error:  # from before the limits were known
            self.fault(str(error), f"/budget {budget}")

    def turn_budget(self, budget: int | str | None) -> None:
        """The same for a trial, between two steps.

        Steps that were run under other limits are not to be replayed under these, so the view tells
        from which step on they hold.
        """
        now = self.engine.snapshot().limits
        turns = self._known.turns or ((1, now),)
        limits = turns[0][1].turned(now, budget)
        if limits == now:
            return
        self.engine.set_budget(limits.budget, limits.chunk)
        first = self.engine.sched.steps + 1
        kept = [turn for turn in turns if turn[0] < first or turn is turns[0]]
        self.note(turns=(*kept, (first, limits)))

    def _end_slow_once(self) -> None:
        if self._slow_once:
            self.loop.slow = 0.0
            self._slow_once = False

    # --- policies

    @wish
    def switch(self, policy: str) -> None:
        """Change the policy once the slots are drained. "": to the next one."""
        if self._known.racing:
            self.fault("a race is running; it sets the policies itself")
            return
        names = [*POLICIES]
        following = names[(names.index(self.next_policy) + 1) % len(names)]
        self.engine.drain(policy or following)

    @property
    def next_policy(self) -> str:
        """The policy now; or, while the slots are drained, the policy to come."""
        sched = self.engine.sched
        return (sched.draining_to or sched.policy).name

    # --- for the bill of a step

    @wish
    def measure_roof(self) -> None:
        """How fast this machine is. A step in flight is read before, and the clock stands still,
        so no figure of a request or of a step counts the measurement."""
        self.engine.step(plan=False)
        self.clock.stop()
        self._measure_roofline(self.others.look())

    def _measure_roofline(self, others: float) -> None:
        from analysis.probes import measure_roofline  # it needs MLX

        measure_roofline(self.engine, others)

    @wish
    def ask_experts(self) -> None:
        self.note(experts=self._chosen_experts())

    def _chosen_experts(self) -> ExpertsView:
        from analysis.probes import chosen_experts  # it needs MLX

        return chosen_experts(self.engine)

    # --- trials

    @wish
    def try_out(self, trial: AnyTrial) -> None:
        """Run a trial: an experiment on the engine that runs, such as the same prompt two hundred
        times among random neighbours. It ends a pause. A trial that runs may take in another one;
        else the other is refused.

        A trial runs as a generator. It is asked for its next finding between two steps, so there it may
        fire, cancel, and turn what the engine lets others turn; what it has turned it puts back in
        a `finally`. After the last finding it is over, and its requests are cancelled.
        """
        if self._trial and not self._trial.takes_in(trial):
            self.fault(f"a {'race' if self._known.racing else 'trial'} runs already; X ends it")
            return
        self.loop.resume()
        self._end_slow_once()
        if self._trial is None:
            self._trial = trial
            self._findings = trial.run(self)
            self.note(trying=True, trial=None)

    @wish
    def end_trial(self, name: str) -> None:
        """End this trial, if it runs: requests that are not the trial's go on."""
        if self._trial and self._trial.found.name == name:
            self._end_trial()

    def _go_on_trying(self) -> None:
        if self._trial is None:
            return
        try:
            finding = next(self._findings, None)
        except (ValueError, QueueFull) as error:  # the trial cannot be made here
            self.fault(str(error))
            self._end_trial()
        except BaseException:  # a mistake in the trial: the loop tells of it
            self._end_trial()
            raise
        else:
            if finding is None:
                self._end_trial()
            else:
                self.note(trial=finding)

    def _end_trial(self) -> None:
        trial = self._trial
        self._trial = None
        if trial:
            self.note(trying=False)
            # The load goes on, and makes up for nothing
            self._next_arrival = max(self._next_arrival, self.clock())
            self._findings.close()
            for request in self._tried.intersection(self.own):
                self.own[request].cancel()
            self._tried.clear()
