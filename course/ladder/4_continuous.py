"""Rung 4: slots, and continuous batching.

    python course/ladder/4_continuous.py

On rung 3, a batch came and went as a whole. But nothing in the model requires that. A sequence owns
a *slot*: some rows of the slab. It needs these rows and no others, so it may begin and end at any
step. Only one thing has to change: we decide what goes in before each step, not before each batch.
A step has three parts:

    plan     free slots are given to requests that wait; sequences that have a slot already decode
    run      one forward pass: prompts and newest tokens lie side by side in it
    commit   every sequence gets its token; a sequence that has ended leaves its slot

The part that decides is a *scheduler*. This one has about 20 lines, and it does not know about
models or arrays. It also has the rule of rung 3: "static" admits nothing while anything runs. Two
lines of `plan` are the whole difference between the policies.

static:

slot 0  ▒1██████████████████████████████████████████████▒5█████████████████████████████████████████
slot 1  ▒2███████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒6███████████████··························
slot 2  ▒3█████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒7████████·································
slot 3  ▒4███████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒8█████████································

continuous:

slot 0  ▒1██████████████████████████████████████████████··········
slot 1  ▒2███████████████▒6███████████████························
slot 2  ▒3█████████████▒5█████████████████████████████████████████
slot 3  ▒4███████████████▒7████████▒8█████████····················

Compared with rung 3, padding and ghosts are gone. A prompt goes in with its own length. The window
of the newest tokens names only the slots that decode. So under "static" the same slots stay without
a request as on rung 3. There they computed in vain (a ghost), and here they do nothing: such a slot
is *blocked* (╳) while requests wait for the batch, and *free* (·) if none waits.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from board import PROMPTS, Timeline, launch, load, rate, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape

SLOTS = 4
LONGEST = 128
MODEL, TEXT = load()


@dataclass
class Sequence:
    number: int  # the request's number
    prompt: list[int]
    answer: list[int] = field(default_factory=list)  # tokens so far

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Plan:
    """A step that has been decided: slot -> sequence, for each slot that takes part."""

    prefills: dict[int, Sequence]  # sequences whose prompts go in
    decodes: dict[int, Sequence]  # sequences whose newest tokens go in


class Scheduler:
    def __init__(self, policy: str, line: list[Sequence]):
        self.policy = policy
        self.line = deque(line)
        self.running: dict[int, Sequence] = {}  # slot -> sequence

    def plan(self) -> Plan:
        """Let running sequences decode. Then give free slots to waiting ones."""
        decodes = dict(sorted(self.running.items()))  # neighbouring slots share one product
        free = [slot for slot in range(SLOTS) if slot not in self.running]
        if self.policy == "static" and self.running:
            free = []  # the whole difference between the policies
        prefills = {}
        for slot in free:
            if self.line:
                prefills[slot] = self.line.popleft()
        self.running |= prefills
        return Plan(prefills, decodes)

    def commit(self, tokens: dict[int, int]) -> None:
        """Give each sequence its token. A slot is free as soon as its sequence has ended."""
        for slot, token in tokens.items():
            sequence = self.running[slot]
            sequence.answer.append(token)
            if token in TEXT.end_tokens or sequence.length == LONGEST:
                del self.running[slot]


def run(slab: Slab, plan: Plan) -> dict[int, int]:
    """Run one forward pass for all of them. Return slot -> next token."""
    ids = []
    windows = []
    logits_at = []  # indices into `ids`
    for slot, sequence in plan.prefills.items():
        ids += sequence.prompt
        window = Window(slab, slots=[slot], starts=[0], L=sequence.length)
        windows.append(window)
        logits_at.append(len(ids) - 1)  # the last token of the prompt

    rows = []
    for sequence in plan.decodes.values():
        ids.append(sequence.answer[-1])
        rows.append(sequence.length - 1)  # all tokens before the newest are in the slab
        logits_at.append(len(ids) - 1)
    if plan.decodes:
        window = Window(slab, slots=list(plan.decodes), starts=rows, L=1)
        windows.append(window)

    states = forward(MODEL, mx.array(ids), windows, logits_at)  # (n, D)
    scores = MODEL.head(states)  # (n, V)
    tokens = mx.argmax(scores, axis=-1).tolist()
    slots = [*plan.prefills, *plan.decodes]  # in the order of `logits_at`
    return dict(zip(slots, tokens, strict=True))


def draw(timeline: Timeline, plan: Plan, waiting: int) -> None:
    """Draw a column of the picture: what each slot does in this step."""
    cells = {}
    for slot in range(SLOTS):
        if slot in plan.prefills:
            cells[slot] = ("prefill", plan.prefills[slot].number)
        elif slot in plan.decodes:
            cells[slot] = ("decode", plan.decodes[slot].number)
        elif waiting:
            cells[slot] = ("blocked", 0)
    timeline.step(cells)


def serve(policy: str, timeline: Timeline) -> list[list[int]]:
    """Plan, run and commit, until all prompts are answered."""
    sequences = []
    for number, prompt in enumerate(PROMPTS, 1):
        sequences.append(Sequence(number, TEXT.ask(prompt)))
    scheduler = Scheduler(policy, sequences)
    shape = slab_shape(MODEL.config, SLOTS, LONGEST, 32)
    slab = Slab(*shape, MODEL.dtype)
    while scheduler.line or scheduler.running:
        plan = scheduler.plan()
        draw(timeline, plan, waiting=len(scheduler.line))
        tokens = run(slab, plan)
        scheduler.commit(tokens)
    return [sequence.answer for sequence in sequences]


def main() -> None:
    for policy in ("static", "continuous"):
        timeline = Timeline(SLOTS)
        began = time.perf_counter()
        answers = serve(policy, timeline)
        seconds = time.perf_counter() - began
        written = sum(len(answer) for answer in answers)
        took = rate(written, len(timeline.steps), seconds)
        timeline.show(f"{policy}, {took}, {timeline.useful:.0f} % useful")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: a prompt of 1,000 tokens is admitted while three neighbours decode. How many tokens does
that step compute, and how many did the step before it? What do the neighbours' readers see? How
much does the real scheduler let a step cost at most, and how?
The real code answers: sched.py, Scheduler._chunks.
Next: python course/ladder/4b_chunks.py""")


if __name__ == "__main__":
    launch(main)
