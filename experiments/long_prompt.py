"""What does a prompt as long as a slot cost running chats, and what does a step's budget trade off?

A long prompt is prefilled in chunks in the same steps in which the chats decode, so their tokens come later.
Small chunks keep the gaps between tokens short but delay the long prompt. Two keys change the budget while
the experiment runs.

The experiment measures the chats' gaps, submits the long prompt and measures again. The median is shown next
to the maximum, because a single long gap may be caused by another program. Halfway through, a short
prompt arrives, and the steps to both first tokens are counted. Each long prompt begins differently, so
that no rows come from the prefix cache. All changes are undone at the end.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from base.validation import read_whole
from engine.handle import Handle
from engine.snapshot import StepView, percentile
from experiments.experiment import Experiment, disturbed
from experiments.latency_breakdown import work_ends
from request import Request
from screen.draw.canvas import BEYOND, Canvas, Figure
from screen.draw.charts import nice
from screen.draw.slots import fit_slots
from screen.draw.style import GLYPHS, PREFILL, count, in_time, shorten, span
from screen.engine_view import ExperimentRecord
from screen.page import Page
from screen.state import State
from screen.timeline_columns import Column
from screen.workload import Ask

if TYPE_CHECKING:
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

NAME = "long"
ANSWER = 2  # length of a long prompt's answer, which is not used
SHORT = 35  # maximum number of tokens of the short prompt
QUIET = 24  # steps measured before a long prompt
AFTER = 12  # steps drawn after a long prompt
KEPT = 40  # maximum results kept
NOUNS = (
    "hen",
    "fox",
    "cat",
    "dog",
    "bee",
    "girl",
    "boy",
    "lantern",
    "kite",
    "drum",
    "moon",
    "boat",
)
VERBS = ("saw", "found", "liked", "took", "lost", "knew")


def chat(i: int) -> str:
    """Return a prompt that has a long answer."""
    return f"Tell me a long story about a {NOUNS[i % 7]} and a {NOUNS[7 + i // 7 % 5]}."


def long_text(number: int, size: int, ask: Callable[[str], Sequence[int]]) -> str:
    """Return a prompt of complete sentences with at most `size` tokens. It begins with a number, so that
    no two share a prefix. `ask` tokenizes a prompt."""
    dice = random.Random(number)
    said = [f"{number}."]
    for _ in range(size // 5):  # a sentence has five words, so at least five tokens
        said.append(f"The {dice.choice(NOUNS)} {dice.choice(VERBS)} the {dice.choice(NOUNS)}.")

    def text(sentences: int) -> str:
        return " ".join(said[: 1 + sentences])

    counts = range(1, len(said))
    return text(bisect_right(counts, size, key=lambda sentences: len(ask(text(sentences)))))


# --- run ------------------------------------------------------------------------------------------


class LongPrompt(Experiment):
    """Submits long prompts among chats.

    `before`: the record with earlier results. `stays`: continue until the user ends it. `wanted`: the
    budget for each long prompt; None leaves it unchanged.
    """

    what = "long prompt"

    def __init__(self, before: LongPromptRecord, stays: bool, wanted: Sequence[int | None]):
        super().__init__(LongPromptRecord("", before.newest, before.short, before.results[-KEPT:]))
        self.wanted = deque(wanted)
        self._stays = stays
        self._fired = 0  # number of chats submitted
        self._has_company = False  # True: keep all but two slots filled with chats

    def takes_in(self, other: Experiment) -> bool:
        """Take over another experiment's long prompts."""
        is_alike = isinstance(other, LongPrompt)
        if is_alike:
            self.wanted += other.wanted
        return is_alike

    def run(self) -> Iterator[LongPromptRecord]:
        sched = self.engine.sched
        budget = sched.budget
        try:
            if sched.slots < 2:
                raise ValueError(
                    "one slot cannot hold chats and a long prompt; start with --slots 8"
                )
            while self.wanted or self._stays:
                yield from self._gather()
                wanted = self.wanted.popleft()
                if wanted is not None:
                    self.client.turn_budget(wanted)
                yield from self._send_one()
        finally:
            self.client.turn_budget(budget)

    def _gather(self) -> Iterator[LongPromptRecord]:
        """Wait until a long prompt is wanted, chats decode, no prompt is in prefill, and a slot is
        free."""
        sched = self.engine.sched
        while True:
            self._keep_company()
            self._check_open()
            chats = [r for r in sched.running.values() if r.phase == "decode"]
            is_quiet = len(chats) == len(sched.running) and not sched.waiting
            if chats and is_quiet and sched.free and self.wanted:
                return
            words = decoding(len(chats))
            if not sched.free:
                words += "; a long prompt waits until a slot is free"
            elif not is_quiet:
                words += "; their prompts are read"
            yield self.update(now=words)

    def _keep_company(self) -> None:
        """If nothing runs, fill all but two slots with chats and keep them filled. The two free slots
        are for the long and the short prompt."""
        sched = self.engine.sched
        busy = len(sched.running) + len(sched.waiting)
        self._has_company = self._has_company or not busy
        missing = max(1, sched.slots - 2) - busy
        if self._has_company and missing > 0:
            for number in range(self._fired, self._fired + missing):
                self.submit(asked(chat(number), sched.max_len))
            self._fired += missing

    def _check_open(self) -> None:
        """Raise ValueError if the policy blocks free slots while requests run."""
        sched = self.engine.sched
        if not (sched.waiting and sched.free) or sched.draining_to:
            return
        if any(slot.phase == "blocked" for slot in self.engine.snapshot().slots):
            shut = f"{sched.policy.name} blocks free slots while requests run"
            raise ValueError(f"{shut}, so no long prompt is admitted; /policy continuous admits it")

    def _send_one(self) -> Iterator[LongPromptRecord]:
        engine = self.engine
        sched = engine.sched
        prompt = long_text(sched.submitted, sched.max_len - ANSWER, engine.text.ask)
        mark = engine.snapshot()
        while sched.steps < mark.planned + QUIET and sched.running and sched.free:
            yield self.update(now=f"{decoding(len(sched.running))}; the long prompt comes")
        handle = self.submit(asked(prompt, ANSWER))
        self.update(newest=handle.id, short=None)
        short = None
        budgets: list[int] = []
        while handle.finish_reason is None or (short and short.finish_reason is None):
            self._check_open()
            if handle.request.phase != "decode" and sched.budget not in budgets[-1:]:
                budgets.append(sched.budget)
            if short is None and self._has_room_beside(handle.request):
                left = len(handle.request.prompt) - handle.request.prefilled
                text = long_text(sched.submitted, SHORT, engine.text.ask)
                short = self.submit(asked(text, 1))
                self.update(short=short.id)
            yield self.update(now=reading(handle.request))
        result = None
        if handle.tokens:
            steps = engine.snapshot(mark).steps
            result = measured(steps, handle, budgets)
            if result and short:
                result = result._replace(short=counted(steps, handle, short, left))
        if result:
            self.update(results=(*self.record.results, result))
        end = sched.steps + AFTER
        yield self.update(now=decoding(len(sched.running)))
        while sched.steps < end and sched.running:
            yield self.update(now=decoding(len(sched.running)))

    def _has_room_beside(self, request: Request) -> bool:
        """True if half of the long prompt is prefilled and a slot is free for the short one."""
        sched = self.engine.sched
        is_half_read = 2 * request.prefilled >= len(request.prompt)
        has_slot = len(sched.free) > len(sched.waiting)
        return request.phase == "prefill" and is_half_read and has_slot


