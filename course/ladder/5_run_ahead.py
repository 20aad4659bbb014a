"""Rung 5: prompts in chunks, and running ahead.

    python course/ladder/5_run_ahead.py

Rung 4 and a half cut each prompt into *chunks*, and the others decoded next to them. But it gave
every prompt a chunk in each step: ten long prompts would still make a long step. So a step has a
*budget* of tokens, and prompts share it: the one with the fewest tokens left comes first, but half is
reserved for the oldest.

The device has to wait, too: so far we read a step's tokens, then plan and build the next step while
the device is idle. But the newest tokens, which the next step needs, are on the device already. So
step N + 1 is started before N's tokens are read, and Python's work is hidden behind the device's.
The price: an answer's end is seen one step late. By then its sequence has been planned once more.
It runs as a *ghost* (▚), and that token is dropped.

    device   |   run N             |   run N+1           |   run N+2
    Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...

Compared with rung 4 and a half, the scheduler is the real one (`sched.py`). It does what ours did,
in a class of its own, and also handles a budget for each step, and tokens that are planned but not
yet read. `run` starts a step and returns at once; `commit` waits for its tokens.

The program serves the same requests twice, and prints Python's share of the time, which is the most
that running ahead can hide. A GPU works in parallel, so there nearly all of it is gained. A CPU
gains nothing (two idle cores took 0.25 s both times, and Python's share was 15 %), because Python
and the device share the cores, and MLX's queue holds too little work.
"""

import time
from collections import deque

from board import Timeline, launch, load, rate, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape
from policies import POLICIES
from request import Plan, Request
from sched import Scheduler

SENTENCE = "The fox was kind, and every day it went to the lake with a small lantern. "
STORY = ("Once there was a fox. " + SENTENCE) * 24
TALK = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "I see."}]
PROMPTS = [
    "Count from 3 to 20.",
    "What is a slot?",
    "Is fox in this list: owl, fox, bee?",
    "What is 17 + 6?",  # this one arrives later, at the end of a long conversation
]
SLOTS = 3
LONGEST = 1024
CHUNK = 64
MODEL, TEXT = load()


