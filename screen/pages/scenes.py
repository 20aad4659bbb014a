"""The scenes of the tour: for each of eight questions a stage, the question, a run, and the
explanation.

The problem. A screen shows the work of an engine, and no reasons. On the first day, a reader does
not know where to look in a timeline, and reads past every surprise.

The way out. Each scene stops the engine, asks a question, goes on, and explains the
answer by the figures of this very run. A scene is a row of `SCENES`: a few lines that a
user could type as well, and a few functions of the steps and requests.

What this file keeps. No figure is written down here: all are read from the steps and the requests
of the scene. Where a run lacks the scene's subject, the functions raise a ValueError, and the tour
goes on.

Where next: `tour.py`, the player of the scenes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from parts.api.views import RequestView
from parts.bill import of_rows
from parts.clock import undisturbed
from screen.ink import FAILED, clean, count, span
from screen.life import outcomes
from screen.pages.bill import scaled
from screen.pages.breakage import FEWEST, Breakage
from screen.pages.elephant import Drop
from screen.pages.same import Company
from screen.room import BURST, EVENING, Finding
from screen.state import State, life_in, prices
from screen.timeline import Column

HEROES = ("fox", "cat", "girl", "bear", "owl", "hen", "boy", "mouse")
STORIES = tuple((f"Tell me a long story about a {hero}.", 320) for hero in HEROES)


# --- the parts of a scene -----------------------------------------------------------------------


@dataclass
class Seen:
    """The steps and the requests since the scene began."""

    state: State
    first: int  # all steps up to this one, and all requests up to `newest`, were there before
    newest: int
    found: dict[str, Finding]  # by trial: earlier findings
    guess: int | None = None  # from 1
    late: bool = False  # the run took too long, and was cut short
    notes: dict = field(default_factory=dict)  # whatever a scene wants to remember

    @staticmethod
    def begin(state: State) -> Seen:
        first = state.history[-1].step if state.history else 0
        return Seen(state, first, max(state.requests, default=0), dict(state.found))

    @property
    def slots(self) -> int:
        return self.state.view.engine.limits.slots

    @property
    def requests(self) -> list[RequestView]:
        """In the order of arrival."""
        return [r for id, r in sorted(self.state.requests.items()) if id > self.newest]

    @property
    def columns(self) -> list[Column]:
        """The steps with a request of this scene in a slot."""
        return [
            column
            for column in self.state.history
            if column.step > self.first
            and any((cell.request or 0) > self.newest for cell in column.cells)
        ]

    def finding(self, trial: str) -> Finding | None:
        """The findings of a trial in this scene."""
        found = self.state.found.get(trial)
        return None if found is self.found.get(trial) else found

    def decodes(self, rows: int) -> list[float]:
        """The seconds of the steps with so many decoding rows, and nothing else."""
        steps = [column.view for column in self.columns]
        return [s.seconds for s in steps if len(s.decode) == rows and not s.prefill]


class Until(NamedTuple):
    """Wait until `ready` says so. Meanwhile the line `each` is obeyed again and again, if there is
    one."""

    ready: Callable[[Seen], bool]
    each: str = ""


# A line as from a user, or a function: the function makes such a line, or does something to the
# screen and answers with the name of a key for the same
Act = str | Until | Callable[[Seen], str]


class Scene(NamedTuple):
    """A row of the table.

    `stage`: the acts before the question. `run`: the acts after the guess.
    `prompts`: for a burst, with the longest answer of each.
    `says`: how far the run is.
    `judge`: the right answer, from 1.
    `tell`: the explanation, in two lines of a small screen.
    `place`: file and function of the decision.
    """

    title: str
    stage: Sequence[Act]
    question: Callable[[Seen], str]
    answers: Callable[[Seen], Sequence[str]]
    run: Sequence[Act]
    judge: Callable[[Seen], int]
    tell: Callable[[Seen], str]
    place: tuple[str, str]
    prompts: Sequence[tuple[str, int]] = BURST
    says: Callable[[Seen], str] = lambda seen: ""


def usual(times: Sequence[float]) -> float:
    """The time of a step without an interruption."""
    if not times:
        raise ValueError("no step was seen that could be compared")
    return undisturbed(times, one_in=8)


def back_to(state: State, column: Column) -> str:
    """Put the cursor on a step, so a reader sees the subject of the text. The steps before are in
    sight, too."""
    state.zoom = 1
    state.look_at(state.index_of(column.step))
    state.edge = state.at + 12
    return "←"


def is_settled(seen: Seen) -> bool:
    return not seen.state.view.busy and not seen.state.view.stepping


def say_of(trial: str, name: str, seen: Seen) -> str:
    """How far a trial is, in its own words."""
    return getattr(seen.finding(trial), name, "")


def was_tried(seen: Seen) -> bool:
    """A trial begins with a wish; has the trial ended, too?"""
    return not seen.state.view.trying


def still_open(seen: Seen) -> int:
    """How many of the scene's requests have not ended."""
    return sum(request.reason is None for request in seen.requests)


