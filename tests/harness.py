"""What the engine tests share: a tap on the logits, and random schedules to drive an engine through."""

from dataclasses import dataclass, replace

import numpy as np

from nanobatch import Engine, Handle, Sampling
from sched import Chunk


class Tap:
    """Records the logits that each token of each request was chosen from: `logits[request id, index]`, (V,)."""

    def __init__(self, engine: Engine):
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        head, run, calls = engine.model.head, engine._run, []

        def tapped_head(x):
            calls.append(head(x))
            return calls[-1]

        def tapped_run(plan, scrubs, began):
            calls.clear()
            flight = run(plan, scrubs, began)
            outputs = [np.array(call) for call in calls]  # one for each chunk that emits, then the decoding rows'
            rows = {slot: row for row, slot in enumerate(dict.fromkeys(d.slot for d in plan.decodes))}
            for member in plan.emitters:
                if isinstance(member, Chunk):
                    index, logits = 0, outputs.pop(0)[0]
                else:
                    index = member.position - len(member.request.prompt) + 1
                    logits = outputs[-1][member.slot if engine.exact else rows[member.slot]]
                self.logits[member.request.id, index] = logits
            return flight

        engine.model = replace(engine.model, head=tapped_head)
        engine._run = tapped_run

    def of(self, handle: Handle) -> np.ndarray:
        """(tokens, V): what the request's tokens were chosen from."""
        return np.stack([self.logits[handle.id, index] for index in range(len(handle.tokens))])


@dataclass
class Ask:
    """A request to come: what it says, how long its answer is, and after how many steps it is cancelled."""

    prompt: list[int]
    max_tokens: int
    cancel_after: int | None = None

    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.max_tokens, ignore_eos=True)


def random_asks(
    rng: np.random.Generator, count: int, longest: int, tokens: int, cancels: float = 0.0, alike: float = 0.0
) -> list[Ask]:
    """Prompts of 1 to `longest` tokens, half of them short, with answers of 1 to `tokens`.

    Of all prompts, a share `alike` begins with the same tokens, some of them or all.
    """
    asks, opening = [], rng.integers(0, 256, longest).tolist()
    for _ in range(count):
        length = int(rng.integers(1, longest if rng.random() < 0.5 else min(longest, 12), endpoint=True))
        prompt = rng.integers(0, 256, length).tolist()
        if rng.random() < alike:
            common = int(rng.integers(1, longest, endpoint=True))
            prompt = (opening[:common] + prompt)[:longest]
        cancel = int(rng.integers(0, 20)) if rng.random() < cancels else None
        asks.append(Ask(prompt, int(rng.integers(1, tokens, endpoint=True)), cancel))
    return asks


def run_schedule(engine: Engine, asks: list[Ask], rng: np.random.Generator) -> list[Handle]:
    """Submit the asks at random moments and step until all have ended, with every invariant checked in every step."""
    waiting, handles, cancels = list(asks), [], {}
    step = 0
    while True:
        while waiting and rng.random() < 0.4:
            ask = waiting.pop(0)
            handles.append(engine.submit(ask.prompt, ask.sampling()))
            if ask.cancel_after is not None:
                cancels.setdefault(step + ask.cancel_after, []).append(handles[-1])
        for handle in cancels.pop(step, []):
            handle.cancel()
        worked = engine.step()
        engine.check()
        step += 1
        if not (worked or waiting):
            return handles
