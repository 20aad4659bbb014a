"""The state of the screen: the newest view, past steps and requests, and the user's choices.

Nothing here refers to an engine or an array, so the engine never waits for the screen, and every
page can be tested without a terminal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from engine.server_snapshot import RequestRecord
from engine.snapshot import Limits, RequestView, SlotView, Snapshot, StepView
from screen.busy_period_stats import Period, Price
from screen.chat_history import ChatHistory
from screen.draw.style import FAILED, NAMES, UNSEEN, clean, count
from screen.engine_view import ExperimentRecord, Fault, View
from screen.timeline_columns import Column, column, gap, last_in, merge, said_in, spread
from screen.undisturbed_times import KNOWN, Prices
from screen.workload import BURST, Ask, Settings, is_mute

# Fields that are reset when another engine is watched
OF_AN_ENGINE = ("history", "requests", "ended", "calls", "owners", "_merged", "periods", "costs")
OF_AN_ENGINE += ("records", "kept", "candidates", "cursor", "opened", "selected", "woke", "hidden")
OF_AN_ENGINE += ("refused", "gone", "hung_up", "_inspected")


@dataclass
class State:
    """The state that the screen is drawn from. `absorb` adds a view; the user changes the rest."""

    model: str = "demo"
    view: View = field(default_factory=View)
    settings: Settings = field(default_factory=Settings)
    prompts: Sequence[tuple[str, int]] = BURST
    history: list[Column] = field(default_factory=list)  # a column for each step, oldest first
    # id -> the request in its newest view
    requests: dict[int, RequestView] = field(default_factory=dict)
    ended: list[RequestView] = field(default_factory=list)  # in the order in which they ended
    # Ended HTTP requests, in the order in which they ended
    calls: list[RequestRecord] = field(default_factory=list)
    refused: int = 0  # number of refused HTTP requests
    gone: int = 0  # number of HTTP requests whose client hung up
    hung_up: set[int] = field(default_factory=set)  # engine requests of those clients
    faults: list[Fault] = field(default_factory=list)  # all faults so far
    # formatted tracebacks of failures in this process
    tracebacks: list[str] = field(default_factory=list)
    # slot -> its current or last request
    owners: dict[int, int] = field(default_factory=dict)
    printed: str = ""  # the last line that a library printed while loading
    selected: int = 0  # the selected slot
    cursor: int | None = None  # the selected step; None: always the newest one
    edge: int = 0  # index of the newest visible step when the cursor was set
    zoom: int | None = None  # steps per column; None: fit the latest busy period
    lower: str = "timeline"  # the visible pane, if panes take turns
    opened: int | None = None  # id of the open request; None: the newest ended one
    # experiment -> its last record
    records: dict[str, ExperimentRecord] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # data that pages keep, by page name
    # for the token inspector: (request, number of tokens) -> (text, probability, is allowed)
    candidates: dict[tuple[int, int], tuple[tuple[str, float, bool], ...]] = field(
        default_factory=dict
    )
    chats: ChatHistory = field(default_factory=ChatHistory)
    chatting: bool = False  # the conversation is shown in place of the panes
    typing: bool = False  # the prompt box has the focus
    has_typed: bool = False  # the prompt box has had the focus
    # prompts and commands that wait for the model to load
    waiting: list[str] = field(default_factory=list)
    has_chosen: bool = False  # the user chose `lower`; otherwise it follows the keys
    said: str = ""  # the last command's message, shown for a few seconds
    strip: object | None = None  # what the page with a strip shows; None: no strip
    hints: Sequence[str] = ()  # hints of pages, shown in the timeline before the first step
    offer: str = ""  # text of the offer, until accepted or declined
    hidden: int = 0  # ignore requests up to this one, and their steps
    woke: int = 0  # index of the first step of the latest busy period
    # Busy periods, the newest last
    periods: deque[Period] = field(default_factory=lambda: deque(maxlen=100))
    # rows -> seconds of recent steps that only decoded
    costs: dict[int, deque[float]] = field(default_factory=dict)
    _in_experiment: bool = False  # the latest busy period belongs to the running experiment
    _inspected: int = 0  # the request with a schema whose slot was selected last
    _delivered: int = 0  # the engine's token count in the last view
    # zoom -> the complete columns of the history
    _merged: dict[int, list[Column]] = field(default_factory=dict)

    KEPT = 20_000  # steps in the history
    REMEMBERED = 2_000  # ended requests that can be opened
    CANDIDATES = 1_000  # tokens for the token inspector
    TEXTS = 2**25  # bytes of ended requests' texts

    def absorb(self, view: View) -> None:
        before = self.view
        self.view = view
        self.model = view.model or self.model
        news = view.faults[len(before.faults) :]
        self.faults += news
        for fault in news:
            self.chats.refuse(fault.question, "" if fault.prompt else fault.message)
        self._in_experiment = self._in_experiment and view.experimenting
        if view.record is not None and view.record is not before.record:
            self.records[view.record.name] = view.record
        # A new epoch: another engine, or the same one restarted
        begins = view.epoch != before.epoch
        if begins:
            self._forget()
            if before.epoch:
                self.chats.lose()
        if view.server:
            self._absorb_calls(view.server.ended)
        if view.engine is not None:
            if before.engine is None:
                self._meet(view.engine.limits)
            news = without(view.engine, self.hidden)
            self._absorb_requests(news, begins)
            self.chats.absorb(view.answers, self.requests)
            self.select_chat()
            self._select_inspected()
            self._report_unseen(view)
            self._absorb_steps(news, view.busy)
            self._shorten_history()

    def _meet(self, limits: Limits) -> None:
        """Limit choices that the user made before the engine was known."""
        self.select(self.selected)
        most = min(self.settings.max_tokens, limits.max_len)
        self.settings = self.settings._replace(max_tokens=most)

    def select_chat(self) -> None:
        """Select the slot of the open conversation, once per turn."""
        turns = self.chats.open.turns
        if not (turns and self.chatting) or turns[-1].number == self.chats.led:
            return
        request = turns[-1].request
        if request and request.slot is not None:
            self.chats.led = turns[-1].number
            self.select(request.slot)

    def _select_inspected(self) -> None:
        """Select the slot of the inspected request, once."""
        request = self.inspected
        if request and request.slot is not None and request.id > self._inspected:
            self._inspected = request.id
            self.select(request.slot)

    def select(self, slot: int) -> None:
        """Select a slot; numbers beyond the last one wrap around."""
        self.selected = slot
        if self.view.engine:
            self.selected %= len(self.view.engine.slots)

    def begin_anew(self) -> None:
        """Forget all requests so far, and ignore their later events."""
        newest = max(self.requests, default=0)
        self._forget()
        self.hidden = newest

    def _forget(self) -> None:
        fresh = State()
        for name in OF_AN_ENGINE:
            setattr(self, name, getattr(fresh, name))

    def _absorb_calls(self, ended: Sequence[RequestRecord]) -> None:
        self.calls = [*self.calls, *ended][-self.REMEMBERED :]
        self.refused += sum(call.is_refused for call in ended)
        hang_ups = [call for call in ended if call.hung_up]
        self.gone += len(hang_ups)
        self.hung_up.update(id for call in hang_ups for id in call.requests)

    def _absorb_requests(self, news: Snapshot, begins: bool) -> None:
        self.faults += [Fault(clean(fault)) for fault in news.faults]
        for r in (*news.requests, *news.ended):
            self.requests[r.id] = r
            if r.candidates:
                self.candidates[r.id, r.metrics.output_tokens] = r.candidates
        for old in [*self.candidates][: -self.CANDIDATES]:
            del self.candidates[old]
        self.ended += news.ended
        if not begins:
            failed = [r for r in news.ended if r.error and not is_mute(r)]
            self.faults += [Fault(f"r{r.id} failed: {clean(r.error)}") for r in failed]
        if news.ended:
            self._forget_requests()

    def _forget_requests(self) -> None:
        """Forget the oldest ended requests if there are too many or their texts are too large."""
        taken = list(accumulate(request.size for request in reversed(self.ended)))
        kept = min(self.REMEMBERED, max(1, bisect_right(taken, self.TEXTS)))
        for request in self.ended[:-kept]:
            self.requests.pop(request.id, None)
            self.hung_up.discard(request.id)
        del self.ended[:-kept]

    def _report_unseen(self, view: View) -> None:
        unseen = {
            "step went by": view.engine.missed,
            "request ended": view.engine.missed_ends,
            "client left": view.server.missed if view.server else 0,
        }
        for what, many in unseen.items():
            if many:
                thing, _, went = what.partition(" ")
                said = f"{count(many, thing)} {went} unseen: the screen looked away for too long"
                self.faults.append(Fault(said))

    def _absorb_steps(self, news: Snapshot, busy: bool) -> None:
        if news.missed and self.history:
            lost = news.output_tokens - self._delivered - sum(step.tokens for step in news.steps)
            last = self.history[-1]
            self.history.append(gap(UNSEEN, news.steps[0], last, news.missed, max(0, lost)))
            self._count(self.history[-1])
        # Open requests that are older than every request of the engine have ended unseen
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
        """Add the requests that ended up to `until` to the latest busy period; end it if `over`."""
        period = self.periods[-1] if self.periods else Period(math.inf)
        while ended and ended[0].ended <= until:
            request = ended.popleft()
            # A request that arrived after the period was cancelled before any step ran
            if not period.over or request.arrived < period.ended:
                period.take_request(request)
        period.over = period.over or over

    def _count(self, step: Column) -> None:
        if not self.periods:
            self.periods.append(Period(step.began))
        self.periods[-1].take_step(step)

    def _add(self, step: StepView, ended: deque[RequestView]) -> None:
        last = self.history[-1] if self.history else None
        # A failed step leaves a gap in the numbers
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
        """Begin a busy period if every working request arrived after the previous step began.

        No idle time is required before it: the second part of an experiment is fired while the last
        ghost of the first is still in flight.
        """
        before = last.view.began if last else -math.inf
        came = [self.requests[id].arrived for id in working if id in self.requests]
        if not came or min(came) <= before:
            return
        self.woke = len(self.history)
        # Most experiments are one period even if the engine is idle in between
        if not self._in_experiment:
            self._end_period(ended, True, new.view.began)
            self.periods.append(Period(new.began))
        experiment = self.view.experiment
        self._in_experiment = bool(experiment and experiment.is_one_run)

    @property
    def leads(self) -> bool:
        """True if a prompt opens the conversation: with a chat model other than the demo."""
        view = self.view
        return view.stage == "ready" and view.has_chat and not view.watches and self.model != "demo"

    @property
    def inspected(self) -> RequestView | None:
        """The newest open request of this screen with a schema, for the token inspector."""
        asked = (r for r in self.requests.values() if isinstance(r.origin, Ask) and r.origin.schema)
        return max((r for r in asked if r.reason is None), key=lambda r: r.id, default=None)

    @property
    def hurries(self) -> bool:
        """True if steps are too fast to follow, so that some panes are painted less often."""
        return self.view.busy and not (self.view.paused or self.view.slow)

    def tokens_per_s(self) -> float:
        """Return output tokens/s over the last second, or since the latest busy period began."""
        if not self.history:
            return 0.0
        now = min(self.view.engine.now, self.moment)
        began = max(self.history[self.first].began, now - 1)
        tokens = spread(self.history, began, now, lambda column: column.tokens)
        return tokens / max(1e-3, now - began)

    def columns(self, zoom: int) -> list[Column]:
        """Return the history with `zoom` steps per column. Complete columns are cached."""
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
        """Return the steps per column: the user's choice, or up to 8 to fit the latest busy
        period."""
        fitting = (zoom for zoom in (1, 2, 4) if len(self.history) - self.woke <= zoom * width)
        return self.zoom or next(fitting, 8)

    def window(self, width: int) -> tuple[int, list[Column], int | None]:
        """Return the zoom, the visible columns, and the index of the cursor's column."""
        zoom = self.zoom_for(width)
        columns = self.columns(zoom)
        if self.cursor is None:
            return zoom, columns[-width:], None
        at = self.index_of(self.cursor) // zoom
        stop = max(min(self.edge // zoom + 1, at + width), at + 1, min(width, len(columns)))
        start = max(0, stop - width)
        return zoom, columns[start:stop], at - start

    def index_of(self, step: int) -> int:
        """Return a step's index in the history."""
        return min(bisect_left(self.history, step, key=lambda c: c.step), len(self.history) - 1)

    def between(self, first: float, stop: float) -> list[Column]:
        """Return the steps from `first` to `stop`, exclusive."""
        ends = (bisect_left(self.history, step, key=lambda c: c.step) for step in (first, stop))
        return self.history[slice(*ends)]

    def move(self, steps: int) -> None:
        """Move the cursor. Past the newest step it is removed, and the screen follows it."""
        if self.history:
            self.look_at(max(0, self.at + steps))

    def look_at(self, index: int) -> None:
        if self.cursor is None:
            self.edge = len(self.history) - 1
        self.cursor = self.history[index].step if index < len(self.history) else None
        self.edge = max(self.edge, index)

    @property
    def at(self) -> int:
        """Index of the cursor's step, or of the newest; -1 if no step has run yet."""
        return len(self.history) - 1 if self.cursor is None else self.index_of(self.cursor)

    @property
    def first(self) -> int:
        """Index where the latest busy period begins; 0 if the cursor is before it."""
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
        """The step under the cursor, or None."""
        return None if self.cursor is None else self.here

    @property
    def moment(self) -> float:
        """The end of the cursor's step; without a cursor, infinity."""
        return self.past.ended if self.past else math.inf

    @property
    def finished(self) -> int:
        """The number of requests that had ended by then, excluding hidden ones."""
        moment = self.moment
        later = sum(r.ended > moment for r in self.ended)
        return max(0, self.view.engine.finished - self.hidden - later)

    def titled(self, title: str) -> str:
        """Return the title of a pane that goes back in time with the cursor."""
        return title if self.cursor is None else f"{title} at step {self.cursor:,}"

    def slots(self) -> Sequence[SlotView]:
        """Return the slots at the cursor's step. The cached rows of free slots are not recorded."""
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
            out.append(
                SlotView(slot, NAMES[kind], request, rows, prompt, said, min(reused, rows), 0)
            )
        return out

    def line(self) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the number of waiting requests, and (request, seconds) for the first ones."""
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
        """Return a request as it was at the cursor, with the text that it had by then."""
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
        candidates = self.candidates.get((request.id, said), ())
        request = replace(request, metrics=metrics, text=text, candidates=candidates)
        return replace(request, reason=None, error=None, ended=None)

    def reason_of(self, request: RequestView) -> str:
        """Return the finish reason; empty while the request is open.

        The engine reports "cancelled" if a client hung up; the screen tells the two apart.
        """
        is_gone = request.reason == "cancelled" and request.id in self.hung_up
        return "hung up" if is_gone else request.reason or ""

    def owner(self, slot: int) -> RequestView | None:
        """Return the current or last request of a slot."""
        if self.cursor is None:
            return self.requests.get(self.owners.get(slot))
        step = last_in(self.history[: self.at + 1], slot)
        request = step and self.requests.get(step.cells[slot].request)
        return request and self.then(request)

    def limits_at(self, step: int) -> Limits:
        """Return the limits that a step was planned under."""
        held = [limits for first, limits in self.view.turns if first <= step]
        return [self.view.made_with, *held][-1]

    def limits_of(self, first: int, last: int) -> Limits:
        """Return the limits of all these steps. Raise ValueError if the budget changed in
        between."""
        for step, limits in self.view.turns:
            if first < step <= last:
                raise ValueError(
                    f"the budget was turned to {limits.budget:,} in step {step:,}: a replay has only one"
                )
        return self.limits_at(first)

    # --- from a step to a request, and back

    @property
    def open(self) -> RequestView | None:
        """The request that the user opened, or the newest ended one."""
        return self.requests.get(self.opened) or (self.ended[-1] if self.ended else None)

    def steps_of(self, request: RequestView) -> list[int]:
        """Return the indices of the steps in which a request was in its slot."""
        if request.slot is None or request.admitted is None:
            return []
        came = request.admitted - 1e-9
        first = bisect_left(self.history, came, key=lambda column: column.view.began)
        last = bisect_left(self.history, request.ended or math.inf, key=lambda column: column.began)
        mine = range(first, min(last + 1, len(self.history)))
        return [i for i in mine if self.history[i].cells[request.slot].request == request.id]

    def phase(self, slot: SlotView) -> str:
        """Return a slot's phase in the newest step, as Timeline and Step show it.

        The slot's own phase is already that of the next step: after a prompt's last chunk it is
        "decode".
        """
        if self.past or not self.history or slot.request is None:
            return slot.phase
        kind, request = self.history[-1].cells[slot.slot]
        return NAMES[kind] if request == slot.request else slot.phase


def without(news: Snapshot, hidden: int) -> Snapshot:
    """Return the news, excluding requests up to `hidden` and steps that served only those."""
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
    """Return the client's name, made printable; empty if it has none."""
    return clean(request.client)


# --- costs of steps -----------------------------------------------------------------------------


def prices(state: State, one_in: int = 20, step: int | None = None) -> Prices:
    """Fit the costs of steps to the history.

    Use only steps with the same limits as `step`, or as the newest one: another budget changes the
    size and the cost of chunks.
    """
    columns = state.history[-KNOWN:]
    if state.view.turns and columns:
        limits = state.limits_at(columns[-1].step if step is None else step)
        columns = [column for column in columns if state.limits_at(column.step) == limits]
    return Prices((column.view for column in columns), one_in)


def price_in(state: State) -> Callable[[Period], Price | None]:
    """Return a function from a period to its cost function, fitted to steps with equal limits."""
    known: dict[Limits, Prices] = {}

    def price(period: Period) -> Price | None:
        try:
            limits = state.limits_of(period.first_step, period.last_step)
        except ValueError:
            return None
        if limits not in known:
            known[limits] = prices(state, step=period.first_step)
        return known[limits].seconds

    return price