def asked(prompt: str, most: int) -> Ask:
    return Ask(prompt, most, temperature=0.0, seed=None, speculate=False)


def decoding(chats: int) -> str:
    return f"{chats:,} chats decode" if chats != 1 else "1 chat decodes"


def reading(request: Request) -> str:
    if request.slot is None:
        return f"r{request.id} waits for a slot"
    return f"r{request.id}: {request.prefilled:,} of {len(request.prompt):,} tokens are read"


as_budget = partial(read_whole, "budget", least=1, most=2**31)


def obey(session: Session, rest: str) -> None:
    """Submit a prompt as long as a slot among chats. Numbers are budgets: submit one prompt for
    each."""
    state = session.state
    budgets = [as_budget(word) for word in rest.split()]
    for budget in budgets if state.view.engine else ():  # `run` checks them again
        state.view.made_with.with_budget(budget)
    before = state.records.get(NAME, LongPromptRecord())
    session.run_experiment(LongPrompt(before, session.stays, budgets or [None]))


# --- record ---------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """The time between two tokens of a chat."""

    seconds: float
    steps: int  # number of steps; 1 means a token in each step
    tokens: int  # tokens of the long prompt prefilled in the gap
    cost: int  # all prompt tokens prefilled in the gap


class ShortPrompt(NamedTuple):
    """A short prompt that arrived during the long prompt's prefill. Steps count from its arrival."""

    request: int
    tokens: int
    left: int  # tokens of the long prompt not prefilled yet
    steps: int  # steps to its first token
    long_steps: int  # steps to the long prompt's first token


