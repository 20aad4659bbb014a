"""Does an answer depend on the other requests in its steps?

In most engines it does: libraries sum in a different order for eight rows than for one, so the last bits
differ, and sooner or later a token does, even at temperature 0. Here a prompt runs alone, and then hundreds
of times among random neighbours that arrive, finish and are cancelled. Half of the runs may use cached rows of
a common prefix. Each run is hashed (all tokens and all bits of the log probabilities), and the distinct hashes
are counted. All random choices use a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.answer_diff import Bits, Difference, difference
from benchmarks.random_neighbours import OpenQuestion, RandomBatch
from engine.handle import Handle
from experiments.experiment import WAITS, Experiment, draw_title, progress, read_count
from screen.draw.canvas import Canvas
from screen.draw.style import count, number, shorten
from screen.engine_view import ExperimentRecord
from screen.page import Page
from screen.state import State
from screen.workload import BURST, Ask

if TYPE_CHECKING:
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

RUNS = 200
LONGEST = 24  # maximum number of tokens of a run, so that 200 runs take seconds
LIKELIEST = 5  # number of likeliest tokens compared at each position
WORDS = [word for prompt, _ in BURST for word in prompt.split()]  # words of the neighbours' prompts

# --- run ------------------------------------------------------------------------------------------


class SameAnswer(Experiment):
    """Runs a prompt alone, and then many times among neighbours."""

    what = "same-answer experiment"

    def __init__(self, ask: Ask, runs: int):
        most = min(ask.max_tokens, LONGEST)
        # Sampled runs can only be equal with the same seed
        seed = ask.seed if ask.seed is not None else 0
        self.ask = ask._replace(max_tokens=most, seed=seed, logprobs=LIKELIEST, speculate=False)
        super().__init__(SameAnswerRecord(self.ask, runs))
        self.dice = random.Random(0)
        self.asked = 0  # number of runs submitted

    def run(self) -> Iterator[SameAnswerRecord]:
        self._check()
        product = self.engine.summary.rpartition("; ")[2]
        product = product.partition(", so ")[0]  # the rest says the same as `exact`
        self.update(exact=self.engine.is_batch_invariant, product=product)
        yield from self.until_idle()
        yield from self._run_alone()
        batch = RandomBatch(self.engine, self.dice, self._submit, self._submit_neighbour)
        while self._left > 0:
            batch.arrive(self._left - len(batch.open))
            yield self.record
            for run in batch.leave():
                self._count(run)
            self.update(came=batch.came, cancelled=batch.cancelled, beside=batch.beside)
        yield self.update(stage="over")

    def _check(self) -> None:
        sched = self.engine.sched
        if sched.slots < 2:
            raise ValueError("one slot has no neighbours; start with --slots 2 or more")
        if sched.policy.name == "serial":
            raise ValueError("under serial each request runs alone; p changes the policy")

    def _run_alone(self) -> Iterator[SameAnswerRecord]:
        self.update(stage="alone")
        handle = yield from self.run_alone(lambda: self.submit(self.ask, prefix_cache=False))
        is_complete(handle)
        alone = Bits.from_handle(handle)
        tokens = handle.metrics.prompt_tokens
        kinds = (Alike(alone, 0, None),)
        self.update(stage="runs", alone=alone, kinds=kinds, prompt_tokens=tokens)

    @property
    def _left(self) -> int:
        """The number of runs that have not finished."""
        return self.record.wanted - len(self.record.runs)

    def _submit(self) -> Handle:
        self.asked += 1
        ask = self.ask._replace(speculate=self.asked % 2 == 0)
        return self.submit(ask, self.dice.random() < 0.5)

    def _submit_neighbour(self) -> Handle | None:
        with suppress(ValueError):  # the prompt does not fit in a slot
            return self.submit(self._neighbour(), self.dice.random() < 0.5)
        return None

    def _neighbour(self) -> Ask:
        dice = self.dice
        words = self.ask.prompt.split()
        words = words[: dice.randint(1, len(words))] if words and dice.random() < 0.5 else []
        words += dice.choices(WORDS, k=dice.randint(1, 40))
        return Ask(
            prompt=" ".join(words),
            max_tokens=dice.randint(1, 60),
            temperature=dice.choice((0.0, 0.5, 1.0, 1.5)),
            seed=dice.getrandbits(31),
        )

    def _count(self, run: OpenQuestion) -> None:
        """Count a finished run. A run that the user cancelled does not count and is repeated."""
        if not is_complete(run.handle):
            return
        answer = Bits.from_handle(run.handle)
        beside = run.beside / max(1, run.steps)
        m = run.handle.metrics
        answered = Answered(
            answer.digest, beside, m.cached_tokens, m.draft_tokens, m.accepted_tokens
        )
        self.update(runs=(*self.record.runs, answered), kinds=self._counted(answer))

    def _counted(self, answer: Bits) -> list[Alike]:
        kinds = [*self.record.kinds]
        known = [kind.answer.digest for kind in kinds]
        if answer.digest not in known:
            return [*kinds, Alike(answer, 1, difference(self.record.alone, answer))]
        i = known.index(answer.digest)
        kinds[i] = kinds[i]._replace(count=kinds[i].count + 1)
        return kinds


def is_complete(handle: Handle) -> bool:
    """True if an answer is complete. Raise ValueError if it failed, to end the experiment."""
    if handle.error:
        raise ValueError(f"a run failed: {handle.error}")
    return handle.finish_reason in ("stop", "length")


def obey(session: Session, rest: str) -> None:
    """Run a prompt alone, and then among neighbours: /same 200, or /same 50 What is 3 + 4?

    The default is the prompt in the selected slot, if the user typed it. /same last shows the last
    result.
    """
    is_on = isinstance(session.state.view.experiment, SameAnswerRecord)
    if rest == "last" or (is_on and not rest):
        return
    word, _, prompt = rest.partition(" ")
    if not word[:1].isdigit():
        word, prompt = str(RUNS), rest
    many = read_count("same")(word)
    ask = session.state.settings.ask(prompt.strip() or own_prompt(session.state))
    session.run_experiment(SameAnswer(ask, many))


def own_prompt(state: State) -> str:
    """Return the prompt in the selected slot if the user typed it, otherwise the longest prompt of a
    burst."""
    owner = state.owner(state.selected)
    ours = [prompt for prompt, _ in state.prompts]
    is_asked = owner and isinstance(owner.origin, Ask) and not owner.origin.mute
    if is_asked and owner.origin.prompt not in ours:
        return owner.origin.prompt
    return max(ours, key=len)


# --- record ---------------------------------------------------------------------------------------

BEFORE = {  # stage -> text until the first run has finished
    "waits": WAITS,
    "alone": "The prompt runs alone.",
    "runs": "Neighbours arrive.",
}


class Answered(NamedTuple):
    """One run among neighbours."""

    digest: str
    beside: float  # mean number of other requests in its steps
    reused: int  # number of prompt tokens whose rows were cached
    draft_tokens: int = 0
    accepted_tokens: int = 0  # how many of them were accepted


class Alike(NamedTuple):
    """Runs with identical bits."""

    answer: Bits
    count: int
    difference: Difference | None  # compared with the run alone


@dataclass(frozen=True)
class SameAnswerRecord(ExperimentRecord):
    """The answers of the run alone and of those among neighbours."""

    name = "same"
    ask: Ask
    wanted: int  # number of runs to do
    exact: bool = False  # the engine is batch-invariant
    product: str = ""  # the engine's matrix product
    # stage: "waits" | "alone" | "runs" | "over"
    alone: Bits | None = None
    prompt_tokens: int = 0
    runs: tuple[Answered, ...] = ()
    kinds: Sequence[Alike] = ()  # the first is the answer of the run alone
    came: int = 0  # number of neighbours so far
    cancelled: int = 0
    beside: int = 0  # maximum number of other requests in a step

    @property
    def texts(self) -> int:
        """The number of answers with distinct tokens."""
        return len({kind.answer.tokens for kind in self.kinds if kind.count})

    @property
    def bits(self) -> int:
        return sum(kind.count > 0 for kind in self.kinds)

    @property
    def unlike(self) -> int:
        """The number of runs that differ from the run alone."""
        return sum(kind.count for kind in self.kinds if kind.difference)

    @property
    def so_far(self) -> str:
        if not self.runs:
            return BEFORE[self.stage]
        done = len(self.runs)
        whole = f"{done:,} of " if done < self.wanted else ""
        runs = whole + count(self.wanted, "run")
        if not self.unlike:
            return f"{runs}, 1 answer"
        answers = f"{count(self.texts, 'answer')} by tokens, {self.bits:,} by bits"
        return f"{runs}: {answers}; {self.unlike:,} unlike the run alone"

    @property
    def covers(self) -> str:
        """A description of the numbers that a hash covers."""
        tokens = count(len(self.alone.tokens), "token")
        what = f"their log probabilities and those of the {LIKELIEST} likeliest"
        return f"{tokens}, {what}: {self.alone.numbers:,} numbers, each in all its bits"

    @property
    def neighbours(self) -> str:
        mean = fmean(run.beside for run in self.runs)
        return (
            f"{number(mean)} at a time ({self.beside} at most); "
            f"{self.cancelled:,} of {self.came:,} were cancelled"
        )

    @property
    def drafts(self) -> str:
        """A description of the draft tokens, which half of the runs may use."""
        some = [run for run in self.runs if run.draft_tokens]
        drafted = sum(run.draft_tokens for run in some)
        accepted = sum(run.accepted_tokens for run in some)
        of = f"{len(some):,} of {len(self.runs):,} runs"
        return f"in {of}: {drafted:,} tokens, {accepted:,} accepted"

    @property
    def beginnings(self) -> str:
        """A description of how many runs computed the whole prompt and how many found a cached prefix."""
        taken = [run.reused for run in self.runs if run.reused]
        computed = f"{len(self.runs) - len(taken):,} runs computed all rows of the prompt"
        if not taken:
            return f"{computed}; no run found a beginning of it in a slot"
        of = f"{number(fmean(taken))} of {self.prompt_tokens:,}"
        return f"{computed}, {len(taken):,} took over some from a slot ({of} on average)"


def unlike(found: SameAnswerRecord) -> list[Alike]:
    """Return the answers unlike the run alone: those with different tokens first, then by frequency."""
    kinds = [kind for kind in found.kinds if kind.difference]
    return sorted(kinds, key=lambda kind: (kind.difference.parted is None, -kind.count))


# --- drawing --------------------------------------------------------------------------------------

TALLEST = 6  # maximum number of lines of the chart
TEXT_ROWS = 3  # maximum number of lines of the answer's text


def draw(state: State, on: Canvas) -> None:
    """Draw the number of answers, the neighbours, and the differences."""
    record = state.records.get("same")
    draw_title(state, on, "The same answer among neighbours", "a runs it again")
    if record is None:
        on.say("a runs a prompt alone, and then 200 times among random neighbours.", on.muted)
        return
    draw_counter(state, on, record)
    on.entry("prompt", shorten(record.ask.prompt, on.width - on.names - 2))
    usual = state.view.temperature
    temperature = usual if record.ask.temperature is None else record.ask.temperature
    settings = f"temperature {temperature:g}, {record.ask.max_tokens} tokens at most"
    on.entries({"settings": settings, "product": product_of(record)}, on.muted)
    if not record.runs:
        return
    on.heading("Answers: hash, runs, where it differs")
    draw_kinds(on, record)
    facts = {
        "hash of": record.covers,
        "others": record.neighbours,
        "rows": record.beginnings,
        "drafts": record.drafts,
    }
    on.entries(facts, on.muted)
    on.entry("text", shorten(record.alone.text, TEXT_ROWS * (on.width - on.names - 4)))
    draw_strip(state, on, record)


def product_of(record: SameAnswerRecord) -> str:
    if record.exact:
        return f"{record.product}; engine.is_batch_invariant: no bit depends on the neighbours"
    return (
        f"{record.product}; engine.is_batch_invariant is False: bits may depend on the neighbours"
    )


def draw_counter(state: State, on: Canvas, record: SameAnswerRecord) -> None:
    """Draw the number of runs and of distinct answers."""
    words = progress(state.view, record)
    hue = on.bad if record.unlike else on.accent if record.runs else on.muted
    on.pen().put(" " + shorten(words, on.width - 2), hue, True)


def draw_kinds(on: Canvas, record: SameAnswerRecord) -> None:
    """Draw a row for each distinct answer: its hash, its number of runs, and the difference."""
    bar = on.width // 14
    most = max(kind.count for kind in record.kinds)
    kinds = [record.kinds[0], *unlike(record)]
    room = max(3, (on.height - 12) // 4)
    for i, kind in enumerate(kinds[:room]):
        pen = on.pen().put(f" {kind.answer.digest} ", bold=True).put(f"{kind.count:>6,} ")
        cells = -(-kind.count * bar // most)
        pen.put("█▒"[i > 0] * cells, on.p.fill(i + 1)).to(18 + bar)
        words = kind.difference.words if kind.difference else "as it is alone"
        pen.put(shorten(words, on.width - pen.width - 1), on.bad if kind.difference else "")
    rest = kinds[room:]
    if rest:
        runs = count(sum(kind.count for kind in rest), "run")
        on.pen().to(10).put(f"and {count(len(rest), 'answer')} more, of {runs}", on.muted)


def draw_strip(state: State, on: Canvas, record: SameAnswerRecord) -> None:
    """Draw a column for each run, whose height is the number of other requests. A cross marks a
    different answer."""
    most = state.view.engine.limits.slots - 1
    left = on.names + 1
    across = on.width - left - 1
    strips = -(-record.wanted // across)
    tall = max(1, min(TALLEST, (on.lines_left - 1) // strips - 1))
    legend = [("█", on.text, f"{most} others"), ("✗", on.bad, "not as alone")]
    on.heading("Each run: how many ran next to it", legend=legend)
    for first in range(0, len(record.runs), across):
        runs = record.runs[first : first + across]
        bars = [(run.beside / most, on.p.fill(1)) for run in runs]
        on.bars(bars, tall, left, f" {first + 1:,}", on.muted)
        marks = "".join(" ✗"[run.digest != record.alone.digest] for run in runs)
        if marks.strip():
            on.pen().to(left).put(marks, on.bad)


PAGE = Page(
    "same",
    "a",
    "Same answer",
    "one prompt alone, then 200 times among random neighbours: how many answers? (/same 50)",
    draw,
    footer=17,
    obey=obey,
    example="200",
    words=("last",),
    read=read_count("same"),
    explains=(
        (
            "hash",
            "a digest of an answer's tokens and log probabilities: another bit, another hash.",
        ),
    ),
    repeats=True,
    disturbs=True,
)
