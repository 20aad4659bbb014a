"""A storm: threads that submit, wait and cancel on two engines at once, whose `on_commit` does all
that it must not.

    python tests/long/storm.py --requests 5000

Whatever the hooks do, each request must get what it gets alone, what they raise must be noted, all
slots must be free at the end, and the process must exit.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from nanobatch import Engine, Handle, Model, Sampling, Text  # noqa: E402
from parts.api.loop import Loop  # noqa: E402
from parts.model.load import read_model  # noqa: E402

THREADS = 16
SHORT = Sampling(max_tokens=2, ignore_eos=True)


def fail(error: BaseException) -> None:
    raise error


# What an `on_commit` of `engine` does, beside another served engine. These fail, and are noted as
# faults:
FAILS = {
    "wait": lambda engine, other: engine.submit([7], SHORT).result(),
    "iterate": lambda engine, other: list(engine.submit([7], SHORT)),
    "generate": lambda engine, other: engine.generate([[1], [2]], SHORT),
    "serve": lambda engine, other: engine.serving().start(),
    "raise": lambda engine, other: fail(ValueError("bad")),
    "exit": lambda engine, other: sys.exit(3),
    "end a generator": lambda engine, other: fail(GeneratorExit()),
    "end an iterator": lambda engine, other: next(iter(())),
    "press Ctrl-C": lambda engine, other: fail(KeyboardInterrupt()),
}
# And these do not:
DOES = {
    "nothing": lambda engine, other: None,
    "step": lambda engine, other: engine.step(),
    "step another engine": lambda engine, other: other.step(),
    "look": lambda engine, other: engine.snapshot(other.snapshot() and engine.snapshot()),
    "submit": lambda engine, other: engine.submit([7], SHORT),
    "submit to another engine": lambda engine, other: other.submit([7], SHORT),
    "submit to another engine and cancel": lambda engine, other: other.submit([7], SHORT).cancel(),
    "drain": lambda engine, other: engine.drain("continuous"),
}
ACTS = FAILS | DOES


class Hook:
    """One engine's `on_commit`. In one of four calls it does something, in the thread that
    serves."""

    def __init__(self, engine: Engine, loop: Loop, other: Engine, seed: str):
        self.engine, self.loop, self.other = engine, loop, other
        self.dice, self.acts = random.Random(seed), Counter()
        engine.on_commit = self

    def __call__(self, handles) -> None:
        if not self.loop.is_here or self.dice.random() > 0.25:
            return  # a thread that cancels, or serves the other engine, may wait, and would
        name = self.dice.choice(list(ACTS))
        self.acts[name] += 1
        ACTS[name](self.engine, self.other)


def check(handle: Handle, expected: list[int], was_cancelled: bool) -> str | None:
    """What is wrong with how it ended, if anything is."""
    result = handle.result(timeout=60)
    reasons = {"length", "cancelled"} if was_cancelled else {"length"}
    if result.finish_reason not in reasons:
        return f"it ended by {result.finish_reason}, not {reasons}: {result.error}"
    whole = expected if result.finish_reason == "length" else expected[: len(result.tokens)]
    return None if result.tokens == whole else f"{result.tokens}, but alone {expected}"


def storm(model: Model, text: Text, requests: int, seed: int = 0) -> tuple[list[str], Counter]:
    """What went wrong, and how often each act was done."""
    sizes = {"slots": 4, "max_len": 64, "chunk": 32}
    with Engine(model, text, **sizes) as engine:
        alone = [
            engine.submit([n, 3], Sampling(max_tokens=4 + n, ignore_eos=True)).result().tokens
            for n in range(9)
        ]
    wrong, seen, lock = [], [], threading.Lock()

    def client(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        for n in range(number, requests, THREADS):
            case, engine = n % len(alone), dice.choice(engines)
            sampling = Sampling(max_tokens=len(alone[case]), ignore_eos=True)
            handle, cancels = engine.submit([case, 3], sampling), dice.random() < 0.2
            if cancels:
                time.sleep(dice.random() * 0.02)
                handle.cancel()
            line = check(handle, alone[case], cancels)
            with lock:
                seen.append(n)
                if line:
                    wrong.append(line)

    with Engine(model, text, **sizes) as one, Engine(model, text, **sizes) as two:
        engines, loops = [one, two], [one.serving().start(), two.serving().start()]
        hooks = [Hook(one, loops[0], two, f"{seed} one"), Hook(two, loops[1], one, f"{seed} two")]
        threads = [
            threading.Thread(target=client, args=(number,), daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        wrong += [f"{thread.name} hangs" for thread in threads if thread.is_alive()]
        wrong += [f"request {n} is missing" for n in set(range(requests)) - set(seen)]
        one.on_commit = two.on_commit = None
        until = time.monotonic() + 60
        while not all(is_at_rest(engine) for engine in engines) and time.monotonic() < until:
            time.sleep(0.01)
        if time.monotonic() >= until:
            wrong.append("a slot is not free, or a request has not ended")
        wrong += ["a loop does not stop" for loop in loops if not loop.stop(30)]
    for engine in engines:
        engine.check()
    acts = sum((hook.acts for hook in hooks), Counter())
    faults = sum(engine.snapshot().seen.faults for engine in engines)
    if faults < sum(acts[name] for name in FAILS if name != "serve"):
        wrong.append(f"only {faults} faults are noted")
    return wrong, acts


def is_at_rest(engine: Engine) -> bool:
    look = engine.snapshot()
    return all(slot.request is None for slot in look.slots) and look.submitted == look.finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint's folder (default: a small random one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            # It needs mlx-lm, which takes seconds to import
            from checkpoints import make_checkpoint

            path = make_checkpoint(Path(folder), seed=1)
        model, began = read_model(path), time.monotonic()
        wrong, acts = storm(model, Text(path, model.config.V), args.requests, args.seed)
    print(*sorted(set(wrong)), sep="\n")
    failed = sum(count for name, count in acts.items() if name in FAILS)
    print(
        f"{args.requests:,} requests by {THREADS} threads in {time.monotonic() - began:.1f} s; {sum(acts.values()):,} "
        f"acts of {len(acts)} kinds, {failed:,} of them fail; {len(wrong)} wrong"
    )
    return 1 if wrong or len(acts) != len(ACTS) else 0


if __name__ == "__main__":
    sys.exit(main())