class LongPromptResult(NamedTuple):
    """One long prompt and its effect on the chats. Seconds are on the engine's clock."""

    request: int
    budgets: tuple[int, ...]  # more than one if the budget changed during prefill
    widest: int  # the largest chunk
    steps: int  # number of steps with a chunk of the long prompt
    ttft: float
    gap: float  # the chats' median gap while a full chunk is prefilled
    longest: float  # the longest gap while a chunk is prefilled
    steps_between: int  # the most steps between two tokens of a chat
    quiet_gap: float  # median gap before the long prompt
    quiet_longest: float  # the longest gap before the long prompt
    short: ShortPrompt | None = None  # the short prompt, if it was answered

    @property
    def budget(self) -> str:
        return "→".join(f"{budget:,}" for budget in self.budgets[-2:])


@dataclass(frozen=True)
class LongPromptRecord(ExperimentRecord):
    """The results so far and the current state."""

    name = NAME
    now: str = ""  # description of the current state
    newest: int | None = None  # the newest long prompt, finished or not
    short: int | None = None  # the newest short prompt
    results: tuple[LongPromptResult, ...] = ()

    @property
    def so_far(self) -> str:
        return self.now


def read_of(step: StepView, request: int) -> int:
    """Return how many tokens of this prompt a step prefills."""
    return sum(stop - start for _, id, start, stop in step.prefill if id == request)


def gaps_of(steps: Sequence[StepView], long: int | None) -> Iterator[tuple[int, int, Gap]]:
    """Yield the gaps of all chats, each with the index of its last step and the slot."""
    newest: dict[int, int] = {}  # chat -> index of the step of its newest token
    for i, step in enumerate(steps):
        for slot, chat in step.decode:
            if chat == long or slot in step.ghosts:
                continue
            if chat in newest:
                first = newest[chat]
                began = steps[first].ended
                # A step's tokens may be read after the next step's work is done, hence `i + 2`
                chunks = [
                    other
                    for other in steps[first : i + 2]
                    if read_of(other, long) and began < work_ends(other) <= step.ended
                ]
                gap = Gap(
                    step.ended - began,
                    steps=step.step - steps[first].step,
                    tokens=sum(read_of(other, long) for other in chunks),
                    cost=sum(other.prompt_tokens for other in chunks),
                )
                yield i, slot, gap
            newest[chat] = i


