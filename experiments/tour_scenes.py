"""The scenes of tour.py: eight questions, answered by the running engine.

A scene's story is a generator of lines that a user could type, with waits between them, a `Question` in the
middle and an `Explanation` at the end. All figures come from the scene's own steps and requests. If a run does
not show the effect that the scene is about, the story raises ValueError and the tour continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.snapshot import RequestView
from experiments.fault_injection import FEWEST, FaultInjectionRecord
from experiments.latency_breakdown import breakdown_in, outcomes
from experiments.long_prompt import LongPromptResult
from experiments.step_cost import scaled
from models.forward_cost import of_rows
from screen.draw.style import FAILED, clean, count, span
from screen.engine_view import ExperimentRecord
from screen.state import State, prices
from screen.timeline_columns import Column
from screen.undisturbed_times import undisturbed
from screen.workload import BURST, EVENING

HEROES = ("fox", "cat", "girl", "bear", "owl", "hen", "boy", "mouse")
STORIES = tuple((f"Tell me a long story about a {hero}.", 320) for hero in HEROES)


# --- the parts of a scene -----------------------------------------------------------------------

# In a story: continue when the view shows the effect of all lines
WAIT = "wait"
STOP = "stop"  # pause the engine, then WAIT
BACK = "←"  # the cursor was moved to a step; shown as a key, not run as a line


class Question(NamedTuple):
    text: str
    answers: Sequence[str]


class Explanation(NamedTuple):
    right: int  # the correct answer, counted from 1
    text: str  # fits in two lines of a small screen


class Sight:
    """The steps and requests since the scene began."""

    def __init__(self, state: State):
        self.state = state
        # Steps up to `first` and requests up to `newest` are older than the scene
        self.first = state.history[-1].step if state.history else 0
        self.newest = max(state.requests, default=0)
        self.earlier = state.view.record
        self.guess: int | None = None  # counted from 1
        self.late = False  # the run takes too long and is cut short
        self.hurries = False  # the rest runs at full speed

    @property
    def slots(self) -> int:
        return self.state.view.engine.limits.slots

    @property
    def requests(self) -> list[RequestView]:
        """The scene's requests in order of arrival."""
        return [r for id, r in sorted(self.state.requests.items()) if id > self.newest]

    @property
    def open(self) -> int:
        """The number of unfinished requests."""
        return sum(request.reason is None for request in self.requests)

    @property
    def columns(self) -> list[Column]:
        """The steps in which a slot holds one of this scene's requests."""
        return [
            column
            for column in self.state.history
            if column.step > self.first
            and any((cell.request or 0) > self.newest for cell in column.cells)
        ]

    @property
    def found(self) -> ExperimentRecord | None:
        """The record of this scene's newest experiment."""
        experiment = self.state.view.record
        return None if experiment is self.earlier else experiment

    def decodes(self, rows: int) -> list[Column]:
        """Return the steps that decoded this many rows and prefilled nothing."""
        return [c for c in self.columns if len(c.view.decode) == rows and not c.view.prefill]

    def has_decoded(self, rows: int, steps: int) -> bool:
        """True if enough steps decoded this many rows, or too few requests are open for another
        such step."""
        return self.open < rows or len(self.decodes(rows)) >= steps

    def usual(self, rows: int) -> float:
        """Return the undisturbed time of a step that decodes this many rows."""
        times = [column.view.seconds for column in self.decodes(rows)]
        if not times:
            raise ValueError("no step was seen that could be compared")
        return undisturbed(times, one_in=8)

    def until(self, is_ready: Callable[[], bool], each: str = WAIT) -> Iterator[str]:
        """Wait until `is_ready`. Unless at full speed, run the line `each` repeatedly."""
        yield WAIT
        while not (self.late or is_ready()):
            if each != WAIT and not self.hurries:
                yield each
            yield WAIT

    def until_idle(self) -> Iterator[str]:
        yield from self.until(lambda: not self.state.view.busy)

    def back_to(self, column: Column) -> str:
        """Move the cursor to the step that the text is about."""
        state = self.state
        state.zoom = 1
        state.look_at(state.index_of(column.step))
        state.edge = state.at + 12
        return BACK