def has_decoded(rows: int | None, steps: int, seen: Seen) -> bool:
    """So many steps with so many decoding rows, unless too many answers have ended before. None: as
    many rows as there are slots."""
    rows = rows or seen.slots
    return still_open(seen) < rows or len(seen.decodes(rows)) >= steps


# --- the price of a row more ----------------------------------------------------------------------

WATCHED = 16  # steps of a kind, slowly
TIMED = 64  # and so many in all, for the usual time


def ask_rows(seen: Seen) -> str:
    one = span(usual(seen.decodes(1)))
    more = seen.slots - 1
    return (
        f"One prompt has one slot: each step makes one token of its answer, and takes {one}. "
        f"Now {more} more prompts come. How long will a step take that makes {seen.slots} tokens?"
    )


def times_as_long(seen: Seen) -> list[float]:
    """The answers: for 8 slots 8, 4, 2 and 1 times."""
    return sorted({seen.slots, seen.slots / 2, 2, 1}, reverse=True)


def back_to_a_usual(rows: int | None, seen: Seen) -> str:
    """A step of the same time as in the text. The newest before a pause is often slower."""
    rows = rows or seen.slots
    steps = [c for c in seen.columns if len(c.view.decode) == rows and not c.view.prefill]
    time = usual(seen.decodes(rows))
    return back_to(seen.state, min(steps[::-1], key=lambda c: abs(c.view.seconds - time)))


def row_answers(seen: Seen) -> Sequence[str]:
    one = usual(seen.decodes(1))
    *more, _ = times_as_long(seen)
    return (*(f"{times:g} times as long, {span(times * one)}" for times in more), "hardly longer")


def rows_ratio(seen: Seen) -> float:
    return usual(seen.decodes(seen.slots)) / usual(seen.decodes(1))


def judge_rows(seen: Seen) -> int:
    """The nearest answer."""
    answers = times_as_long(seen)
    ratio = rows_ratio(seen)
    nearest = min(answers, key=lambda times: abs(math.log(ratio / times)))
    return 1 + answers.index(nearest)


def tell_rows(seen: Seen) -> str:
    one = usual(seen.decodes(1))
    many = usual(seen.decodes(seen.slots))
    row = (many - one) / (seen.slots - 1)
    weights = of_rows(seen.state.view.engine.model, rows=1, length=1).weights
    said = (
        f"{seen.slots} rows took {span(many)}, one row {span(one)}: {rows_ratio(seen):.2f} times "
        f"the time for {seen.slots} times the tokens. They share one reading of the weights, "
        f"{scaled(weights, 'B')}, and the start of each operation."
    )
    if row * 200 < one:
        return f"{said} A row more costs too little to be measured here."
    ends = max(2, round((one - row) / row))
    return f"{said} Each row adds {span(row)}: from {ends} on, they cost more than they share."


# --- whose fault a slow first token is ----------------------------------------------------------


def last_in_line(seen: Seen) -> RequestView:
    """The longest prompt of those without a slot."""
    waiting = seen.requests[seen.slots :]
    if not waiting:
        raise ValueError("no prompt had to wait")
    return max(waiting, key=lambda r: (r.metrics.prompt_tokens, r.id))


def ask_fault(seen: Seen) -> str:
    r = last_in_line(seen)
    many = len(seen.requests)
    return (
        f"{many} prompts came at once, and there are {seen.slots} slots. r{r.id} has the longest "
        f"prompt in line, {count(r.metrics.prompt_tokens, 'token')}. "
        "What will its first token have to wait for most?"
    )


