"""A soak test of the engine: about a third of the requests are cancelled, some are invalid.

Every request ends exactly once, each valid one that is not cancelled gets the answer it gets alone, and all
slots are free at the end. Memory is measured after each ninth of the requests, and must not grow
with their number (`serve_memory.py`). The soak over HTTP uses `run_rounds` and `growth`, too
(`tests/server/test_soak.py`).
"""

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from harness import check
from long_forms import IS_LONG, number_of
from serve_memory import Weight, can_weigh, weigh

from nanobatch import Engine, Handle, Model, QueueFull, SamplingParams, Tokenizer

SOAK = number_of("SOAK", 0) or 10_000 * IS_LONG  # requests in the long form; 0 means the short form
# With fewer requests the kept histories are not full, and memory still grows
JUDGED = 8000
ROUNDS = 9  # of the long form
IN_USE = 2.0  # MiB by which memory may grow (`growth`)


def run_rounds(
    client: Callable[[Iterator[int]], None],
    requests: int,
    clients: int,
    weigh: Callable[[], Weight | None],
    rounds: int = ROUNDS,
) -> list[Weight]:
    """Distribute the requests over client threads. Return the memory after each round, or [] where it cannot
    be measured."""
    weights = []
    for place in range(rounds):
        numbers = iter(range(requests * place // rounds, requests * (place + 1) // rounds))
        threads = [threading.Thread(target=client, args=[numbers]) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if can_weigh():
            weights.append(weigh())
    return weights


def growth(weights: list[Weight]) -> Weight:
    """Return the growth of the bytes in use from an early round to the last, and that of the resident set from
    the second third of the rounds to the last third, by their medians.

    The resident set rises and falls by 20 MiB where the bytes in use do not change, because glibc has an arena
    for each thread, and one used byte keeps its page. It rises most in the first third.
    """
    if len(weights) < 2:
        return Weight(0.0, 0.0)
    third = max(1, len(weights) // 3)
    before, after = (
        statistics.median(weight.resident for weight in part)
        for part in (weights[-2 * third : -third], weights[-third:])
    )
    # The first of nine rounds still fills the histories
    early = weights[len(weights) // ROUNDS]
    return Weight(weights[-1].in_use - early.in_use, after - before)


def make_cases(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Return seeded prompts and settings of many kinds. Half of the prompts have a common prefix."""
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
        cases.append((prompt, SamplingParams(**settings)))
    return cases


BAD = [[], [272], [-1], "", [1] * 500, None, [1.5]]


def soak(model: Model, text: Tokenizer, requests: int, seed: int = 0) -> Counter[str]:
    """Submit random requests from several threads, cancel some, and compare each answer with that of the
    request alone. Return the counts: refused, ended, cancelled, compared, wrong."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    cases = make_cases(random.Random(seed))
    sizes = {"slots": 6, "max_len": 192, "chunk": 32}
    with Engine(model, text, prefix_cache=False, **sizes) as engine:
        alone = [engine.submit(*case).result().tokens for case in cases]

    def client(numbers: Iterator[int]) -> None:
        open_handles: list[tuple[int, Handle]] = []
        for number in numbers:
            dice = random.Random(f"{seed}, {number}")
            if dice.random() < 0.05:
                try:
                    engine.submit(dice.choice(BAD))
                except ValueError:
                    with lock:
                        counts["refused"] += 1
                continue
            case = dice.randrange(len(cases))
            open_handles.append((case, submit(*cases[case])))
            # Cancel at a random moment; about a quarter of the requests has finished by then
            if dice.random() < 0.4:
                if dice.random() < 0.5:
                    time.sleep(dice.random() * 0.01)
                dice.choice(open_handles[-2:])[1].cancel()
            while len(open_handles) > 12:
                settle(*open_handles.pop(dice.randrange(len(open_handles))))
        for case, handle in open_handles:
            settle(case, handle)

    def submit(prompt: list[int], sampling: SamplingParams) -> Handle:
        while True:
            try:
                return engine.submit(prompt, sampling)
            except QueueFull:
                time.sleep(0.002)

    def settle(case: int, handle: Handle) -> None:
        result = handle.result(timeout=60)
        expected = alone[case]
        is_cancelled = result.finish_reason == "cancelled"
        if is_cancelled:
            expected = expected[: len(result.tokens)]
        with lock:
            counts["ended"] += 1
            counts["cancelled" if is_cancelled else "compared"] += 1
            counts["wrong"] += result.tokens != expected

    with Engine(model, text, max_queue=24, **sizes) as engine, engine.serving():
        weights = run_rounds(client, requests, 4, weigh)
        check(engine)
        snapshot = engine.snapshot()
    assert all(slot.phase == "free" for slot in snapshot.slots) and not snapshot.queue
    assert (
        snapshot.submitted == snapshot.finished == counts["ended"] == requests - counts["refused"]
    )
    assert requests < JUDGED or growth(weights).in_use < IN_USE, weights
    return counts