class Engine:
    def __init__(self, chunk: int, runs_ahead: bool):
        self.sched = Scheduler(SLOTS, LONGEST, POLICIES["continuous"], chunk=chunk)
        shape = slab_shape(MODEL.config, SLOTS, LONGEST, chunk)
        self.slab = Slab(*shape, MODEL.dtype)
        self.newest = mx.zeros(SLOTS, mx.int32)  # each slot's newest token, on the device
        self.runs_ahead = runs_ahead
        self.flights: deque[tuple[Plan, mx.array]] = deque()  # steps that are started but not read
        self.timeline = Timeline(SLOTS)
        self.most = 0  # the largest number of tokens in a step
        self.device_s = 0.0  # time that Python waited for the device

    def submit(self, ids: list[int]) -> Request:
        request = Request(
            id=self.sched.submitted + 1,
            prompt=tuple(ids),
            max_tokens=64,
            arrived=time.perf_counter(),
            prefix_cache=False,
        )
        self.sched.submit(request)
        return request

    def turn(self) -> bool:
        """Plan, run, commit. Return False if there was nothing to do."""
        plan = self.sched.plan(time.perf_counter())
        if plan:
            sampled = self.run(plan)
            self.flights.append((plan, sampled))
        in_flight = 1 if plan and self.runs_ahead else 0  # number of steps that may stay unread
        is_due = len(self.flights) > in_flight
        if is_due:
            self.commit(*self.flights.popleft())  # the oldest step
        return plan is not None or is_due

    def run(self, plan: Plan) -> mx.array:  # (n,)
        """Start a step. Return a token for each of the plan's emitters, in their order.

        The array is lazy: the device computes the tokens while Python goes on.
        """
        ids = []
        windows = []
        logits_at = []  # positions among this step's tokens
        count = 0  # number of tokens so far

        for chunk in plan.chunks:
            tokens = chunk.request.prompt[chunk.start : chunk.stop]
            window = Window(self.slab, slots=[chunk.slot], starts=[chunk.start], L=len(tokens))
            ids.append(mx.array(tokens))
            windows.append(window)
            count += len(tokens)
            if chunk.emits:  # the last chunk of a prompt yields a token
                logits_at.append(count - 1)

        if plan.decodes:
            slots = [decode.slot for decode in plan.decodes]
            rows = [decode.position for decode in plan.decodes]
            window = Window(self.slab, slots=slots, starts=rows, L=1)
            ids.append(self.newest[mx.array(slots)])  # (B,), and Python has not read them
            windows.append(window)
            logits_at += range(count, count + len(slots))
            count += len(slots)

        self.most = max(self.most, count)
        states = forward(MODEL, mx.concatenate(ids), windows, logits_at)  # (n, D)
        scores = MODEL.head(states)  # (n, V)
        sampled = mx.zeros(0)  # no tokens if no prompt ends and nothing decodes
        if logits_at:
            sampled = mx.argmax(scores, axis=-1)
            slots = [member.slot for member in plan.emitters]  # in the order of `logits_at`
            self.newest[mx.array(slots)] = sampled
        began = time.perf_counter()
        mx.async_eval(
            sampled, self.newest
        )  # a GPU starts while we go on; a CPU does most of the work here
        self.device_s += time.perf_counter() - began
        return sampled

    def commit(self, plan: Plan, sampled: mx.array) -> None:
        """Hand out the tokens of a step."""
        began = time.perf_counter()
        sampled = sampled.tolist()  # here Python waits for the device
        self.device_s += time.perf_counter() - began
        tokens = {}  # slot -> its tokens
        for member, token in zip(plan.emitters, sampled, strict=True):
            tokens[member.slot] = [token]  # with draft tokens there would be several
        self.draw(plan)
        self.sched.commit(plan, tokens, why_it_ends, time.perf_counter())

    def draw(self, plan: Plan) -> None:
        """Draw a column of the picture. A sequence that has ended by now ran as a ghost."""
        cells = {}
        for chunk in plan.chunks:
            cells[chunk.slot] = ("prefill", chunk.request.id)
        for decode in plan.decodes:
            kind = "ghost" if decode.request.finish_reason else "decode"
            cells[decode.slot] = (kind, decode.request.id)
        self.timeline.step(cells)


def why_it_ends(request: Request, token: int) -> str | None:
    return "stop" if token in TEXT.end_tokens else None


def serve(runs_ahead: bool, title: str) -> list[Request]:
    engine = Engine(CHUNK, runs_ahead)
    began = time.perf_counter()
    requests = [engine.submit(TEXT.ask(prompt)) for prompt in PROMPTS[:-1]]
    while engine.turn():
        if len(engine.timeline.steps) == 6:  # now the last one arrives, a long conversation
            question = {"role": "user", "content": PROMPTS[-1]}
            ids = TEXT.encode_chat([*TALK, question])
            requests.append(engine.submit(ids))
    seconds = time.perf_counter() - began
    written = sum(request.committed for request in requests)
    took = rate(written, len(engine.timeline.steps), seconds)
    engine.timeline.show(f"{title}: {took}; a step computes {engine.most} tokens at most")
    print(f"        Python's own share: {1 - engine.device_s / seconds:.0%} of the time")
    return requests


def main() -> None:
    warm = Engine(CHUNK, runs_ahead=False)
    warm.submit(TEXT.ask(PROMPTS[1]))
    while warm.turn():
        pass  # first steps are slow
    serve(runs_ahead=False, title="one step after the other")
    requests = serve(runs_ahead=True, title="running ahead")
    length = len(requests[-1].prompt)
    print(f"\nRequest 4, a talk of {length} tokens, came after step 6. Below is its last message.")
    show_answers(TEXT, PROMPTS, [request.answer for request in requests])
    print("""
Question: the loop is whole: `turn` has a twin, `Engine.step`. What is around it there, and what
may fail here?
The real code answers: nanobatch.py, Engine.step.
Next: python course/ladder/6_pages.py""")


if __name__ == "__main__":
    launch(main)