def measured(
    steps: Sequence[StepView], handle: Handle, budgets: Sequence[int]
) -> LongPromptResult | None:
    """Measure the effect of a long prompt. Return None if no chat decoded before or during its prefill."""
    reads = [step for step in steps if read_of(step, handle.id)]
    quiet: list[Gap] = []
    disturbed: list[Gap] = []
    for i, _, gap in gaps_of(steps, handle.id):
        if gap.tokens:
            disturbed.append(gap)
        elif steps[i].ended <= reads[0].began and not steps[i].prefill:
            quiet.append(gap)
    if not quiet or not disturbed:
        return None
    # Leave out a short last chunk: its gap would be the median if there are only two
    dearest = max(gap.cost for gap in disturbed)
    whole = [gap.seconds for gap in disturbed if 2 * gap.cost >= dearest]
    return LongPromptResult(
        request=handle.id,
        budgets=tuple(budgets),
        widest=max(read_of(step, handle.id) for step in reads),
        steps=len(reads),
        ttft=handle.metrics.ttft_s,
        gap=percentile(whole, 0.5),
        longest=max(disturbed).seconds,
        steps_between=max(gap.steps for gap in disturbed),
        quiet_gap=percentile((gap.seconds for gap in quiet), 0.5),
        quiet_longest=max(quiet).seconds,
    )


def counted(
    steps: Sequence[StepView], long: Handle, short: Handle, left: int
) -> ShortPrompt | None:
    """Count the steps from the arrival of a short prompt to both first tokens. Return None if it was
    cancelled or its steps are no longer known."""
    last = {
        handle: max((step.step for step in steps if read_of(step, handle.id)), default=0)
        for handle in (long, short)
    }
    if not short.tokens or not last[short]:
        return None
    came = short.request.queued.arrival_step
    return ShortPrompt(
        short.id,
        tokens=len(short.request.prompt),
        left=left,
        steps=last[short] - came,
        long_steps=last[long] - came,
    )


# --- drawing --------------------------------------------------------------------------------------

LEFT = 10  # characters before a trace, for slot and request
RIGHT = 10  # characters after a trace, for the newest gap
TALLEST = 6  # maximum number of lines of a trace
NOISY = 3  # a gap longer than this multiple of the median has a cause outside the engine
FIGURES = (
    Figure("prompt", 9, 8),
    Figure("budget", 9, 0),
    Figure("tokens/step", 12, 0),
    Figure("steps", 7, 5),
    Figure("gap p50", 10, 0),
    Figure("longest", 10, 0),
    Figure("without", 10, 0),
    Figure("its longest", 13, 9),
    Figure("first token", 12, 0),
)


def draw(state: State, on: Canvas) -> None:
    """Draw a trace for each chat, a row for each result, and the trade-off of the budget."""
    record = state.records.get(NAME, LongPromptRecord())
    is_on = state.view.experiment is record
    keys = "L another  [ ] budget  Esc ends it" if is_on else "L sends one  Esc back"
    on.title("Long prompt: gaps between tokens", keys)
    on.pen().put(f" {shorten(doing(state, record, is_on), on.width - 2)}")
    results = record.results
    below = Canvas(on.p, on.width, on.height)
    below.say(sentence(results) if results else "", bold=True)
    below.say(company(results[-1]) if results else "")
    below.say(truth(results), on.muted)
    room = on.lines_left - len(below.lines) - 1
    rows = min(len(results), max(2, room - len(state.view.engine.slots) - 1))
    draw_traces(state, on, room - rows, record)
    draw_results(on, results[-rows:] if rows else ())
    on.lines += below.lines


def doing(state: State, record: LongPromptRecord, is_on: bool) -> str:
    """Describe the current state and the budget."""
    limits = state.view.engine.limits
    own = state.view.made_with
    words = "over, the budget is restored" if record.results else "no long prompt has been read yet"
    if is_on:
        words = record.so_far
    budget = f"budget {limits.budget:,}, a chunk of {limits.chunk:,}"
    budget += f" (made with {own.budget:,})" if limits != own else ""
    budget += in_time(state.view.engine.step_s)
    return disturbed(state.view, words, budget)


def sentence(results: Sequence[LongPromptResult]) -> str:
    """Describe the trade-off of the budget, comparing the newest budget with the one before."""
    newest = results[-1]
    result, which = calmest(results, newest.budgets)
    words = (
        f"budget {result.budget} ({result.widest:,} of the long prompt's tokens in a step{which}): a chat's gap was "
        f"{span(result.gap)}, the longest {span(result.longest)}, instead of {span(result.quiet_gap)}, "
        f"and the long prompt's first token came after {span(result.ttft)}"
    )
    others = [result for result in results if result.budgets[-1] != newest.budgets[-1]]
    if not others:
        return f"{words}. Turn the budget ([ and ], /budget), and send another."
    other, which = calmest(results, others[-1].budgets)
    return (
        f"{words}; with {other.budget} ({other.widest:,} in a step{which}) it was {span(other.gap)}, "
        f"the longest {span(other.longest)}, and {span(other.ttft)}."
    )


