"""All knowledge of the screen: the newest view, past steps and requests, and the user's
selection.

The problem. A view tells the news since the last view. The screen draws more: charts of the last
seconds, a timeline from the first step on, requests from long ago.

What this file keeps. The picture on the screen depends only on `State` and on the size. Nothing
here refers to an engine or an array. So the engine never waits for the screen, and every picture
can be tested without a terminal.

Where next: `panes.py`, the drawing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from analysis.step_times import Prices
from runtime.snapshot import Limits, RequestView, SlotView, Snapshot, StepView
from screen.draw.style import EMPTY, FAILED, NAMES, UNSEEN, clean, count
from screen.engine_client import BURST, Fault, Finding, Settings, View, is_mute
from screen.latency_breakdown import Life, life_of
from screen.policy_runs import KNOWN
from screen.stats import Period, Price
from screen.step_columns import Column, column, gap, last_in, merge, said_in, spread
from screen.talk_history import Talks
from server.access_log import Call

# Of the state: all that has to do with one engine's life
OF_A_LIFE = ("history", "requests", "ended", "calls", "owners", "_merged", "periods", "costs")
OF_A_LIFE += ("found", "kept", "glass", "cursor", "opened", "selected", "woke", "hidden")
OF_A_LIFE += ("refused", "gone")


class Telling(NamedTuple):
    """The words of the tour now (`tour.py`)."""

    scene: int  # from 1
    scenes: int
    title: str
    text: str  # the question, or the explanation
    answers: tuple[str, ...] = ()
    asks: bool = False  # waits for an answer
    guess: int | None = None  # from 1
    verdict: str = ""  # the right answer
    pressed: tuple[str, ...] = ()  # keys for the same
    place: str = ""  # the line of code
    hint: str = ""  # the effect of the keys now


@dataclass
class State:
    """Everything for the picture. `absorb` takes in a new view; the other changes are the user's
    choices."""

    model: str = "demo"
    book: str = ""  # whose chapters run; empty: ours
    view: View = field(default_factory=View)
    settings: Settings = field(default_factory=Settings)
    prompts: Sequence[tuple[str, int]] = BURST
    history: list[Column] = field(default_factory=list)  # a column for each step, oldest first
    # By id, from the newest view of each
    requests: dict[int, RequestView] = field(default_factory=dict)
    ended: list[RequestView] = field(default_factory=list)  # in the order of their ends
    # At the door: ended calls, in the order of their ends
    calls: list[Call] = field(default_factory=list)
    refused: int = 0  # so many calls, forgotten ones too
    gone: int = 0  # so many hung up
    faults: list[Fault] = field(default_factory=list)  # all faults so far
    # Of failures in this process: the message, then the place
    tracebacks: list[str] = field(default_factory=list)
    # Slot -> its owner, or its last owner
    owners: dict[int, int] = field(default_factory=dict)
    printed: str = ""  # the last line of a library while loading: a download's progress
    selected: int = 0  # a slot
    cursor: int | None = None  # a step; None: always the newest one
    edge: int = 0  # the index of the newest step in sight when the cursor was set
    zoom: int | None = None  # steps in a column; None: the latest busy period fits
    lower: str = "timeline"  # the pane in sight, if there is room for one only
    opened: int | None = None  # the open request; None: the newest of the ended ones
    found: dict[str, Finding] = field(default_factory=dict)  # by trial: the last finding
    kept: dict[str, Any] = field(default_factory=dict)  # by page: its own notes
    # By request and number of tokens: the newest token, and the likeliest others
    glass: dict[tuple[int, int], tuple[tuple[str, float, bool], ...]] = field(default_factory=dict)
    talks: Talks = field(default_factory=Talks)
    talking: bool = False  # the open conversation stands in the place of the panes
    typing: bool = False  # the prompt box has the keyboard
    has_typed: bool = False  # the prompt box has had the keyboard
    # Wishes while the model loads: prompts, and commands for the engine
    waiting: list[str] = field(default_factory=list)
    has_chosen: bool = False  # the pane where room is short; else the pane follows the keys
    said: str = ""  # the answer of the last command, for a while
    tour: Telling | None = None  # None: no tour
    offers_tour: bool = False  # neither taken nor declined so far
    hidden: int = 0  # requests up to this one are not taken in, nor their steps
    woke: int = 0  # index of the first step of the latest busy period
    # Busy periods, the newest last
    periods: deque[Period] = field(default_factory=lambda: deque(maxlen=100))
    # By rows: seconds of the last steps with nothing but decode
    costs: dict[int, deque[float]] = field(default_factory=dict)
    _tries: bool = False  # the latest busy period belongs to the running trial
    _delivered: int = 0  # the engine's count of tokens at the last look
    # By zoom: the full columns of the history
    _merged: dict[int, list[Column]] = field(default_factory=dict)

    KEPT = 20_000  # so many steps are kept
    REMEMBERED = 2_000  # so many ended requests can still be opened
    GLASS = 1_000  # so many tokens are kept under glass
    TEXTS = 2**25  # with texts of so many bytes at most

    def absorb(self, view: View) -> None:
        before = self.view
        self.view = view
        self.model = view.model or self.model
        news = view.faults[len(before.faults) :]
        self.faults += news
        for fault in news:
            self.talks.refuse(fault.question, "" if fault.prompt else fault.message)
        self._tries = self._tries and view.trying
        if view.trial is not None and view.trial is not before.trial:
            self.found[view.trial.name] = view.trial
        # Another engine begins, or the same one is told once more from the start.
        begins = view.life != before.life
        if begins:
            self._forget()
            if before.life:
                self.talks.lose()
        if view.door:
            self._absorb_calls(view.door.ended)
        if view.engine is not None:
            if before.engine is None:
                self._meet(view.engine.limits)
            news = without(view.engine, self.hidden)
            self._absorb_requests(news, begins)
            self.talks.absorb(view.answers, self.requests)
            self.select_talk()
            self._tell_unseen(view)
            self._absorb_steps(news, view.busy)
            self._shorten_history()

    def _meet(self, limits: Limits) -> None:
        """A user's choices from before the engine was known, as far as the engine can fulfil
        them."""
        self.select(self.selected)
        most = min(self.settings.max_tokens, limits.max_len)
        self.settings = self.settings._replace(max_tokens=most)

    def select_talk(self) -> None:
        """Select the slot of the open conversation, once for each turn."""
        turns = self.talks.open.turns
        if not (turns and self.talking) or turns[-1].number == self.talks.led:
            return
        request = turns[-1].request
        if request and request.slot is not None:
            self.talks.led = turns[-1].number
            self.select(request.slot)

    def select(self, slot: int) -> None:
        """Select a slot; behind the last one comes the first."""
        self.selected = slot
        if self.view.engine:
            self.selected %= len(self.view.engine.slots)

    def begin_anew(self) -> None:
        """Forget all requests so far. Their late news is not taken in."""
        newest = max(self.requests, default=0)
        self._forget()
        self.hidden = newest

    def _forget(self) -> None:
        fresh = State()
        for name in OF_A_LIFE:
            setattr(self, name, getattr(fresh, name))

    def _absorb_calls(self, ended: Sequence[Call]) -> None:
        self.calls = [*self.calls, *ended][-self.REMEMBERED :]
        self.refused += sum(call.is_refused for call in ended)
        self.gone += sum(call.hung_up for call in ended)

    def _absorb_requests(self, news: Snapshot, begins: bool) -> None:
        self.faults += [Fault(clean(fault)) for fault in news.faults]
        for r in (*news.requests, *news.ended):
            self.requests[r.id] = r
            if r.glass:
                self.glass[r.id, r.metrics.output_tokens] = r.glass
        for old in [*self.glass][: -self.GLASS]:
            del self.glass[old]
        self.ended += news.ended
        if not begins:
            failed = [r for r in news.ended if r.error and not is_mute(r)]
            self.faults += [Fault(f"r{r.id} failed: {clean(r.error)}") for r in failed]
        if news.ended:
            self._forget_requests()

    def _forget_requests(self) -> None:
        """Forget the oldest ended ones, if there are too many, or if the texts take too much."""
        taken = list(accumulate(request.size for request in reversed(self.ended)))
        kept = min(self.REMEMBERED, max(1, bisect_right(taken, self.TEXTS)))
        for request in self.ended[:-kept]:
            self.requests.pop(request.id, None)
        del self.ended[:-kept]

    def _tell_unseen(self, view: View) -> None:
        unseen = {
            "step went by": view.engine.missed,
            "request ended": view.engine.missed_ends,
            "client left": view.door.missed if view.door else 0,
        }
        for what, many in unseen.items():
            if many:
                thing, _, went = what.partition(" ")
                said = f"{count(many, thing)} {went} unseen: the screen looked away for too long"
                self.faults.append(Fault(said))

    def _absorb_steps(self, news: Snapshot, busy: bool) -> None:
        if news.missed and self.history:
            lost = news.output_tokens - self._delivered - sum(step.tokens for step in news.steps)
            first, last = news.steps[0], self.history[-1]
            self.history.append(gap(UNSEEN, first, last, news.missed, max(0, lost)))
            self._count(self.history[-1])
        # These are gone: requests without an end, older than every open one
        if news.missed_ends:
            there = [r.id for r in news.requests] + [id for id, _ in news.queue]
            oldest = min(there, default=math.inf)
            self.requests = {id: r for id, r in self.requests.items() if r.reason or id >= oldest}
            if self.periods:
                self.periods[-1].requests += news.missed_ends
        ended = deque(news.ended)
        for step in news.steps:
            self._add(step, ended)
        self._delivered = news.output_tokens
        self._end_period(ended, not busy)
        self.owners |= {slot.slot: slot.request for slot in news.slots if slot.request is not None}

    def _shorten_history(self) -> None:
        if len(self.history) > self.KEPT:
            gone = self.KEPT // 4
            del self.history[:gone]
            self.woke = max(0, self.woke - gone)
            self._merged.clear()

    def _end_period(self, ended: deque[RequestView], over: bool, until: float = math.inf) -> None:
        """Requests with an end before this moment belong to the latest busy period."""
        period = self.periods[-1] if self.periods else Period(math.inf)
        while ended and ended[0].ended <= until:
            request = ended.popleft()
            # Else the request was cancelled before anything ran
            if not period.over or request.arrived < period.ended:
                period.take_request(request)
        period.over = period.over or over

    def _count(self, step: Column) -> None:
        if not self.periods:
            self.periods.append(Period(step.began))
        self.periods[-1].take_step(step)

    def _add(self, step: StepView, ended: deque[RequestView]) -> None:
        last = self.history[-1] if self.history else None
        # A number is left out where a step has failed
        if last and step.step > last.step + 1:
            last = gap(FAILED, step, last._replace(rows=(0,) * len(last.rows)))
            self.history.append(last)
        new = column(step, self.view.engine.limits.slots, last)
        working = {
            slot: cell.request for slot, cell in enumerate(new.cells) if cell.request is not None
        }
        if step.admitted and len(step.admitted) == len(working):
            self._begin_period(new, last, working.values(), ended)
        self.history.append(new)
        self._count(new)
        if step.decode and not step.prefill and not step.drafts:
            self.costs.setdefault(len(step.decode), deque(maxlen=256)).append(step.seconds)
        self.owners |= working

    def _begin_period(
        self, new: Column, last: Column | None, working: Iterable[int], ended: deque[RequestView]
    ) -> None:
        """A busy period starts at a step in which every working request was admitted after the
        previous step began.

        To look for an idle moment is not enough. A race has none: the next leg is fired while the
        last ghost of the leg before is still in flight.
        """
        before = last.view.began if last else -math.inf
        came = [self.requests[id].arrived for id in working if id in self.requests]
        if not came or min(came) <= before:
            return
        self.woke = len(self.history)
        # A trial is one period, although the engine is idle now and then. Legs of a race are two.
        if not self._tries:
            self._end_period(ended, True, new.view.began)
            self.periods.append(Period(new.began))
        self._tries = self.view.trying and not self.view.racing

    @property
    def leads(self) -> bool:
        """Does the prompt box lead to the conversation? With a chat model of the user's own."""
        view = self.view
        return view.stage == "ready" and view.speaks and not view.watches and self.model != "demo"

    @property
    def hurries(self) -> bool:
        """Whether steps come too fast for the eye. Then some panes are painted less often."""
        return self.view.busy and not (self.view.paused or self.view.slow)

    def tokens_per_s(self) -> float:
        """Over the last second of the engine's clock, or since the latest busy period began, if
        the time is shorter."""
        if not self.history:
            return 0.0
        now = min(self.view.engine.now, self.moment)
        began = max(self.history[self.first].began, now - 1)
        tokens = spread(self.history, began, now, lambda column: column.tokens)
        return tokens / max(1e-3, now - began)

    def columns(self, zoom: int) -> list[Column]:
        """The history with `zoom` steps in a column. A column is merged once, when all of its steps
        are there."""
        if zoom == 1:
            return self.history
        merged = self._merged.setdefault(zoom, [])
        done = len(merged) * zoom
        while done + zoom <= len(self.history):
            merged.append(merge(self.history[done : done + zoom]))
            done += zoom
        rest = self.history[done:]
        return [*merged, merge(rest)] if rest else merged

    def zoom_for(self, width: int) -> int:
        """Steps in a column: as chosen; else the latest busy period fits, with 8 at most."""
        fitting = (zoom for zoom in (1, 2, 4) if len(self.history) - self.woke <= zoom * width)
        return self.zoom or next(fitting, 8)

    def window(self, width: int) -> tuple[int, list[Column], int | None]:
        """Zoom, the columns in sight, and the number of the cursor's column."""
        zoom = self.zoom_for(width)
        columns = self.columns(zoom)
        if self.cursor is None:
            return zoom, columns[-width:], None
        at = self.index_of(self.cursor) // zoom
        stop = max(min(self.edge // zoom + 1, at + width), at + 1, min(width, len(columns)))
        start = max(0, stop - width)
        return zoom, columns[start:stop], at - start

    def index_of(self, step: int) -> int:
        """A step's place in the history."""
        return min(bisect_left(self.history, step, key=lambda c: c.step), len(self.history) - 1)

    def between(self, first: float, stop: float) -> list[Column]:
        """The steps from `first` on, up to the one before `stop`."""
        ends = (bisect_left(self.history, step, key=lambda c: c.step) for step in (first, stop))
        return self.history[slice(*ends)]

    def move(self, steps: int) -> None:
        """Move the cursor back or forth. Beyond the newest step there is no cursor, and the newest
        is followed."""
        if self.history:
            self.look_at(max(0, self.at + steps))

    def look_at(self, index: int) -> None:
        if self.cursor is None:
            self.edge = len(self.history) - 1
        self.cursor = self.history[index].step if index < len(self.history) else None
        self.edge = max(self.edge, index)

    @property
    def at(self) -> int:
        """The place of the step in the pane "Step": the cursor's, or the newest. -1: no step has
        run yet."""
        return len(self.history) - 1 if self.cursor is None else self.index_of(self.cursor)

    @property
    def first(self) -> int:
        """Where the story of the step begins: the latest busy period; for an earlier step, the
        oldest step in memory."""
        return self.woke if self.woke <= self.at else 0

    @property
    def here(self) -> Column | None:
        return self.history[self.at] if self.history else None

    @property
    def step(self) -> StepView | None:
        return self.here.view if self.here else None

    # --- at the cursor's step; without a cursor, now

    @property
    def past(self) -> Column | None:
        """The cursor's step."""
        return None if self.cursor is None else self.here

    @property
    def moment(self) -> float:
        """The end of the cursor's step; without a cursor, the end of time."""
        return self.past.ended if self.past else math.inf

    @property
    def finished(self) -> int:
        """How many requests had ended, the hidden ones apart."""
        moment = self.moment
        later = sum(r.ended > moment for r in self.ended)
        return max(0, self.view.engine.finished - self.hidden - later)

    def titled(self, title: str) -> str:
        """The title of a pane: such a pane goes back in time with the cursor."""
        return title if self.cursor is None else f"{title} at step {self.cursor:,}"

    def slots(self) -> Sequence[SlotView]:
        """The memory of a free slot is not known for the past."""
        past = self.past
        if past is None:
            return self.view.engine.slots
        out = []
        for slot, (kind, request) in enumerate(past.cells):
            rows = prompt = past.rows[slot]
            reused = 0
            if request in self.requests:
                prompt = self.requests[request].metrics.prompt_tokens
                reused = self.requests[request].metrics.cached_tokens
            said = said_in(rows, prompt)
            phase = "free" if kind == EMPTY else NAMES[kind]
            out.append(SlotView(slot, phase, request, rows, prompt, said, min(reused, rows), 0))
        return out

    def line(self) -> tuple[int, Sequence[tuple[int, float]]]:
        """How many requests wait, and (request, seconds waited) of those in front."""
        past = self.past
        if past is None:
            return self.view.engine.waiting, self.view.engine.queue
        planned = past.view.began
        waits = []
        for id, r in sorted(self.requests.items()):
            left = r.ended if r.admitted is None else r.admitted
            if r.arrived <= planned and (left is None or left > planned + 1e-9):
                waits.append((id, past.ended - r.arrived))
        return past.view.waiting, waits[: past.view.waiting]

    def then(self, request: RequestView) -> RequestView:
        """A request in the past, with the text of its tokens so far."""
        m = request.metrics
        past = self.past
        if past is None or (request.ended or math.inf) <= past.ended:
            return request
        said = sum(slot.output_tokens for slot in self.slots() if slot.request == request.id)
        first = None if m.ttft_s is None or not said else m.ttft_s
        lasted = past.ended - request.arrived - (first or 0.0)
        rate = (said - 1) / lasted if said > 1 and lasted > 0 else None
        text = request.text[: sum(request.lengths[:said])]
        metrics = replace(m, ttft_s=first, tokens_per_s=rate, output_tokens=said)
        glass = self.glass.get((request.id, said), ())
        request = replace(request, metrics=metrics, text=text, glass=glass)
        return replace(request, reason=None, error=None, ended=None)

    def owner(self, slot: int) -> RequestView | None:
        """The owner of a slot, or the last owner."""
        if self.cursor is None:
            return self.requests.get(self.owners.get(slot))
        step = last_in(self.history[: self.at + 1], slot)
        request = step and self.requests.get(step.cells[slot].request)
        return request and self.then(request)

    def limits_at(self, step: int) -> Limits:
        """The limits of this step's plan: the budget can be turned."""
        held = [limits for first, limits in self.view.turns if first <= step]
        return [self.view.made_with, *held][-1]

    def limits_of(self, first: int, last: int) -> Limits:
        """The limits of all these steps. ValueError if the budget was turned in between."""
        for step, limits in self.view.turns:
            if first < step <= last:
                raise ValueError(
                    f"the budget was turned to {limits.budget:,} in step {step:,}: a replay has only one"
                )
        return self.limits_at(first)

    # --- from a step to a request, and back

    @property
    def open(self) -> RequestView | None:
        """The user's open request; else the newest of the ended ones."""
        return self.requests.get(self.opened) or (self.ended[-1] if self.ended else None)

    def steps_of(self, request: RequestView) -> list[int]:
        """The places in the history of the steps in which a request was in its slot."""
        if request.slot is None or request.admitted is None:
            return []
        came = request.admitted - 1e-9
        first = bisect_left(self.history, came, key=lambda column: column.view.began)
        last = bisect_left(self.history, request.ended or math.inf, key=lambda column: column.began)
        mine = range(first, min(last + 1, len(self.history)))
        return [i for i in mine if self.history[i].cells[request.slot].request == request.id]

    def phase(self, slot: SlotView) -> str:
        """The work of the newest step for the slot's request, as in Timeline and Step.

        The slot's own phase is the next work: after the last chunk of a prompt, decode.
        """
        if self.past or not self.history or slot.request is None:
            return slot.phase
        kind, request = self.history[-1].cells[slot.slot]
        return NAMES[kind] if request == slot.request else slot.phase


def without(news: Snapshot, hidden: int) -> Snapshot:
    """The news without requests up to `hidden`, and without steps of no other request."""
    if not hidden:
        return news
    steps = []
    for step in news.steps:
        if any(request > hidden for _, request, *_ in (*step.prefill, *step.decode)):
            steps.append(step)
    requests = [r for r in news.requests if r.id > hidden]
    ended = [r for r in news.ended if r.id > hidden]
    return replace(news, requests=requests, ended=ended, steps=steps)


def prompt_of(request: RequestView) -> str:
    return clean(request.prompt)


def client_of(request: RequestView) -> str:
    """The client at the door; empty for a request from a screen."""
    return clean(request.client)


# --- prices of steps ----------------------------------------------------------------------------


def prices(state: State, one_in: int = 20, step: int | None = None) -> Prices:
    """Made new from all steps in memory: the clock of a race, and of a comparison.

    `step`: from steps under the limits of this one; None: of the newest. With another budget chunks
    have another width, and another price.
    """
    columns = state.history[-KNOWN:]
    if state.view.turns and columns:
        limits = state.limits_at(columns[-1].step if step is None else step)
        columns = [column for column in columns if state.limits_at(column.step) == limits]
    return Prices((column.view for column in columns), one_in)


def price_in(state: State) -> Callable[[Period], Price | None]:
    """Prices for a period: under another budget, chunks have another price."""
    known: dict[Limits, Prices] = {}

    def of(period: Period) -> Price | None:
        try:
            limits = state.limits_of(period.first_step, period.last_step)
        except ValueError:
            return None
        if limits not in known:
            known[limits] = prices(state, step=period.first_step)
        return known[limits].of

    return of


def life_in(state: State, request: RequestView) -> Life:
    """A request's life: each step is divided by the usual times of the parts."""
    steps = state.steps_of(request)
    step = state.history[steps[-1]].step if steps else None
    usual, now = prices(state, one_in=2, step=step), state.view.engine.now
    return life_of(request, state.requests.values(), state.history, usual, now)