Story = Iterator[str | Question | Explanation]


class Scene(NamedTuple):
    """A scene of the tour."""

    title: str
    place: tuple[str, str]  # file and function of the code that the scene is about
    story: Callable[[Sight], Story]
    prompts: Sequence[tuple[str, int]] = BURST  # (prompt, max tokens) of a burst


# --- the cost of another row ----------------------------------------------------------------------

WATCHED = 16  # steps to show in slow motion
TIMED = 64  # steps in all, to determine the undisturbed time


def tell_rows(seen: Sight) -> Story:
    slots = seen.slots
    yield "/burst 1"
    yield from watch(seen, 1)
    one = seen.usual(1)
    *more, least = sorted({slots, slots / 2, 2, 1}, reverse=True)
    yield Question(
        f"One prompt has one slot: each step makes one token of its answer, and takes {span(one)}. "
        f"Now {slots - 1} more prompts come. How long will a step take that makes {slots} tokens?",
        (*(f"{times:g} times as long, {span(times * one)}" for times in more), "hardly longer"),
    )
    yield f"/burst {slots - seen.open}"
    yield from watch(seen, slots)
    many = seen.usual(slots)
    ratio = many / one
    answers = [*more, least]
    nearest = min(answers, key=lambda times: abs(math.log(ratio / times)))
    row = (many - one) / (slots - 1)
    weights = of_rows(seen.state.view.engine.model, rows=1, length=1).weights
    said = (
        f"{slots} rows took {span(many)}, one row {span(one)}: {ratio:.2f} times "
        f"the time for {slots} times the tokens. They share one reading of the weights, "
        f"{scaled(weights, 'B')}, and the start of each operation."
    )
    if row * 200 < one:
        said += " Another row costs too little to be measured here."
    else:
        ends = max(2, round((one - row) / row))
        said += f" Each row adds {span(row)}: from {ends} on, they cost more than they share."
    yield Explanation(1 + answers.index(nearest), said)


def watch(seen: Sight, rows: int) -> Story:
    """Run steps of this many rows, first slowly and then fast, and move the cursor to a step of typical
    duration: the last step before a pause is often slower."""
    yield "/slow 10"
    yield "/resume"
    yield from seen.until(lambda: seen.has_decoded(rows, WATCHED))
    yield "/slow off"
    yield from seen.until(lambda: seen.has_decoded(rows, TIMED))
    time = seen.usual(rows)
    steps = seen.decodes(rows)[::-1]
    yield seen.back_to(min(steps, key=lambda column: abs(column.view.seconds - time)))
    yield STOP


# --- the cause of a slow first token ------------------------------------------------------------


def last_in_line(seen: Sight) -> RequestView:
    """Return the queued request with the longest prompt."""
    waiting = seen.requests[seen.slots :]
    if not waiting:
        raise ValueError("no prompt had to wait")
    return max(waiting, key=lambda r: (r.metrics.prompt_tokens, r.id))


def faults(seen: Sight) -> tuple[float, float, float]:
    """Return the seconds to the first token, as (queue, own prompt, neighbours)."""
    r = last_in_line(seen)
    if r.metrics.ttft_s is None:
        raise ValueError(f"r{r.id} has no first token yet")
    parts = breakdown_in(seen.state, r).parts(until=r.arrived + r.metrics.ttft_s)
    line, own = parts.get("line", 0.0), parts.get("own chunks", 0.0)
    return line, own, max(0.0, sum(parts.values()) - line - own)


def tell_fault(seen: Sight) -> Story:
    yield f"/burst {2 * seen.slots}"
    yield "/step 1"
    yield STOP
    r = last_in_line(seen)
    prompt = count(r.metrics.prompt_tokens, "token")
    yield Question(
        f"{len(seen.requests)} prompts came at once, and there are {seen.slots} slots. r{r.id} has "
        f"the longest prompt in line, {prompt}. What will its first token have to wait for most?",
        (
            "the line: no slot is free",
            "its own prompt, which is long",
            "its neighbours' work in each step",
        ),
    )
    yield "/slow 16"
    yield "/resume"
    yield from seen.until(lambda: last_in_line(seen).metrics.ttft_s is not None)
    yield STOP
    spent = faults(seen)
    line, own, others = map(span, spent)
    m = last_in_line(seen).metrics
    said = (
        f"r{r.id} waited {span(m.ttft_s)}: {line} in line, {own} for its own prompt, {others} for "
        "its neighbours."
    )
    if m.cached_tokens:
        said += (
            f" Of its {prompt}, {m.cached_tokens:,} were copied from a slot whose prompt began "
            "alike (▓)."
        )
    yield Explanation(1 + spent.index(max(spent)), f"{said} w says it of any request.")