def has_first_token(seen: Seen) -> bool:
    return last_in_line(seen).metrics.ttft_s is not None


def faults(seen: Seen) -> tuple[float, float, float]:
    """The line, its own prompt, its neighbours: seconds up to the first token."""
    r = last_in_line(seen)
    if r.metrics.ttft_s is None:
        raise ValueError(f"r{r.id} has no first token yet")
    parts = life_in(seen.state, r).parts(until=r.arrived + r.metrics.ttft_s)
    line, own = parts.get("line", 0.0), parts.get("own chunks", 0.0)
    return line, own, max(0.0, sum(parts.values()) - line - own)


def judge_fault(seen: Seen) -> int:
    spent = faults(seen)
    return 1 + spent.index(max(spent))


def tell_fault(seen: Seen) -> str:
    r = last_in_line(seen)
    line, own, others = faults(seen)
    taken = r.metrics.cached_tokens
    said = (
        f"r{r.id} waited {span(r.metrics.ttft_s)}: {span(line)} in line, {span(own)} for its own "
        f"prompt, {span(others)} for its neighbours."
    )
    if taken:
        said += (
            f" Of its {count(r.metrics.prompt_tokens, 'token')}, {taken:,} were copied from a slot "
            "whose prompt began alike (▓)."
        )
    return f"{said} w says it of any request."


# --- a long prompt among others -----------------------------------------------------------------


def ask_elephant(seen: Seen) -> str:
    return (
        f"Up to {seen.slots - 1} chats will decode, a token each in every step. Then comes an "
        "elephant, a prompt as long as a slot. What will the chats feel while it is read?"
    )


def elephants(seen: Seen) -> str:
    """One with the least budget, one with the most."""
    least, most = seen.state.view.made_with.budgets
    return f"/elephant {least} {most}"


def drops(seen: Seen) -> list[Drop]:
    """The elephants of this scene."""
    found = seen.finding("elephant")
    return [drop for drop in found.drops if drop.request > seen.newest] if found else []


def judge_elephant(seen: Seen) -> int:
    if max(drop.steps_between for drop in both(seen)) > 2:
        return 1
    return 2 if max(drop.gap for drop in both(seen)) > 1.1 * quiet_gap(seen) else 3


def quiet_gap(seen: Seen) -> float:
    """From a chat's token to the next, before the elephants came."""
    return min(drop.quiet_gap for drop in both(seen))


def both(seen: Seen) -> list[Drop]:
    found = drops(seen)
    if len(found) < 2:
        raise ValueError("the elephants were not read to their end")
    return found[:2]


def tell_elephant(seen: Seen) -> str:
    told = [
        f"Budget {drop.budget}: {count(drop.steps, 'step')}, gaps of {span(drop.gap)}, "
        f"its first token after {span(drop.ttft)}."
        for drop in both(seen)
    ]
    return f"{' '.join(told)} Without it, gaps of {span(quiet_gap(seen))}. [ and ] turn the budget."


# --- who starves --------------------------------------------------------------------------------

CHOICE = {
    "static": "batch by batch",
    "continuous": "by arrival",
    "fair": "by clients",
    "short": "by length",
}


def lone(seen: Seen) -> RequestView:
    """The one request of the second client."""
    mine = [r for r in seen.requests if r.client == "Ben"]
    if not mine:
        raise ValueError("the second client's prompt was not fired")
    return mine[0]


def ask_starving(seen: Seen) -> str:
    r = lone(seen)
    return (
        f"Anna has sent {len(seen.requests) - 1} prompts. Then Ben sends one, r{r.id}, and it is "
        f"long: {count(r.metrics.prompt_tokens, 'token')}. Which policy gives Ben a first token soonest?"
    )


def chosen_policy(seen: Seen) -> str:
    return f"/policy {list(CHOICE)[seen.guess - 1] if seen.guess else 'fair'}"


def firsts(seen: Seen) -> dict[str, int]:
    """By policy: the step that brings Ben's first token. One policy ran, the others are replays."""
    r = lone(seen)
    state = seen.state
    limits = state.view.engine.limits
    found = outcomes(r, state.requests.values(), state.history, limits, prices(state))
    steps = {each.name: each.steps[0] + each.steps[1] for each in found}
    return {policy: steps["measured" if policy == r.policy else policy] for policy in CHOICE}


