"""What does a prompt as long as a slot cost running chats, and what does the budget of a step trade?

A long prompt is read in chunks, and all chats decode in the same steps, so their tokens come later.
Small chunks keep the gaps short but delay the long prompt. Two keys change the budget while it
runs.

The experiment lets chats decode, measures their gaps, submits the long prompt and measures again.
The median is shown next to the maximum, because another program may cause a single long gap.
Halfway through, a short prompt arrives, and the steps to both first tokens are counted. Each long
prompt begins with other words, so no rows come from the prefix cache. All changes are undone at the
end.
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
ANSWER = 2  # tokens: a long prompt only has to be read
SHORT = 35  # tokens of the prompt that arrives halfway through
QUIET = 24  # steps measured before a long prompt
AFTER = 12  # steps after it, for the end of the picture
KEPT = 40  # results
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
    """A prompt with a long answer."""
    return f"Tell me a long story about a {NOUNS[i % 7]} and a {NOUNS[7 + i // 7 % 5]}."


def long_text(number: int, size: int, ask: Callable[[str], Sequence[int]]) -> str:
    """A prompt of whole sentences with at most `size` tokens. It begins with a number, so that no
    two share a prefix. `ask` tokenizes."""
    dice = random.Random(number)
    said = [f"{number}."]
    for _ in range(size // 5):  # a sentence has no fewer tokens than words
        said.append(f"The {dice.choice(NOUNS)} {dice.choice(VERBS)} the {dice.choice(NOUNS)}.")

    def text(sentences: int) -> str:
        return " ".join(said[: 1 + sentences])

    counts = range(1, len(said))
    return text(bisect_right(counts, size, key=lambda sentences: len(ask(text(sentences)))))


# --- run ------------------------------------------------------------------------------------------


class LongPrompt(Experiment):
    """Submit long prompts among chats.

    `before`: earlier findings to compare with. `stays`: go on until a user ends it. `wanted`: the
    budget of each long prompt; None: no change.
    """

    what = "long prompt"

    def __init__(self, before: LongPromptRecord, stays: bool, wanted: Sequence[int | None]):
        super().__init__(LongPromptRecord("", before.newest, before.short, before.results[-KEPT:]))
        self.wanted = deque(wanted)
        self._stays = stays
        self._fired = 0  # number of chats so far
        self._has_company = False  # keep all slots but two filled with chats

    def takes_in(self, other: Experiment) -> bool:
        """Take over the long prompts of another one."""
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
        """Wait until a long prompt is wanted, chats decode, nothing is read, and a slot is free."""
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
        """If nothing runs, fill all slots with chats and keep them filled, but for two: one for the
        long prompt, one for the short one."""
        sched = self.engine.sched
        busy = len(sched.running) + len(sched.waiting)
        self._has_company = self._has_company or not busy
        missing = max(1, sched.slots - 2) - busy
        if self._has_company and missing > 0:
            for number in range(self._fired, self._fired + missing):
                self.submit(asked(chat(number), sched.max_len))
            self._fired += missing

    def _check_open(self) -> None:
        """Raise if the policy admits nothing while others run."""
        sched = self.engine.sched
        if not (sched.waiting and sched.free) or sched.draining_to:
            return
        if any(slot.phase == "blocked" for slot in self.engine.snapshot().slots):
            shut = f"{sched.policy.name} keeps a free slot shut while others run"
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
        """True if half of the long prompt is read, and a slot is free for another."""
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
    """Submit a prompt as long as a slot among chats; with numbers, one for each of these
    budgets."""
    state = session.state
    budgets = [as_budget(word) for word in rest.split()]
    for budget in budgets if state.view.engine else ():  # otherwise the client refuses
        state.view.made_with.with_budget(budget)
    before = state.records.get(NAME, LongPromptRecord())
    session.run_experiment(LongPrompt(before, session.stays, budgets or [None]))


# --- record ---------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """From one token of a chat to the next."""

    seconds: float
    steps: int  # 1: the chat had a token in each step
    tokens: int  # of the long prompt, read meanwhile
    cost: int  # prompt tokens, its own and others'


class ShortPrompt(NamedTuple):
    """A short prompt that arrived while the long one was read. Steps count from its arrival."""

    request: int
    tokens: int
    left: int  # unread tokens of the long prompt
    steps: int  # to its first token
    long_steps: int  # to the long prompt's first token


class LongPromptResult(NamedTuple):
    """One long prompt and its effect on the chats. Seconds are the engine's."""

    request: int
    budgets: tuple[int, ...]  # more than one if the budget changed in mid-prompt
    widest: int  # the most in a step
    steps: int  # with a chunk of the long prompt
    ttft: float
    gap: float  # the median of the chats' gaps with a whole chunk inside
    longest: float
    steps_between: int  # from a chat's token to the next, at most
    quiet_gap: float  # before the long prompt
    quiet_longest: float
    short: ShortPrompt | None = None  # one that arrived halfway through and was answered

    @property
    def budget(self) -> str:
        return "→".join(f"{budget:,}" for budget in self.budgets[-2:])


