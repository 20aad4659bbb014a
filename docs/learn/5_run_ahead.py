"""Chapter 5: prompts in chunks, and running ahead.

    python docs/learn/5_run_ahead.py

A long prompt makes its neighbours wait: chapter 4 lets it in as a whole, and no reader gets a token in that long step.
So a prompt is cut into *chunks*, one for each step, and the others decode beside it. They hardly notice. The long
prompt's own answer may begin later.

The device, too, has to wait: chapter 4 reads a step's tokens, then plans and builds the next step while the device
stands still. But the newest tokens, which the next step needs, are on the device already. So step N + 1 is started
before N's tokens are read, and Python's work hides behind the device's. The price: an answer's end is seen one step
late. By then its sequence runs once more, as a *ghost* (▚), and that token is dropped.

    device   |   run N             |   run N+1           |   run N+2
    Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...

Compared with chapter 4 the scheduler is the real one (`sched.py`). It does what ours did, and knows of chunks, of a
budget for each step, and of tokens that are planned but not yet read. `run` starts a step and answers at once. The same
requests are served three times, so that you see what either does. (Running ahead gains little on a CPU, since there the
device and Python share the cores.)
"""

import time
from collections import deque

from board import Timeline, launch, load, rate, show_answers

from kv import Slab, Window
from llama import forward
from parts.device.mlx import mx
from parts.model.fit import slab_shape
from sched import Plan, Request, Scheduler

STORY = "Once there was a fox. The fox was kind, and every day it went to the lake with a small lantern. " * 24
TALK = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "I see."}]
PROMPTS = ["Count from 3 to 20.", "What is a slot?", "Is fox in this list: owl, fox, bee?", "What is 17 + 6?"]
SLOTS, LONGEST = 3, 1024
MODEL, TEXT = load()


class Engine:
    def __init__(self, chunk: int, runs_ahead: bool):
        self.sched = Scheduler(SLOTS, LONGEST, chunk=chunk)
        self.slab = Slab(*slab_shape(MODEL.config, SLOTS, LONGEST, chunk), MODEL.dtype)
        self.newest = mx.zeros(SLOTS, mx.int32)  # by slot, on the device
        self.runs_ahead, self.timeline, self.most = runs_ahead, Timeline(SLOTS), 0
        self.flights: deque[tuple[Plan, mx.array]] = deque()  # steps that have been started, and not yet read

    def submit(self, ids: list[int]) -> Request:
        request = Request(self.sched.submitted + 1, tuple(ids), 64, time.perf_counter(), shares=False)
        self.sched.submit(request)
        return request

    def turn(self) -> bool:
        """Plan, run, commit. False if there was nothing to do."""
        plan = self.sched.plan(time.perf_counter())
        if plan:
            self.flights.append((plan, self.run(plan)))
        if commits := bool(self.flights) and (not plan or len(self.flights) > self.runs_ahead):
            self.commit(*self.flights.popleft())
        return bool(plan or commits)

    def run(self, plan: Plan) -> mx.array:  # (slots,)
        """Start a step. The answer: what each slot samples, or -1."""
        ids, windows, asked, slots, count = [], [], [], [], 0
        for c in plan.chunks:
            ids.append(mx.array(c.request.prompt[c.start : c.stop]))
            windows.append(Window(self.slab, slots=[c.slot], starts=[c.start], L=c.stop - c.start))
            count += c.stop - c.start
            if c.emits:  # the last chunk of a prompt: its last token is asked
                asked.append(count - 1)
                slots.append(c.slot)
        if decodes := sorted((d.slot, d.position) for d in plan.decodes):
            decoding = [slot for slot, _ in decodes]
            ids.append(self.newest[mx.array(decoding)])  # (B,), and Python has not read them
            windows.append(Window(self.slab, slots=decoding, starts=[row for _, row in decodes], L=1))
            asked += range(count, count + len(decodes))
            slots += decoding
        self.most = max(self.most, count + len(decodes))  # tokens in a step
        sampled = mx.full(SLOTS, -1, mx.int32)
        scores = forward(MODEL, mx.concatenate(ids), windows, asked)
        if slots:
            sampled[mx.array(slots)] = mx.argmax(scores, axis=-1).astype(mx.int32)
        self.newest = mx.where(sampled >= 0, sampled, self.newest)
        mx.async_eval(sampled, self.newest)  # start it, and wait for nothing
        return sampled

    def commit(self, plan: Plan, sampled: mx.array) -> None:
        """Read what a step has sampled, and hand it out. Here Python waits for the device."""
        tokens, now = sampled.tolist(), time.perf_counter()
        cells = {c.slot: ("prefill", c.request.id) for c in plan.chunks}
        cells |= {d.slot: ("ghost" if d.request.finish_reason else "decode", d.request.id) for d in plan.decodes}
        self.timeline.step(cells)
        emitted = [tokens[member.slot] for member in plan.emitters]
        self.sched.commit(plan, emitted, lambda _, token: "stop" if token in TEXT.end_tokens else None, now)


def serve(chunk: int, runs_ahead: bool, title: str) -> list[Request]:
    engine, began = Engine(chunk, runs_ahead), time.perf_counter()
    requests = [engine.submit(TEXT.ask(prompt)) for prompt in PROMPTS[:-1]]
    while engine.turn():
        if len(engine.timeline.steps) == 6 and len(requests) < len(PROMPTS):  # now the last one comes, a long talk
            requests.append(engine.submit(TEXT.encode_chat([*TALK, {"role": "user", "content": PROMPTS[-1]}])))
    took = rate(sum(r.committed for r in requests), time.perf_counter() - began)
    engine.timeline.show(f"{title}: {took}; a step computes {engine.most} tokens at most")
    return requests


def main() -> None:
    serve(LONGEST, False, "whole prompts, one step after the other")
    serve(64, False, "chunks of 64 tokens, one step after the other")
    requests = serve(64, True, "chunks of 64 tokens, running ahead")
    print(f"\nRequest 4, a talk of {len(requests[-1].prompt)} tokens, came after step 6. Below is its last message.")
    show_answers(TEXT, PROMPTS, [r.answer for r in requests])
    print("""
Question: the loop is whole: `turn` has a twin, `Engine.step`. What stands around it there, and what may fail here?
The real code answers: nanobatch.py, Engine.step.
Next: `Runner.run` is the twin of `run`. Now read llama.py, and then the other chapters of the book.""")


if __name__ == "__main__":
    launch(main)