def judge_starving(seen: Seen) -> int:
    found = firsts(seen)
    return 1 + list(CHOICE).index(min(CHOICE, key=found.get))


def tell_starving(seen: Seen) -> str:
    found = firsts(seen)
    r = lone(seen)
    steps = ", ".join(f"{policy} {found[policy]:,}" for policy in CHOICE)
    ran = f"{r.policy} ran, {span(r.metrics.ttft_s)}; the others by replay"
    said = f"Steps to Ben's first token: {steps} ({ran})."
    if found["fair"] == min(found.values()):
        said += (
            " By arrival Ben is the last; by length his long prompt waits, too; fair looks at "
            "clients, and he had no slot."
        )
    return said


# --- ghosts -------------------------------------------------------------------------------------


def ask_ghosts(seen: Seen) -> str:
    return (
        f"{count(len(seen.requests), 'answer')} run. The next step is started before this one's "
        "tokens are read: it takes them on the device. An answer may end with such a token. What "
        "does the next step, already on its way, do for it?"
    )


def ghosts(seen: Seen) -> list[Column]:
    found = [column for column in seen.columns if column.view.ghosts]
    if not found:
        raise ValueError("no answer ended by itself in this run, so there was no ghost")
    return found


def back_to_a_ghost(seen: Seen) -> str:
    """The step with the most ghosts."""
    return back_to(seen.state, max(seen.columns, key=lambda column: len(column.view.ghosts)))


def judge_ghosts(seen: Seen) -> int:
    return 2 if ghosts(seen) else 0


def tell_ghosts(seen: Seen) -> str:
    many = sum(len(column.view.ghosts) for column in ghosts(seen))
    rows = sum(len(column.view.decode) for column in seen.columns)
    step = seen.state.here
    slot = step.view.ghosts[0] if step.view.ghosts else 0
    return (
        f"It ran once more, for nothing: a ghost (▚), as in slot {slot} at step {step.step:,}. "
        f"{count(many, 'ghost')} among {rows:,} rows, {many / rows:.1%}: the price for a device that "
        "never waits until Python has read. Step by step (s) there is none."
    )


# --- JSON ---------------------------------------------------------------------------------------


def ask_json(seen: Seen) -> str:
    untaught = ", and this model was never shown any" if seen.state.model == "demo" else ""
    asked = f"r{seen.requests[0].id} must answer in JSON of a schema{untaught}."
    return f"{asked} What makes its answer fit?"


def show_answers(seen: Seen) -> str:
    """Where room is short, the answers are in sight, and with them the glass."""
    seen.state.lower = "streams"
    return ""


def glasses(seen: Seen) -> dict[int, tuple[tuple[str, float, bool], ...]]:
    """By number of tokens: what was seen under glass."""
    id = seen.requests[0].id
    return {said: glass for (request, said), glass in seen.state.glass.items() if request == id}


def ban_in(glass: Sequence[tuple[str, float, bool]]) -> float:
    """The chance of the likeliest other token, if this token was forbidden; else 0."""
    _, chance, is_allowed = max(glass[1:], key=lambda token: token[1], default=("", 0.0, True))
    return 0.0 if is_allowed else chance


def back_to_a_ban(seen: Seen) -> str:
    """The step at which the likeliest of the forbidden tokens was struck out."""
    r = seen.requests[0]
    seen_glass = glasses(seen)
    said = max(seen_glass, key=lambda said: ban_in(seen_glass[said]), default=1)
    rows = r.metrics.prompt_tokens + said - 1
    column = next((c for c in seen.columns if c.rows[r.slot] == rows), None)
    return back_to(seen.state, column) if column else ""


def json_figures(seen: Seen) -> tuple[int, int, int]:
    """Tokens; at how many the likeliest was forbidden; and how many were forced."""
    r = seen.requests[0]
    try:
        json.loads(r.text)
    except ValueError:
        raise ValueError(f"the answer of r{r.id} was cut off ({r.reason or 'not over'})") from None
    seen_glass = glasses(seen).values()
    struck = sum(ban_in(glass) > 0 for glass in seen_glass)
    forced = sum(glass[0][1] > 0.999 for glass in seen_glass)
    return r.metrics.output_tokens, struck, forced