# --- a long prompt among others -----------------------------------------------------------------


def results(seen: Sight) -> list[LongPromptResult]:
    """Return the results of this scene's long prompts."""
    return (
        [result for result in seen.found.results if result.request > seen.newest]
        if seen.found
        else []
    )


def tell_long_prompt(seen: Sight) -> Story:
    yield STOP
    yield Question(
        f"Up to {max(1, seen.slots - 2)} chats will decode, a token each in every step. Then comes a "
        "prompt as long as a slot. What will the chats feel while it is read?",
        (
            "nothing comes until it is read",
            "each token comes a little later",
            "nothing at all",
        ),
    )
    yield "/slow 32"
    least, most = seen.state.view.made_with.budgets
    yield f"/long {least} {most}"
    yield from seen.until(lambda: len(results(seen)) > 1 or not seen.state.view.experimenting)
    yield STOP
    found = results(seen)
    if len(found) < 2:
        raise ValueError("the long prompts were not read to their end")
    yield explained(found)


def explained(found: list[LongPromptResult]) -> Explanation:
    """Compare each long prompt with the gaps just before it."""
    widest = max(found, key=lambda result: result.widest)
    right = 2 if widest.gap > 1.1 * widest.quiet_gap else 3
    if max(result.steps_between for result in found) > 2:
        right = 1
    told = [
        f"Budget {result.budget}: {count(result.steps, 'step')}, gaps of {span(result.gap)} "
        f"({span(result.quiet_gap)} before); first token after {span(result.ttft)}."
        for result in found
    ]
    if any(result.gap < result.quiet_gap for result in found):
        told.append("Gaps that were longer before: another program was at work then.")
    short = found[0].short
    if short:
        said = f"A short prompt in its middle took {count(short.steps, 'step')}"
        told.insert(1, f"{said}; its rest took {short.long_steps:,}.")
    return Explanation(right, " ".join(told))


# --- starvation ---------------------------------------------------------------------------------

CHOICE = {
    "static": "batch by batch",
    "continuous": "by arrival",
    "fair": "by clients",
    "short": "by length",
}


def lone(seen: Sight) -> RequestView:
    """Return the only request of the second client."""
    mine = [r for r in seen.requests if r.client == "Ben"]
    if not mine:
        raise ValueError("the second client's prompt was not fired")
    return mine[0]


def firsts(seen: Sight) -> dict[str, int]:
    """Return policy -> step of Ben's first token. One policy was run; the others are replayed."""
    r = lone(seen)
    state = seen.state
    limits = state.view.engine.limits
    found = outcomes(r, state.requests.values(), state.history, limits, prices(state))
    steps = {each.name: each.steps[0] + each.steps[1] for each in found}
    return {policy: steps["measured" if policy == r.policy else policy] for policy in CHOICE}


def tell_starving(seen: Sight) -> Story:
    yield "/set max=40 client=Anna"
    yield f"/burst {3 * seen.slots}"
    yield "/set client=Ben"
    yield f"{EVENING} Tell me a story about an owl."
    yield STOP
    r = lone(seen)
    yield Question(
        f"Anna has sent {len(seen.requests) - 1} prompts. Then Ben sends one, r{r.id}, and it is "
        f"long: {count(r.metrics.prompt_tokens, 'token')}. Which policy gives Ben a first token soonest?",
        [f"{policy}: {how}" for policy, how in CHOICE.items()],
    )
    yield f"/policy {list(CHOICE)[seen.guess - 1] if seen.guess else 'fair'}"
    yield "/slow 32"
    yield "/resume"
    yield from seen.until(lambda: bool(lone(seen).text))
    yield "/slow off"
    yield from seen.until_idle()
    yield STOP
    r = lone(seen)
    found = firsts(seen)
    steps = ", ".join(f"{policy} {step:,}" for policy, step in found.items())
    ran = f"{r.policy} ran, {span(r.metrics.ttft_s)}; the others by replay"
    said = f"Steps to Ben's first token: {steps} ({ran})."
    soonest = min(found, key=found.get)
    if found["fair"] == found[soonest]:
        said += (
            " By arrival Ben is the last; by length his long prompt waits, too; fair looks at "
            "clients, and he had no slot."
        )
    yield Explanation(1 + list(CHOICE).index(soonest), said)


