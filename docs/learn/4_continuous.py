"""Chapter 4: slots, and continuous batching.

    python docs/learn/4_continuous.py

In chapter 3 a batch came and went as a whole. But nothing in the model asks for that. A sequence owns a *slot*: its
rows of the slab. It needs its own rows and no others, so it may begin and end at any step. All that has to change is
when we decide what goes into a step. We decide anew before each of them:

    plan     free slots are given to requests that wait; the others, which have a slot already, decode
    run      one forward pass: prompts and newest tokens lie side by side in it
    commit   every sequence gets its token; a sequence that has ended leaves its slot

The part that decides is a *scheduler*. This one takes 20 lines, and it knows no model and no array. It knows the rule
of chapter 3, too: "static" admits nothing while anything runs. That is one line of `plan`, and the whole difference.

    static      slot 0  ▒1██████████████████████████████████████████████▒5█████████████████████████████████████████
                slot 1  ▒2███████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒6███████████████··························
                slot 2  ▒3█████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒7████████·································
                slot 3  ▒4███████████████╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳▒8█████████································
    continuous  slot 0  ▒1██████████████████████████████████████████████··········
                slot 1  ▒2███████████████▒6███████████████························
                slot 2  ▒3█████████████▒5█████████████████████████████████████████
                slot 3  ▒4███████████████▒7████████▒8█████████····················

Compared with chapter 3 padding and ghosts have gone. A prompt goes in with the length that it has. A sequence that has
ended is no longer in the window, which names the slots that decode. So under "static", too, nothing runs in a slot that
has ended: it is *blocked* (╳) while requests wait for the batch, and *empty* (·) when none waits.
"""

import time
from collections import deque
from dataclasses import dataclass

from board import PROMPTS, Timeline, launch, load, rate, show_answers

from kv import Slab, Window
from llama import forward
from parts.device.mlx import mx
from parts.model.fit import slab_shape

SLOTS, LONGEST = 4, 128
MODEL, TEXT = load()


@dataclass
class Sequence:
    number: int
    ids: list[int]  # the prompt, and behind it the answer so far


class Scheduler:
    def __init__(self, policy: str, line: list[Sequence]):
        self.policy, self.line = policy, deque(line)
        self.running: dict[int, Sequence] = {}  # by slot

    def plan(self) -> tuple[dict[int, Sequence], dict[int, Sequence]]:
        """By slot: the sequences whose prompts go in now, and those that decode."""
        decodes = dict(sorted(self.running.items()))
        free = [slot for slot in range(SLOTS) if slot not in self.running]
        room = 0 if self.policy == "static" and self.running else len(free)
        prefills = {slot: self.line.popleft() for slot in free[: min(room, len(self.line))]}
        self.running |= prefills
        return prefills, decodes

    def commit(self, tokens: dict[int, int]) -> None:
        """Each sequence gets its token. A slot is free as soon as its sequence has ended."""
        for slot, token in tokens.items():
            ids = self.running[slot].ids
            ids.append(token)
            if token in TEXT.end_tokens or len(ids) == LONGEST:
                del self.running[slot]


def run(slab: Slab, prefills: dict[int, Sequence], decodes: dict[int, Sequence]) -> dict[int, int]:
    """One forward pass for all of them. By slot: the token that comes next."""
    ids, windows, asked = [], [], []
    for slot, s in prefills.items():
        ids += s.ids
        windows.append(Window(slab, slots=[slot], starts=[0], L=len(s.ids)))
        asked.append(len(ids) - 1)  # of a prompt, its last token
    if decodes:
        asked += range(len(ids), len(ids) + len(decodes))
        ids += [s.ids[-1] for s in decodes.values()]  # the newest token of each
        rows = [len(s.ids) - 1 for s in decodes.values()]
        windows.append(Window(slab, slots=list(decodes), starts=rows, L=1))
    tokens = mx.argmax(forward(MODEL, mx.array(ids), windows, asked), axis=-1)
    return dict(zip([*prefills, *decodes], tokens.tolist(), strict=True))


def serve(policy: str, timeline: Timeline) -> list[list[int]]:
    """All prompts, from the first step to the last: plan, run, commit."""
    prompts = [TEXT.ask(prompt) for prompt in PROMPTS]
    sequences = [Sequence(number, list(ids)) for number, ids in enumerate(prompts, 1)]
    scheduler, slab = Scheduler(policy, sequences), Slab(*slab_shape(MODEL.config, SLOTS, LONGEST, 32), MODEL.dtype)
    while scheduler.line or scheduler.running:
        prefills, decodes = scheduler.plan()
        cells = dict.fromkeys(range(SLOTS), ("blocked", 0)) if scheduler.line else {}
        cells |= {slot: ("prefill", s.number) for slot, s in prefills.items()}
        timeline.step(cells | {slot: ("decode", s.number) for slot, s in decodes.items()})
        scheduler.commit(run(slab, prefills, decodes))
    return [s.ids[len(ids) :] for s, ids in zip(sequences, prompts, strict=True)]


def main() -> None:
    for policy in ("static", "continuous"):
        timeline, began = Timeline(SLOTS), time.perf_counter()
        answers = serve(policy, timeline)
        took = rate(sum(map(len, answers)), time.perf_counter() - began)
        timeline.show(f"{policy}, {len(timeline.steps)} steps: {took}, {timeline.useful:.0f} % useful")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: a prompt of 1,000 tokens is admitted while three neighbours decode. How many tokens does that step compute,
and how many did the step before it? What do the neighbours' readers see? How much does the real scheduler let a step
cost at most, and how?
The real code answers: sched.py, Scheduler._chunks.
Next: python docs/learn/5_run_ahead.py""")


if __name__ == "__main__":
    launch(main)