def judge_json(seen: Seen) -> int:
    """Each step said one token, none was taken back, and the answer parses."""
    tokens, _, _ = json_figures(seen)
    return 3 if tokens <= len(seen.columns) + 1 else 1


def tell_json(seen: Seen) -> str:
    r = seen.requests[0]
    tokens, struck, forced = json_figures(seen)
    return (
        f"{tokens} tokens in {len(seen.columns)} steps, {len(glasses(seen))} under glass: at {struck} "
        "the likeliest was forbidden (✗), its chance set to 0 before the choice; "
        f"{forced} times a single one was allowed. "
        f"Said: {' '.join(clean(r.text).split())}"
    )


# --- temperature 0 in company -------------------------------------------------------------------

RUNS = 60


def ask_same(seen: Seen) -> str:
    return (
        "Temperature 0: the likeliest token is always taken. One prompt runs alone, then "
        f"{RUNS} times among random neighbours. How many answers will there be, compared by all "
        "bits of their probabilities?"
    )


def company(seen: Seen) -> Company:
    found = seen.finding("same")
    if found is None or not found.runs:
        raise ValueError("no run in company has ended")
    return found


def judge_same(seen: Seen) -> int:
    kinds = len({kind.answer.digest for kind in company(seen).kinds})
    return 1 if kinds == 1 else 2 if kinds < 4 else 3


def tell_same(seen: Seen) -> str:
    found = company(seen)
    others = f"{found.verdict}, beside {found.beside} others at most."
    if judge_same(seen) == 1:
        return (
            f"{others} Elsewhere the order in which a product adds up depends on how many rows "
            "there are, and other last bits now and then make another token. Here each sum has "
            "one order."
        )
    return (
        f"{others} This product ({found.product}) adds up in another order for other rows, so last "
        "bits differ."
    )


# --- a crash, and a hang-up ---------------------------------------------------------------------


def ask_broken(seen: Seen) -> str:
    many = seen.slots + FEWEST
    return (
        f"{many} requests come: {seen.slots} in slots, {FEWEST} in line. Then a step raises an "
        "exception when its work has begun. (And the same once more, with a client that hangs up.) "
        "Which does the exception end?"
    )


def was_broken(seen: Seen) -> bool:
    """Note how far each of the two breakages has come."""
    found = seen.finding("break")
    if found:
        seen.notes[found.what] = found
    return was_tried(seen)


def back_to_the_crash(seen: Seen) -> str:
    failed = [c for c in seen.state.history if c.step > seen.first and c.cells[0].kind == FAILED]
    return back_to(seen.state, failed[0]) if failed else ""


def broken(seen: Seen) -> Breakage:
    found = seen.notes.get("step")
    if found is None or not found.did:
        raise ValueError("no step was broken")
    return found


def judge_broken(seen: Seen) -> int:
    found = broken(seen)
    if len(found.ended) == len(found.witnesses):
        return 1
    return 3 if len(found.ended) <= 1 else 2


def tell_broken(seen: Seen) -> str:
    names = {"step": "A step raised (✗)", "client": "A client hung up"}
    said = []
    changed = tokens = 0
    for what, found in seen.notes.items():
        on = sum(each.went_on for each in found.witnesses)
        said.append(f"{names[what]}: {len(found.ended):,} ended, {on:,} went on to their end.")
        compared = [each for each in found.witnesses if each.alike is not None]
        changed += sum(not each.alike for each in compared)
        tokens += sum(each.tokens for each in compared)
    told = f"{changed:,} answers changed" if changed else "No bit changed"
    words = f"{told}, in {count(tokens, 'token')} compared with the same requests alone."
    return f"{' '.join(said)} {words} /break nan does worse."


# --- the table ----------------------------------------------------------------------------------