# --- ghosts -------------------------------------------------------------------------------------


def tell_ghosts(seen: Sight) -> Story:
    yield "/set max=60"
    yield f"/burst {seen.slots}"
    yield "/step 3"
    yield STOP
    yield Question(
        f"{count(len(seen.requests), 'answer')} run. The next step is started before this one's "
        "tokens are read: it takes them on the device. An answer may end with such a token. What "
        "does the next step, already on its way, do for it?",
        (
            "nothing: the slot is free by then",
            "one token more, which is dropped",
            "it waits until the token is read",
        ),
    )
    yield "/resume"
    yield from seen.until_idle()
    yield STOP
    steps = [column.view for column in seen.columns]
    many = sum(len(step.ghosts) for step in steps)
    if not many:
        raise ValueError("no answer ended by itself in this run, so there was no ghost")
    most = max(seen.columns, key=lambda column: len(column.view.ghosts))
    yield seen.back_to(most)
    rows = sum(len(step.decode) for step in steps)
    yield Explanation(
        2,
        f"It ran once more, for nothing: a ghost (▚), as in slot {most.view.ghosts[0]} at step "
        f"{most.step:,}. {count(many, 'ghost')} among {rows:,} rows, {many / rows:.1%}: the price "
        "for a device that never waits until Python has read. Step by step (s) there is none.",
    )


# --- JSON ---------------------------------------------------------------------------------------


def candidates_of(seen: Sight) -> dict[int, tuple[tuple[str, float, bool], ...]]:
    """Return number of tokens -> the token inspector's candidates at that point."""
    id = seen.requests[0].id
    return {
        said: tokens for (request, said), tokens in seen.state.candidates.items() if request == id
    }


def ban_in(tokens: Sequence[tuple[str, float, bool]]) -> float:
    """Return the probability of the likeliest token not chosen if the grammar forbade it, otherwise
    0."""
    _, chance, is_allowed = max(tokens[1:], key=lambda token: token[1], default=("", 0.0, True))
    return 0.0 if is_allowed else chance


def tell_json(seen: Sight) -> Story:
    yield "/json Tell me about a fox."
    yield STOP
    untaught = ", and this model was never shown any" if seen.state.model == "demo" else ""
    asked = f"r{seen.requests[0].id} must answer in JSON of a schema{untaught}."
    yield Question(
        f"{asked} What makes its answer fit?",
        (
            "it is asked again until it does",
            "the text is mended at its end",
            "before each token, what does not fit is struck out",
        ),
    )
    # On a small screen, show the answers with the token inspector
    seen.state.lower = "streams"
    yield from seen.until(lambda: seen.requests[0].reason is not None, each="/step 1")
    yield STOP
    r = seen.requests[0]
    candidates = candidates_of(seen)
    # The step with the likeliest of all forbidden tokens
    said = max(candidates, key=lambda said: ban_in(candidates[said]), default=1)
    rows = r.metrics.prompt_tokens + said - 1
    column = next((c for c in seen.columns if c.rows[r.slot] == rows), None)
    if column:
        yield seen.back_to(column)
    try:
        json.loads(r.text)
    except ValueError:
        raise ValueError(f"the answer of r{r.id} was cut off ({r.reason or 'not over'})") from None
    tokens = r.metrics.output_tokens
    struck = sum(ban_in(tokens) > 0 for tokens in candidates.values())
    forced = sum(tokens[0][1] > 0.999 for tokens in candidates.values())
    yield Explanation(
        # One token per step, so none was retried, and the answer parses
        3 if tokens <= len(seen.columns) + 1 else 1,
        f"{tokens} tokens in {len(seen.columns)} steps, {len(candidates)} inspected: at {struck} "
        "the likeliest was forbidden (✗), its chance set to 0 before the choice; "
        f"{forced} times a single one was allowed. "
        f"Said: {' '.join(clean(r.text).split())}",
    )