@dataclass(frozen=True)
class LongPromptRecord(ExperimentRecord):
    """The long prompts so far, and what happens now."""

    name = NAME
    now: str = ""  # what happens now
    newest: int | None = None  # long prompt, also if it has not ended
    short: int | None = None  # the short prompt next to it
    results: tuple[LongPromptResult, ...] = ()

    @property
    def so_far(self) -> str:
        return self.now


def read_of(step: StepView, request: int) -> int:
    """Number of tokens of this prompt in a step."""
    return sum(stop - start for _, id, start, stop in step.prefill if id == request)


def gaps_of(steps: Sequence[StepView], long: int | None) -> Iterator[tuple[int, int, Gap]]:
    """Each gap of each chat, with the index of its last step and the slot."""
    newest: dict[int, int] = {}  # by chat: the place of the step of the newest token
    for i, step in enumerate(steps):
        for slot, chat in step.decode:
            if chat == long or slot in step.ghosts:
                continue
            if chat in newest:
                first = newest[chat]
                began = steps[first].ended
                # A step's tokens may be read only after the work of the next step
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
    """Measure the effect of a long prompt. None if no chat decoded meanwhile."""
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
    # Leave out a short last chunk: of two gaps it would be the median
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
    """Count the steps from the arrival of a short prompt to both first tokens. None if it was
    cancelled, or its steps are forgotten."""
    last = {
        handle: max((step.step for step in steps if read_of(step, handle.id)), default=0)
        for handle in (long, short)
    }
    if not short.tokens or not last[short]:
        return None
    came = short.request.queued.came
    return ShortPrompt(
        short.id,
        tokens=len(short.request.prompt),
        left=left,
        steps=last[short] - came,
        long_steps=last[long] - came,
    )


# --- drawing --------------------------------------------------------------------------------------

LEFT = 10  # characters before a trace: slot and request
RIGHT = 10  # and after it: the newest gap
TALLEST = 6  # lines of a trace
NOISY = 3  # times the median: such a gap has a cause outside the engine
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
    """Draw a trace for each chat, a line for each long prompt, and what the budget trades."""
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
    """The current stage, and the budget."""
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
    """The trade-off of the budget, with the newest value and the one before."""
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
    """The short prompt's time to first token."""
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
    """The least disturbed result with these budgets: other programs only make gaps longer."""
    alike = [result for result in results if result.budgets == budgets]
    which = f", the calmest of {len(alike):,}" if len(alike) > 1 else ""
    return min(alike, key=lambda result: result.gap), which


def truth(results: Sequence[LongPromptResult]) -> str:
    """The reliability of the figures."""
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
    """The steps of the picture, the steps per cell, and the number of cells before the long
    prompt's first chunk (None: not read yet). As on an oscilloscope, the picture begins a little
    before the newest long prompt and stops when it is full."""
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
    lanes: dict[int, dict[int, Gap]] = defaultdict(dict)  # by slot and cell: the longest gap
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
    """The end of the scale. Gaps that another program caused may exceed it, or all others would
    look alike."""
    usual = percentile((gap.seconds for gap in gaps), 0.98) or 0.01
    read = max((gap.seconds for gap in gaps if gap.tokens), default=0.0)
    return nice(max(usual, read))


def draw_trace(
    on: Canvas, slot: int, chat: int | None, trace: Sequence[Gap | None], top: float, tall: int
) -> None:
    """Draw one chat's gaps as columns, in another colour while the long prompt is read."""
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
    """Draw the line of the long or the short prompt: the cells with a chunk."""
    pen = on.pen().put(f"{slot:>3} r{request}", bold=True)
    for x in sorted(read):
        pen.to(LEFT + x).put(GLYPHS[PREFILL], on.p.cell(PREFILL, request))
    pen.to(LEFT + cells).put(f"{name:>{RIGHT - 1}}")


def draw_results(on: Canvas, results: Sequence[LongPromptResult]) -> None:
    """Draw a line for each long prompt, the newest last."""
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