SCENES = (
    Scene(
        title="what a row more costs",
        stage=(
            "/burst 1",
            "/slow 10",
            "/resume",
            Until(partial(has_decoded, 1, WATCHED)),
            "/slow off",
            Until(partial(has_decoded, 1, TIMED)),
            partial(back_to_a_usual, 1),
        ),
        question=ask_rows,
        answers=row_answers,
        run=(
            lambda seen: f"/burst {seen.slots - still_open(seen)}",
            "/slow 10",
            "/resume",
            Until(partial(has_decoded, None, WATCHED)),
            "/slow off",
            Until(partial(has_decoded, None, TIMED)),
            partial(back_to_a_usual, None),
        ),
        judge=judge_rows,
        tell=tell_rows,
        place=("nanobatch.py", "Runner._forward"),
        prompts=STORIES,
    ),
    Scene(
        title="whose fault a slow first token is",
        stage=(lambda seen: f"/burst {2 * seen.slots}", "/step 1"),
        question=ask_fault,
        answers=lambda seen: (
            "the line: no slot is free",
            "its own prompt, which is long",
            "its neighbours' work in each step",
        ),
        run=("/slow 16", "/resume", Until(has_first_token)),
        judge=judge_fault,
        tell=tell_fault,
        place=("sched.py", "Scheduler._admit"),
    ),
    Scene(
        title="an elephant among chats",
        stage=(),
        question=ask_elephant,
        answers=lambda seen: (
            "nothing comes until it is read",
            "each token comes a little later",
            "nothing at all",
        ),
        run=("/slow 32", elephants, Until(lambda seen: len(drops(seen)) > 1 or was_tried(seen))),
        judge=judge_elephant,
        tell=tell_elephant,
        place=("sched.py", "Scheduler._chunks"),
        says=partial(say_of, "elephant", "stage"),
    ),
    Scene(
        title="who starves",
        stage=(
            "/set max=40 client=Anna",
            lambda seen: f"/burst {3 * seen.slots}",
            "/set client=Ben",
            f"{EVENING} Tell me a story about an owl.",
        ),
        question=ask_starving,
        answers=lambda seen: tuple(f"{policy}: {how}" for policy, how in CHOICE.items()),
        run=(
            chosen_policy,
            "/slow 32",
            "/resume",
            Until(lambda seen: bool(lone(seen).text)),
            "/slow off",
            Until(is_settled),
        ),
        judge=judge_starving,
        tell=tell_starving,
        place=("policies.py", "by_turns"),
    ),
    Scene(
        title="a step ahead of the tokens",
        stage=("/set max=60", lambda seen: f"/burst {seen.slots}", "/step 3"),
        question=ask_ghosts,
        answers=lambda seen: (
            "nothing: the slot is free by then",
            "one token more, which is dropped",
            "it waits until the token is read",
        ),
        run=("/resume", Until(is_settled), back_to_a_ghost),
        judge=judge_ghosts,
        tell=tell_ghosts,
        place=("nanobatch.py", "Engine._may_fly"),
    ),
    Scene(
        title="JSON that cannot break",
        stage=("/json Tell me about a fox.",),
        question=ask_json,
        answers=lambda seen: (
            "it is asked again until it does",
            "the text is mended at its end",
            "before each token, what does not fit is struck out",
        ),
        run=(
            show_answers,
            Until(lambda seen: seen.requests[0].reason is not None, each="/step 1"),
            back_to_a_ban,
        ),
        judge=judge_json,
        tell=tell_json,
        place=("nanobatch.py", "Engine._masks"),
    ),
    Scene(
        title="the same answer in company",
        stage=(),
        question=ask_same,
        answers=lambda seen: ("one", "two or three", "more: it depends on the company"),
        run=("/slow off", f"/same {RUNS} What is a slot?", Until(was_tried)),
        judge=judge_same,
        tell=tell_same,
        place=("parts/device/rows.c", "multiply"),
        says=partial(say_of, "same", "verdict"),
    ),
    Scene(
        title="a crash, and a hang-up",
        stage=(),
        question=ask_broken,
        answers=lambda seen: (
            "all of them",
            "those in that step; the line goes on",
            "one: the engine goes on without it",
        ),
        run=(
            "/break step",
            Until(was_broken),
            "/break client",
            Until(was_broken),
            back_to_the_crash,
        ),
        judge=judge_broken,
        tell=tell_broken,
        place=("nanobatch.py", "Engine._fail"),
        says=partial(say_of, "break", "verdict"),
    ),
)
