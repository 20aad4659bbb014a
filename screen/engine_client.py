"""The screen's access to an engine: the base of all clients, and the client that owns an engine.

The screen draws ten times a second and never waits for the engine. The engine takes hundreds of
steps a second and never waits for the screen. So they share only two things: a queue of commands
(fire, cancel, pause, another policy), which the engine's loop runs between two steps, and a frozen
`View` for the screen to read, which is published by one assignment.

Only the loop's thread steps or changes the engine.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from base import foreign_modules
from base.error_reports import show_fault
from cli.chat_model import LEAST, Outgrown, outgrown
from engine.cpu_contention import OtherPrograms
from engine.handle import Handle
from engine.loop import Loop, Stopwatch
from policies import POLICIES
from request import QueueFull
from sampling_params import SamplingParams, advised
from screen.draw.style import clean
from screen.engine_view import AnswerRef, ExperimentRecord, Fault, View
from screen.workload import CANDIDATES, Ask

if TYPE_CHECKING:
    from experiments.experiment import Experiment
    from nanobatch import Engine
    from server.app import APIServer

OTHER_RUNS = "another experiment is running, {}; X ends it"
DRAIN_S = 20.0  # seconds for clients' open requests to finish at shutdown


class EngineClient:
    """An engine as the screen sees it, in this process or behind a server's `/watch`.

    `view_since` returns the view with everything new since an earlier one. The program calls
    `start`, `drain` and `stop`; `fire` and `cancel` are for requests. Only an engine in this
    process obeys the other commands. This class holds the part of the view that does not come from
    the engine's snapshot; any thread may update it.
    """

    own: Collection[int]  # open requests of this screen
    asleep = ""  # non-empty if a watched server has to load the model first, which a prompt causes

    def __init__(self) -> None:
        self.posted = 0  # number of commands so far
        self._known = View()  # the view without the engine's snapshot, which `view_since` adds
        self._news = 1
        self._lock = threading.RLock()  # held while the view changes

    @property
    def news(self) -> int:
        """A number that changes whenever there is something new to draw."""
        return self._news

    def update_view(self, **changes) -> None:
        with self._lock:
            self._known = self._known._replace(**changes)
            self._news += 1

    def fault(self, message: str, *more) -> None:
        with self._lock:
            self.update_view(faults=(*self._known.faults, Fault(clean(message), *more)))

    def refuse(self, ask: Ask, error: BaseException | str) -> None:
        """Report that this prompt was not fired."""
        if isinstance(error, Outgrown):
            self.fault(str(error), None, ask.question)
        else:
            self.fault(f"not fired: {error}", ask.prompt, ask.question)

    def watch_model(self, name: str) -> str:
        """Watch another model of a server: the named one, or the next. Return its name."""
        raise ValueError("the server has one model")

    def note_answer(self, ask: Ask, *answer) -> None:
        if ask.question:
            with self._lock:
                self.update_view(answers={**self._known.answers, ask.question: AnswerRef(*answer)})


def between_steps(method: Callable) -> Callable:
    """Make a method queue a command and return at once. The loop runs it between two steps."""

    @wraps(method)
    def post(self: LocalEngineClient, *arguments, **options) -> None:
        def run() -> None:
            try:
                method(self, *arguments, **options)
            finally:  # count a failed command, too, or a script would wait forever
                self.update_view(handled=self._known.handled + 1)

        with self._posting:
            self.posted += 1
            (self.loop.call if self.loop else self._early.append)(run)

    return post


class LocalEngineClient(EngineClient):
    """The client that owns the engine and its loop. Other threads use commands and `view_since`.

    `load` creates the engine. Its arguments are `report`, a callback for the stages of loading, and
    `clock`. `server` accepts requests over HTTP once the model is loaded, under the model's `name`.
    """

    def __init__(
        self, load: Callable[..., Engine], server: APIServer | None = None, name: str = ""
    ):
        super().__init__()
        self.clock = Stopwatch()
        self.engine: Engine | None = None
        self.loop: Loop | None = None
        self.server = server
        self._name = name
        self._posting = threading.Lock()  # held while a command is queued or the loop is created
        self._early: list[Callable[[], None]] = []  # commands posted before the loop was created
        self._stopping = False
        self._load = load
        self._advice: dict[str, float] = {}  # the model's defaults for settings, once it is loaded
        self._loader = threading.Thread(target=self._load_and_start, name="loader", daemon=True)
        # With weak values, a handle is dropped when the engine drops it, at the request's end
        self.own: Mapping[int, Handle] = WeakValueDictionary()
        self.others = OtherPrograms()
        self._dice = random.Random(0)
        self._next_arrival = 0.0
        self._slow_once = False  # end slow motion when the engine is idle
        self._load_prompts: Sequence[Ask] = ()  # the steady load chooses from these
        self._experiment: Experiment | None = None
        self._records: Iterator[ExperimentRecord] = iter(())
        self._experiment_requests: set[int] = set()

    def start(self) -> None:
        self._loader.start()

    def _load_and_start(self) -> None:
        self.load()
        if self.loop and not self._stopping:
            self.loop.start()

    def load(self) -> None:
        try:
            self.engine = self._load(report=self._report, clock=self.clock)
        # A missing backend raises SystemExit
        except BaseException as error:
            # These are a user's mistakes; any other exception gets a traceback
            if not isinstance(error, (SystemExit, ValueError, OSError, RuntimeError)):
                show_fault("loading failed", error)
            said = "" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            self.update_view(stage="failed", error=clean(said))
            return
        gc.collect()
        # Objects from loading live until exit, so keep the collector from scanning them during a
        # step
        gc.freeze()
        with self._posting:
            self.loop = Loop(self.engine, self._between, self.clock)
            for command in self._early:
                self.loop.call(command)
        if self.server:
            self.server.open(self.engine, self.loop, self._name)
        text = self.engine.text
        self._advice = advised(text.folder)
        usual = self._advice["temperature"]
        foreign = foreign_modules.named()
        self.update_view(
            stage="ready", has_chat=text.has_template, temperature=usual, foreign=foreign
        )

    def drain(self) -> None:
        """Stop accepting HTTP requests, and give the open ones `DRAIN_S` to finish.

        A second Ctrl-C cancels them.
        """
        with suppress(KeyboardInterrupt, OSError):
            if self.server and self.loop and any(call.requests for call in self.server.view().open):
                print(
                    "nanobatch: finishing the clients' requests; Ctrl-C stops at once",
                    file=sys.stderr,
                )
            if self.server:
                self.server.drain(DRAIN_S)
        if self.server:
            self.server.close()

    def stop(self, patience: float) -> bool:
        """Stop the loop and close the engine.

        Return False if a download or a long step did not finish in time.
        """
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
        self.update_view(done=(*self._known.done, clean(stage)))

    @property
    def news(self) -> int:
        # Add the server's own count of changes: a refused request never reaches the engine
        return self._news + (self.server.changes if self.server else 0)

    def view_since(self, since: View | None = None) -> View:
        known = self._known
        loop = self.loop
        if self.server:
            seen = since.server.seen if since and since.server else 0
            known = known._replace(server=self.server.view(seen))
        if known.stage != "ready":
            return known
        snapshot = self.engine.snapshot(since.engine if since else None)
        moves = {"paused": loop.paused, "stepping": loop.stepping, "slow": loop.slow}
        moves |= {"others": self.others.used_cores(), "cores": self.others.cores}
        return known._replace(engine=snapshot, **moves)

    def _between(self) -> float | None:
        """Run the steady load and the experiment. Return the seconds until they must run again, or None."""
        if not self.loop.paused or self.loop.stepping:
            self._arrive()
            self._advance_experiment()
        if not self.engine.has_work:
            self._end_slow_once()
        self._news += 1
        if self._experiment and not (self.loop.paused or self.engine.has_work):
            return 0.0  # without work, no step wakes the loop
        if not self._known.load or self.clock.is_stopped:
            return None
        return self._next_arrival - self.clock()

    # --- firing and cancelling

    def tokenize(self, ask: Ask) -> Ask:
        """Tokenize a prompt in the caller's thread, because a chat template may take long.

        Before the model is loaded, do nothing.
        """
        if self.engine is None or ask.read:
            return ask
        text = self.engine.text
        chat = ask.messages and text.has_template
        ids = text.encode_chat(ask.messages) if chat else text.ask(ask.prompt)
        return ask._replace(read=text.encode_prompt(ids)._replace(shown=ask.prompt))

    def _tokenize_all(self, asks: Sequence[Ask]) -> list[Ask]:
        """Tokenize prompts, and stop at the first that cannot be tokenized."""
        found = []
        for ask in asks:
            try:
                found.append(self.tokenize(ask))
            except ValueError as error:
                self.refuse(ask, error)
                break
        return found

    def _fire(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            try:
                handle = self._submit(ask)
            # The prompt does not fit in a slot, or the queue is full
            except (ValueError, RuntimeError) as error:
                self.refuse(ask, error)
                break
            self.note_answer(ask, handle.id)

    def _submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """Submit a prompt with `max_tokens`, or with fewer if the slot has less room."""
        engine = self.engine
        prompt = self.tokenize(ask).read
        tokens = len(prompt.ids)
        left = engine.sched.max_len - tokens
        if left < LEAST and len(ask.messages) > 2 and engine.text.has_template:
            raise Outgrown(outgrown(tokens, engine.sched.max_len))
        if left < 1:
            holds = f"a slot holds {engine.sched.max_len:,}, prompt and answer together"
            raise ValueError(
                f"the prompt has {tokens:,} tokens, but {holds}; shorten it, or raise --max-len"
            )
        form = {"grammar": {"json": ask.schema}, "logprobs": CANDIDATES} if ask.schema else {}
        settings = self._advice | {"max_tokens": min(ask.max_tokens, left), "seed": ask.seed}
        if ask.temperature is not None:
            settings["temperature"] = ask.temperature
        sampling = SamplingParams(**settings, **{"logprobs": ask.logprobs, **form})
        told = {"client": ask.client, "speculate": ask.speculate}
        told["origin"] = ask._replace(messages=(), read=None)
        handle = engine.submit(prompt, sampling, prefix_cache=prefix_cache, **told)
        self.own[handle.id] = handle
        return handle

    def submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """Submit a prompt of the experiment and return its handle. Raise ValueError if it is too
        long.

        `prefix_cache`: whether cached rows of a common prefix may be used.
        """
        return self.keep(self._submit(ask, prefix_cache))

    def keep(self, handle: Handle) -> Handle:
        """Add a request to the experiment, so that it is cancelled when the experiment ends."""
        self.own[handle.id] = handle
        self._experiment_requests.add(handle.id)
        return handle

    _post_fire = between_steps(_fire)

    def fire(self, asks: Sequence[Ask]) -> None:
        self._post_fire(self._tokenize_all(asks))

    @between_steps
    def cancel(self, request: int | None) -> None:
        """Cancel one of this screen's requests; None cancels all and ends the experiment."""
        if request is None:
            self._end_experiment()
        for handle in list(self.own.values()):
            if request in (None, handle.id):
                handle.cancel()

    def set_load(self, rate: float, asks: Sequence[Ask] = ()) -> None:
        self._post_load(rate, self._tokenize_all(asks))

    @between_steps
    def _post_load(self, rate: float, prompts: Sequence[Ask]) -> None:
        self.update_view(load=rate)
        self._load_prompts = prompts
        if rate:
            self._next_arrival = self.clock() + self._dice.expovariate(rate)

    def _arrive(self) -> None:
        """Fire the prompts of the steady load that are due.

        The load is a Poisson process: the gaps between arrivals are exponentially distributed. It
        pauses while an experiment runs.
        """
        rate = self._known.load
        sched = self.engine.sched
        while rate and not self._experiment and self.clock() >= self._next_arrival:
            if len(sched.waiting) >= sched.max_queue:  # otherwise each arrival would report a fault
                self.update_view(load=0.0)
                self.fault(f"the steady load is off: the queue is full ({sched.max_queue:,})")
                return
            self._fire([self._dice.choice(self._load_prompts)])
            self._next_arrival += self._dice.expovariate(rate)

    # --- pausing and stepping

    @between_steps
    def pause(self, paused: bool) -> None:
        (self.loop.pause if paused else self.loop.resume)()

    @between_steps
    def step(self, count: int) -> None:
        """Run this many more steps, then pause."""
        self.loop.step(count)

    @between_steps
    def slow(self, rate: float, once: bool = False) -> None:
        """Limit the steps per second; 0: full speed. `once`: until the engine is idle."""
        self.loop.slow = rate
        self._slow_once = once

    # --- the budget

    @between_steps
    def set_budget(self, budget: int | str | None) -> None:
        """Set the budget of a step.

        None restores the initial one; "-" and "+" halve or double the chunk.
        """
        if self._is_fixed("budget"):
            return
        try:
            self.turn_budget(budget)
        except ValueError as error:  # queued before the limits were known
            self.fault(str(error), f"/budget {budget}")

    def turn_budget(self, budget: int | str | None) -> None:
        """Change the budget now. Call it between steps only, as experiments do.

        The view records the first step with the new limits, because a replay needs the limits of
        its steps.
        """
        now = self.engine.snapshot().limits
        turns = self._known.turns or ((1, now),)
        limits = turns[0][1].adjusted(now, budget)
        if limits == now:
            return
        self.engine.set_budget(limits.budget, limits.chunk)
        first = self.engine.sched.steps + 1
        kept = [turn for turn in turns if turn[0] < first or turn is turns[0]]
        self.update_view(turns=(*kept, (first, limits)))

    def _end_slow_once(self) -> None:
        if self._slow_once:
            self.loop.slow = 0.0
            self._slow_once = False

    # --- policies

    @between_steps
    def switch(self, policy: str) -> None:
        """Change to a policy once the slots are drained; "" changes to the next one."""
        if self._is_fixed("policy"):
            return
        names = [*POLICIES]
        following = names[(names.index(self.next_policy) + 1) % len(names)]
        self.engine.drain(policy or following)

    def _is_fixed(self, setting: str) -> bool:
        """Report a fault and return True if the running experiment forbids the change."""
        why = self._experiment.fixes.get(setting) if self._experiment else None
        if why:
            self.fault(why)
        return bool(why)

    @property
    def next_policy(self) -> str:
        """The current policy, or the one that the slots are being drained for."""
        sched = self.engine.sched
        return (sched.draining_to or sched.policy).name

    # --- experiments

    @between_steps
    def inspect(
        self, page: str, measure: Callable[[Engine], object], off_the_clock: bool = False
    ) -> None:
        """Run `measure` on the engine. The view publishes the result under the page's name.

        `off_the_clock`: first read back the step in flight and stop the clock, so that no request's
        or step's time includes the measurement.
        """
        if off_the_clock:
            self.engine.step(plan=False)
            self.clock.stop()
        self.update_view(inspected={**self._known.inspected, page: measure(self.engine)})

    @between_steps
    def run_experiment(self, experiment: Experiment) -> None:
        """Start an experiment and resume a paused engine.

        If an experiment is already running, it may merge the new one into itself; otherwise the new
        one is refused.

        An experiment is a generator of records. It is resumed between two steps, so it may fire,
        cancel and change settings, which it restores in a `finally`. When it ends, its requests are
        cancelled.
        """
        if self._experiment and not self._experiment.takes_in(experiment):
            self.fault(OTHER_RUNS.format(self._experiment.record.name))
            return
        self.loop.resume()
        self._end_slow_once()
        if self._experiment is None:
            self._experiment = experiment
            self._records = experiment.start(self)
            self.update_view(experimenting=True, record=None)

    @between_steps
    def end_experiment(self, name: str) -> None:
        """End the named experiment if it is running. Other requests continue."""
        if self._experiment and self._experiment.record.name == name:
            self._end_experiment()

    def _advance_experiment(self) -> None:
        if self._experiment is None:
            return
        try:
            record = next(self._records, None)
        except (ValueError, QueueFull) as error:  # the experiment cannot run here
            self.fault(str(error))
            self._end_experiment()
        except BaseException:  # a bug in the experiment: the loop reports it
            self._end_experiment()
            raise
        else:
            if record is None:
                self._end_experiment()
            else:
                self.update_view(record=record)

    def _end_experiment(self) -> None:
        if self._experiment is None:
            return
        self._experiment = None
        self.update_view(experimenting=False)
        # The load resumes without making up for missed arrivals
        self._next_arrival = max(self._next_arrival, self.clock())
        self._records.close()
        for request in self._experiment_requests.intersection(self.own):
            self.own[request].cancel()
        self._experiment_requests.clear()