# --- temperature 0 among neighbours ------------------------------------------------------------

RUNS = 60


def tell_same(seen: Sight) -> Story:
    yield STOP
    yield Question(
        "Temperature 0: the likeliest token is always taken. One prompt runs alone, then "
        f"{RUNS} times among random neighbours. How many answers will there be, compared by all "
        "bits of their probabilities?",
        ("one", "two or three", "more: it depends on the neighbours"),
    )
    yield "/slow off"
    yield f"/same {RUNS} What is a slot?"
    yield from seen.until_idle()
    yield STOP
    found = seen.found
    if found is None or not found.runs:
        raise ValueError("no run among neighbours has ended")
    said = f"{found.so_far}, with {found.beside} others at most."
    kinds = len(found.kinds)
    if kinds == 1:
        why = (
            "Elsewhere the order in which a product adds up depends on how many rows "
            "there are, and other last bits now and then make another token. Here each sum has "
            "one order."
        )
    else:
        why = (
            f"This product ({found.product}) adds up in another order for other rows, so last "
            "bits differ."
        )
    yield Explanation(1 if kinds == 1 else 2 if kinds < 4 else 3, f"{said} {why}")


# --- a crash, and a hang-up ---------------------------------------------------------------------


def tell_broken(seen: Sight) -> Story:
    yield STOP
    yield Question(
        f"{seen.slots + FEWEST} requests come: {seen.slots} in slots, {FEWEST} in line. Then a "
        "step raises an exception when its work has begun. (And the same once more, with a client "
        "that hangs up.) Which does the exception end?",
        (
            "all of them",
            "those in that step; the line goes on",
            "one: the engine goes on without it",
        ),
    )
    names = {"step": "A step raised (✗)", "client": "A client hung up"}
    done: dict[str, FaultInjectionRecord] = {}
    for what in names:
        yield f"/break {what}"
        yield from seen.until_idle()
        if seen.found and seen.found.did:
            done[seen.found.what] = seen.found
    yield STOP
    if "step" not in done:
        raise ValueError("no step was broken")
    failed = [c for c in seen.state.history if c.step > seen.first and c.cells[0].kind == FAILED]
    if failed:
        yield seen.back_to(failed[0])
    ended = len(done["step"].ended)
    right = 1 if ended == len(done["step"].witnesses) else 3 if ended <= 1 else 2
    said = []
    changed = tokens = 0
    for what, found in done.items():
        on = sum(each.went_on for each in found.witnesses)
        said.append(f"{names[what]}: {len(found.ended):,} ended, {on:,} went on to their end.")
        changed += len(found.changed)
        tokens += sum(each.tokens for each in found.compared)
    told = f"{changed:,} answers changed" if changed else "No bit changed"
    words = f"{told}, in {count(tokens, 'token')} compared with the same requests alone."
    yield Explanation(right, f"{' '.join(said)} {words} /break nan does worse.")


# --- the table ----------------------------------------------------------------------------------

SCENES = (
    Scene("what another row costs", ("runner.py", "Runner._forward"), tell_rows, STORIES),
    Scene("whose fault a slow first token is", ("sched.py", "Scheduler._admit"), tell_fault),
    Scene("a long prompt among chats", ("sched.py", "Scheduler._allot"), tell_long_prompt),
    Scene("who starves", ("policies.py", "by_turns"), tell_starving),
    Scene(
        "a step ahead of the tokens", ("nanobatch.py", "Engine._may_stay_in_flight"), tell_ghosts
    ),
    Scene("JSON that cannot break", ("nanobatch.py", "Engine._sampling_rows"), tell_json),
    Scene("the same answer among neighbours", ("kernels/cpu_kernels.c", "multiply"), tell_same),
    Scene("a crash, and a hang-up", ("nanobatch.py", "Engine._fail"), tell_broken),
)
