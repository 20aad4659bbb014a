"""A long life in a short time: thousands of requests, a third of them cancelled, some of them
wrong, all at once.

    python tests/long/soak.py --requests 10000

Every request must end exactly once, whoever is not cancelled must get what it gets alone, every
slot must be free at the end, and memory must not grow with the number of requests: it is weighed
after each quarter of them (`weigh.py`).
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib"), str(ROOT / "tests" / "long")]

# nanobatch first: it puts a fast BLAS under MLX, before mlx-lm, which the checkpoints need, imports
# MLX.
from nanobatch import Engine, Model, QueueFull, Sampling, Text  # noqa: E402, I001
from parts.model.load import read_model  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from weigh import can_weigh, in_use  # noqa: E402

CLIENTS = 4
ROUNDS = 4
IN_USE = 2.0  # MiB by which memory may grow from the first round to the last
JUDGED = 8000  # from so many requests on: with fewer the histories that are kept are not full


@dataclass
class Report:
    ended: int = 0
    refused: int = 0
    cancelled: int = 0
    compared: int = 0
    wrong: int = 0
    reused: int = 0
    in_use: list[float] = field(default_factory=list)  # MiB after each round, if it can be weighed

    @property
    def growth(self) -> float:
        return self.in_use[-1] - self.in_use[0] if self.in_use else 0.0


def make_cases(rng: random.Random) -> list[tuple[list[int], Sampling]]:
    """Prompts and settings of many kinds, half of the prompts with a common beginning. All are
    seeded."""
    opening, cases = [rng.randrange(256) for _ in range(80)], []
    for n in range(40):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 30, 70]))]
        if n % 2:
            prompt = opening[: rng.randrange(80)] + prompt
        settings = {"max_tokens": rng.choice([1, 3, 10, 25]), "seed": n}
        if n % 3:
            settings |= {
                "temperature": rng.choice([0.5, 1.0, 2.0]),
                "top_k": rng.choice([0, 0, 5, 100]),
            }
            settings |= {
                "top_p": rng.choice([1.0, 0.9]),
                "repetition_penalty": rng.choice([1.0, 1.0, 1.4]),
            }
        if n % 5 == 0:
            settings |= {"stop": [rng.choice("aeiou "), rng.randrange(256)]}
        cases.append((prompt, Sampling(**settings)))
    return cases


BAD = [[], [272], [-1], "", [1] * 500, None, [1.5]]


def soak(model: Model, text: Text, requests: int, seed: int = 0, log=None) -> Report:
    rng, report, lock = random.Random(seed), Report(), threading.Lock()
    cases = make_cases(rng)
    sizes = {"slots": 6, "max_len": 192, "chunk": 32}
    with Engine(model, text, reuse=False, **sizes) as engine:
        alone = [engine.submit(*case).result().tokens for case in cases]
    reasons: Counter[str] = Counter()

    def client(number: int, share: int) -> None:
        own = random.Random(f"{seed}, {number}")
        open_handles = []
        for _ in range(share):
            if own.random() < 0.05:
                try:
                    engine.submit(own.choice(BAD))
                except ValueError:
                    with lock:
                        report.refused += 1
                continue
            case = own.randrange(len(cases))
            while True:
                try:
                    open_handles.append((case, engine.submit(*cases[case])))
                    break
                except QueueFull:
                    time.sleep(0.002)
            # At any moment of its life; about a quarter of them has ended by then
            if own.random() < 0.4:
                if own.random() < 0.5:
                    time.sleep(own.random() * 0.01)
                own.choice(open_handles[-2:])[1].cancel()
            while len(open_handles) > 12:
                settle(*open_handles.pop(own.randrange(len(open_handles))))
        for case, handle in open_handles:
            settle(case, handle)

    def settle(case: int, handle) -> None:
        result = handle.result(timeout=60)
        with lock:
            report.ended += 1
            reasons[result.finish_reason] += 1
            report.reused += result.metrics.cached_tokens
            if result.finish_reason == "cancelled":
                report.cancelled += 1
                report.wrong += alone[case][: len(result.tokens)] != result.tokens
            else:
                report.compared += 1
                report.wrong += result.tokens != alone[case]
            if log and report.ended % 1000 == 0:
                print(f"{report.ended:,} ended, {dict(reasons)}", file=log, flush=True)

    with Engine(model, text, max_queue=24, **sizes) as engine, engine.serving():
        for place in range(ROUNDS):
            threads = []
            for number in range(place * CLIENTS, (place + 1) * CLIENTS):
                share = requests // (ROUNDS * CLIENTS)
                share += number < requests % (ROUNDS * CLIENTS)
                threads.append(threading.Thread(target=client, args=(number, share)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if can_weigh():
                report.in_use.append(in_use())
        engine.check()
        snapshot = engine.snapshot()
        assert all(slot.phase == "free" for slot in snapshot.slots) and not snapshot.queue, (
            "a slot is not free"
        )
        assert snapshot.submitted == snapshot.finished == report.ended, (
            "a request did not end exactly once"
        )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), seed=1)
        model, text = read_model(path), Text(path, 272)
        began = time.monotonic()
        report = soak(model, text, args.requests, args.seed, log=sys.stdout)
    print(
        f"{args.requests:,} requests in {time.monotonic() - began:.0f} s: {report.ended:,} ended, {report.refused:,} "
        f"refused, {report.cancelled:,} cancelled, {report.compared:,} compared with themselves alone, "
        f"{report.wrong} wrong, {report.reused:,} prompt tokens reused, {report.growth:+.2f} MiB in use since "
        "the first quarter"
    )
    has_grown = args.requests >= JUDGED and report.growth > IN_USE
    return 1 if report.wrong or has_grown else 0


if __name__ == "__main__":
    sys.exit(main())