def company(result: LongPromptResult) -> str:
    """Describe the short prompt's time to first token."""
    short = result.short
    if short is None:
        return (
            f"No short prompt was counted next to r{result.request}: that takes a free slot while its "
            "second half is read."
        )
    return (
        f"r{short.request}, a short prompt of {count(short.tokens, 'token')}, came when "
        f"r{result.request} had {short.left:,} to go: its first token came after "
        f"{count(short.steps, 'step')}, r{result.request}'s after {short.long_steps:,}."
    )


def calmest(
    results: Sequence[LongPromptResult], budgets: tuple[int, ...]
) -> tuple[LongPromptResult, str]:
    """Return the result with the shortest median gap for these budgets, because other programs only make
    gaps longer."""
    alike = [result for result in results if result.budgets == budgets]
    which = f", the calmest of {len(alike):,}" if len(alike) > 1 else ""
    return min(alike, key=lambda result: result.gap), which


def truth(results: Sequence[LongPromptResult]) -> str:
    """Describe how reliable the figures are."""
    words = ""
    if results and results[-1].quiet_longest > NOISY * results[-1].quiet_gap:
        longest = span(results[-1].quiet_longest)
        words = f"Noisy: a gap was {longest} without the long prompt, too. L sends another, and the calmest counts. "
    elif results:
        words = "Another program may cause a longest gap: compare the medians. "
    if results and all(result.steps_between == 1 for result in results):
        words += "Each gap is one step: no chat skipped one, but a step with a chunk takes longer. "
    return f"{words}Leaving this page restores the budget."


