"""A storm: threads that submit, wait and cancel on two engines at once, with listeners that do all that they must not.

    python tools/storm.py --requests 5000

A bad listener must end its own request with an error, and do nothing else: its neighbours must get what they get alone,
every owner must be told once, all slots must be free at the end, and the process must exit.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from nanobatch import Engine, Handle, Model, Sampling, Text  # noqa: E402
from parts.model.load import read_model  # noqa: E402

THREADS = 16
SHORT = Sampling(max_tokens=2, ignore_eos=True)


def fail(error: BaseException) -> None:
    raise error


# What a listener, or an `ended`, of a request of `engine` does, beside another served engine. These must not:
FORBIDDEN = {
    "step": lambda engine, other, handle: engine.step(),
    "wait": lambda engine, other, handle: engine.submit([7], SHORT).result(),
    "wait for itself": lambda engine, other, handle: engine.wait(lambda: False, timeout=60),
    "iterate": lambda engine, other, handle: list(engine.submit([7], SHORT)),
    "generate": lambda engine, other, handle: engine.generate([[1], [2]], SHORT),
    "serve": lambda engine, other, handle: engine.serving().start(),
    "step another engine": lambda engine, other, handle: other.step(),
    "wait for another engine": lambda engine, other, handle: other.submit([7], SHORT).result(timeout=60),
    "serve another engine": lambda engine, other, handle: other.serving().start(),
    "raise": lambda engine, other, handle: fail(ValueError("bad")),
    "exit": lambda engine, other, handle: sys.exit(3),
    "end a generator": lambda engine, other, handle: fail(GeneratorExit()),
    "end an iterator": lambda engine, other, handle: next(iter(())),
    "press Ctrl-C": lambda engine, other, handle: fail(KeyboardInterrupt()),
}
# And these may:
ALLOWED = {
    "nothing": lambda engine, other, handle: None,
    "look": lambda engine, other, handle: engine.snapshot(other.snapshot() and engine.snapshot()),
    "submit": lambda engine, other, handle: engine.submit([7], SHORT),
    "submit, with a listener that submits": lambda engine, other, handle: engine.submit(
        [7], SHORT, lambda handle, piece: engine.submit([7], SHORT)
    ),
    "submit to another engine": lambda engine, other, handle: other.submit([7], SHORT),
    "submit to another engine and cancel": lambda engine, other, handle: other.submit([7], SHORT).cancel(),
    "cancel itself": lambda engine, other, handle: handle.cancel(),
    "drain": lambda engine, other, handle: engine.drain("continuous"),
}
ACTS = FORBIDDEN | ALLOWED


class Owner:
    """One request: what it asks for, what its functions do, and what they heard."""

    def __init__(self, number: int, dice: random.Random, engines: list[Engine], alone: list[list[int]]):
        self.case, self.role = number % len(alone), dice.choice(["listener", "ended"])
        self.name, self.at = dice.choice(list(ACTS)), dice.randrange(1, 6)
        self.expected, self.told, self.heard, self.acted = alone[self.case], 0, 0, False
        self.engine, self.other = dice.sample(engines, 2)

    def submit(self) -> Handle:
        sampling = Sampling(max_tokens=len(self.expected), ignore_eos=True)
        return self.engine.submit([self.case, 3], sampling, self.listener, ended=self.ended)

    def listener(self, handle: Handle, piece: str) -> None:
        self.heard += 1
        if self.role == "listener" and self.heard == self.at:
            self.act(handle)

    def ended(self, handle: Handle) -> None:
        self.told += 1
        if self.role == "ended":
            self.act(handle)

    def act(self, handle: Handle) -> None:
        self.acted = True
        ACTS[self.name](self.engine, self.other, handle)

    def wrong(self, handle: Handle, was_cancelled: bool) -> str | None:
        """What is wrong with how it ended, if anything is."""
        result, acted = handle.result(timeout=60), self.acted and self.role == "listener"
        reasons = {"length"}
        if acted and self.name in FORBIDDEN:
            reasons = {"error"}
        elif acted and self.name == "cancel itself":
            reasons = {"cancelled"}
        reasons |= {"cancelled"} if was_cancelled else set()
        if result.finish_reason not in reasons:
            return f"it ended by {result.finish_reason}, not {reasons}: {result.error}"
        whole = self.expected if result.finish_reason == "length" else self.expected[: len(result.tokens)]
        if result.tokens != whole:
            return f"{result.tokens}, but alone {self.expected}"
        return None if self.told == 1 else f"its owner was told {self.told} times"


def storm(model: Model, text: Text, requests: int, seed: int = 0) -> tuple[list[str], Counter]:
    """What went wrong, and how often each act was done by each kind of function."""
    sizes = {"slots": 4, "max_len": 64, "chunk": 32}
    with Engine(model, text, **sizes) as engine:
        alone = [engine.submit([n, 3], Sampling(max_tokens=4 + n, ignore_eos=True)).result().tokens for n in range(9)]
    wrong, acts, seen, lock = [], Counter(), [], threading.Lock()

    def client(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        for n in range(number, requests, THREADS):
            owner = Owner(n, dice, engines, alone)
            handle, cancels = owner.submit(), dice.random() < 0.2
            if cancels:
                time.sleep(dice.random() * 0.02)
                handle.cancel()
            handle.result(timeout=60)
            until = time.monotonic() + 60
            while not owner.told and time.monotonic() < until:
                time.sleep(0.001)  # an owner is told just after the end
            with lock:
                seen.append(n)
                acts[owner.role, owner.name] += owner.acted
                if line := owner.wrong(handle, cancels):
                    wrong.append(f"{owner.role} {owner.name!r}: {line}")

    with Engine(model, text, **sizes) as one, Engine(model, text, **sizes) as two, one.serving(), two.serving():
        engines = [one, two]
        threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        wrong += [f"{thread.name} hangs" for thread in threads if thread.is_alive()]
        wrong += [f"request {n} is missing" for n in set(range(requests)) - set(seen)]
        until = time.monotonic() + 60  # what has been submitted by `ended` may itself submit
        while not all(is_at_rest(engine) for engine in engines) and time.monotonic() < until:
            time.sleep(0.01)
        if time.monotonic() >= until:
            wrong.append("a slot is not free, or a request has not ended")
    for engine in engines:
        engine.check()
    return wrong, acts


def is_at_rest(engine: Engine) -> bool:
    look = engine.snapshot()
    return all(slot.request is None for slot in look.slots) and look.submitted == look.finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder (default: a small random one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            from checkpoints import make_checkpoint  # it needs mlx-lm, which takes seconds to import

            path = make_checkpoint(Path(folder), seed=1)
        model, began = read_model(path), time.monotonic()
        wrong, acts = storm(model, Text(path, model.config.V), args.requests, args.seed)
    print(*sorted(set(wrong)), sep="\n")
    forbidden = sum(count for (_, name), count in acts.items() if name in FORBIDDEN)
    print(
        f"{args.requests:,} requests by {THREADS} threads in {time.monotonic() - began:.1f} s; {sum(acts.values()):,} "
        f"acts of {len(acts)} kinds, {forbidden:,} of them forbidden; {len(wrong)} wrong"
    )
    return 1 if wrong or len(acts) != 2 * len(ACTS) or not all(acts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