def scope_of(
    state: State, long: int | None, width: int
) -> tuple[Sequence[Column], int, int | None]:
    """Return the steps to draw, the steps per cell, and the number of cells before the long prompt's first
    chunk (None before its prefill).

    As on an oscilloscope, the picture begins shortly before the newest long prompt and stops when it is
    full.
    """
    history = state.history
    request = state.requests.get(long)
    steps = state.steps_of(request) if request else []
    reads = [i for i in steps if read_of(history[i].view, long)]
    if not reads:
        return history[-width:], 1, None
    lead = width // 4
    zoom = -(-len(range(reads[0], reads[-1] + 1)) // (width - lead - 4))
    start = max(0, reads[0] - lead * zoom)
    columns = history[start : start + width * zoom]
    return columns, zoom, (reads[0] - start) // zoom


def draw_traces(state: State, on: Canvas, height: int, record: LongPromptRecord) -> None:
    """Draw a trace for each slot on one scale, with an axis below."""
    long = record.newest
    cells = on.width - LEFT - RIGHT
    columns, zoom, before = scope_of(state, long, cells)
    lanes: dict[int, dict[int, Gap]] = defaultdict(dict)  # [slot][cell] -> the longest gap
    is_whole = not any(column.unseen for column in columns)
    for i, slot, gap in gaps_of([column.view for column in columns], long):
        if gap.steps == 1 or is_whole:
            lane = lanes[slot]
            x = i // zoom
            lane[x] = max(gap, lane.get(x, gap))
    gaps = [gap for lane in lanes.values() for gap in lane.values()]
    slots = fit_slots(state, max(1, height - 1))
    owners = {slot: [column.cells[slot].request for column in reversed(columns)] for slot in slots}
    read = {
        request: {i // zoom for i, column in enumerate(columns) if read_of(column.view, request)}
        for request in (long, record.short)
    }
    flat = [slot for slot in slots if not lanes[slot] or long in owners[slot]]
    tall = max(1, min(TALLEST, (height - 1 - len(flat)) // max(1, len(slots) - len(flat))))
    top = top_of(gaps)
    for slot in slots:
        if before is not None and long in owners[slot]:
            draw_chunks(on, slot, long, read[long], cells, NAME)
        elif read[record.short] and record.short in owners[slot]:
            draw_chunks(on, slot, record.short, read[record.short], cells, "short")
        else:
            chat = next(filter(None, owners[slot]), None)
            trace = [lanes[slot].get(x) for x in range(cells)]
            draw_trace(on, slot, chat, trace, top, 1 if slot in flat else tall)
    label = ""
    left = LEFT
    if before is not None:
        left += before
        label = f"▲ r{long} comes in step {columns[before * zoom].step:,}"
    unit = "1 cell = 1 step" if zoom == 1 else f"1 cell = {zoom} steps, the longest gap"
    is_cut = any(gap.seconds / top > BEYOND for gap in gaps)
    scale = f"0–{1000 * top:g} ms{', ↑ more' if is_cut else ''}"
    labels = [(1, scale), (max(len(scale) + 2, left), label)]
    end = max(left + len(label) + 2, on.width - 1 - len(unit))
    if end + len(unit) < on.width:
        labels.append((end, unit))
    on.axis(*labels)


def top_of(gaps: Collection[Gap]) -> float:
    """Return the end of the scale. Outliers caused by other programs may exceed it, because otherwise
    they would flatten all other gaps."""
    usual = percentile((gap.seconds for gap in gaps), 0.98) or 0.01
    read = max((gap.seconds for gap in gaps if gap.tokens), default=0.0)
    return nice(max(usual, read))


def draw_trace(
    on: Canvas, slot: int, chat: int | None, trace: Sequence[Gap | None], top: float, tall: int
) -> None:
    """Draw one chat's gaps as columns, in another colour during the long prompt's prefill."""
    bars = [
        (gap.seconds / top, on.bad if gap.tokens else on.p.fill(chat)) if gap else (None, "")
        for gap in trace
    ]
    newest = next((gap for gap in reversed(trace) if gap), None)
    figure = span(newest.seconds) if newest else ""
    pen = on.bars(bars, tall, LEFT, f"{slot:>3} {'' if chat is None else f'r{chat}'}")
    pen.put(f"{figure:>{RIGHT - 1}}")


def draw_chunks(
    on: Canvas, slot: int, request: int, read: Collection[int], cells: int, name: str
) -> None:
    """Draw the line of the long or the short prompt, with a mark for each cell with a chunk."""
    pen = on.pen().put(f"{slot:>3} r{request}", bold=True)
    for x in sorted(read):
        pen.to(LEFT + x).put(GLYPHS[PREFILL], on.p.cell(PREFILL, request))
    pen.to(LEFT + cells).put(f"{name:>{RIGHT - 1}}")


def draw_results(on: Canvas, results: Sequence[LongPromptResult]) -> None:
    """Draw a row for each result, the newest last."""
    if not results:
        on.lines.append([])
        return
    shown = on.columns(FIGURES)
    for result in results:
        texts = {
            "prompt": f"r{result.request}",
            "budget": result.budget,
            "tokens/step": f"{result.widest:,}",
            "steps": f"{result.steps:,}",
            "gap p50": span(result.gap),
            "longest": span(result.longest),
            "without": span(result.quiet_gap),
            "its longest": span(result.quiet_longest),
            "first token": span(result.ttft),
        }
        on.row(shown, texts, bold=result is results[-1])


PAGE = Page(
    NAME,
    "L",
    "Long prompt",
    "a prompt as long as a slot among chats: their gaps, a short prompt's wait, what the budget trades",
    draw,
    footer=12,
    obey=obey,
    example="40 104",
    read=as_budget,
    explains=(
        (
            "long prompt",
            "a prompt as long as a slot, among chats: what a chunk of it costs them, and a small chunk costs it.",
        ),
    ),
    leave=lambda session: session.client.end_experiment(NAME),  # it restores the budget
    repeats=True,
    is_live=True,
    disturbs=True,
)
