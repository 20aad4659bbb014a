"""Models with states in random batches: chunks, forks of running prompts, drafts, cancels, several answers to
one prompt, numbers that are not finite, and restarts with a slot cache. Each answer has the same bits as when
its request runs alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from checkpoints import make_checkpoint
from harness import Tap, check, exactly
from long_forms import number_of
from parity import QWEN3_5, QWEN3_5_MOE
from random_batches import Bold

from kernels.device import mx
from models.load import read_model
from models.memory import state_nbytes
from nanobatch import Engine, Handle, Model, SamplingParams, Tokenizer
from policies import POLICIES

ROUNDS = number_of("STATES", 3)  # per model
BROKEN = 255  # a token whose embedding is not finite
LONGEST = 320
SHAPES = {
    "dense": QWEN3_5,
    "experts": QWEN3_5_MOE | {"num_hidden_layers": 2, "full_attention_interval": 2},
}

Alone = Callable[[tuple[int, ...], SamplingParams], tuple[Handle, np.ndarray | None]]


class Count(NamedTuple):
    compared: int = 0  # number of logit vectors
    differ: tuple[str, ...] = ()  # a sentence for each answer that differs
    restored: int = 0  # prompts that started from a checkpoint
    reread: int = 0  # prompt tokens prefilled again
    wrong: int = 0  # rejected draft tokens
    cancelled: int = 0
    failed: int = 0  # requests with numbers that are not finite
    from_disk: int = 0  # tokens restored from disk

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


def test_random_states(tmp_path):
    """NANOBATCH_STATES=175 runs the long form: 20,000 comparisons."""
    found = sum((random_states(name, tmp_path / name, ROUNDS) for name in SHAPES), Count())
    print(found._replace(differ=len(found.differ)))
    assert not found.differ
    assert all(found._replace(differ=True)), f"{found}: something was not tried"


def random_states(name: str, folder: Path, rounds: int) -> Count:
    shape = SHAPES[name] | {
        "quantize": lambda module: None if "conv1d" in module or "embed" in module else (4, 32)
    }
    place = make_checkpoint(folder / "model", seed=9, **shape)
    model, text = read_model(place), Tokenizer(place, 272)
    weight = model.table.weight
    weight[BROKEN] = mx.nan
    mx.eval(weight)
    model = replace(model, table=model.table._replace(weight=weight))
    total = Count()
    sizes = {"slots": 1, "chunk": 64, "max_len": LONGEST, "prefix_cache": False, "speculate": 0}
    with Engine(model, text, **sizes) as lonely:
        alone = remembering(lonely)
        for number in range(rounds):
            rng = np.random.default_rng(number)
            cache = folder / f"slots{number // 2}" if rng.random() < 0.7 or number < 2 else None
            played = play(model, text, alone, cache, rng, number // 2)
            total += played._replace(
                differ=tuple(f"round {number}: {each}" for each in played.differ)
            )
    return total


def remembering(engine: Engine) -> Alone:
    """Return a function that runs a request on this engine, and caches the result."""
    tap, known = Tap(engine), {}

    def ask(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[Handle, np.ndarray | None]:
        key = prompt, sampling.max_tokens, sampling.temperature, sampling.seed
        if key not in known:
            handle = engine.submit(prompt, sampling)
            handle.result()
            known[key] = handle, tap.of(handle) if handle.tokens else None
            tap.logits.clear()
        return known[key]

    return ask


def play(
    model: Model,
    text: Tokenizer,
    alone: Alone,
    cache: Path | None,
    rng: np.random.Generator,
    topic: int,
) -> Count:
    """Run one round. Each pair of rounds takes its prompts from the same texts, so that the second finds what
    the first has saved."""
    stems = np.random.default_rng(1000 + topic).integers(0, BROKEN, (3, 150)).tolist()
    most = int(rng.choice([0, 3, 15]))
    places = int(rng.integers(0, 9))
    options = {
        "slots": int(rng.choice([1, 2, 3, 4, 6])),
        "chunk": int(rng.choice([32, 64])),
        "budget": int(rng.choice([40, 100, 300])),
        "policy": str(rng.choice([*POLICIES])),
        "run_ahead": bool(rng.random() < 0.7),
        "speculate": Bold(most, rng) if most else 0,
        "state_memory": None if rng.random() < 0.5 else places * state_nbytes(model.config, 1),
        "slot_cache": cache and f"{cache}:1G",
    }
    asked: list[tuple[Handle, tuple[int, ...]]] = []
    cancelled = 0
    with Engine(model, text, max_len=LONGEST, **options) as engine:
        tap = Tap(engine)
        for _ in range(9):
            prompt = drawn(stems, asked, rng)
            for seed in range(int(rng.choice([1, 1, 1, 2, 3]))):  # number of choices
                temperature = 0.9 if rng.random() < 0.3 else 0.0
                sampling = exactly(int(rng.integers(1, 12)), seed=seed, temperature=temperature)
                asked.append((engine.submit(prompt, sampling), prompt))
            for _ in range(int(rng.integers(0, 7))):
                engine.step()
                check(engine)
            going = [handle for handle, _ in asked if not handle.finish_reason]
            if going and rng.random() < 0.25:
                going[int(rng.integers(len(going)))].cancel()
                cancelled += 1
        while engine.step():
            check(engine)
        counts = engine.snapshot().states
    total = Count(restored=counts.restored, cancelled=cancelled)
    for handle, prompt in asked:
        total += compared(handle, tap, *alone(prompt, handle.sampling))
    return total


def drawn(
    stems: list[list[int]], asked: list[tuple[Handle, tuple[int, ...]]], rng: np.random.Generator
) -> tuple[int, ...]:
    """Return part of a text or of an earlier conversation, followed by something new."""
    text = stems[int(rng.integers(len(stems)))]
    said = [
        [*prompt, *handle.tokens] for handle, prompt in asked if handle.finish_reason == "length"
    ]
    if said and rng.random() < 0.4:
        text = said[int(rng.integers(len(said)))]
    kept = text[: int(rng.integers(1, len(text) + 1))] if rng.random() < 0.6 else text
    new = rng.integers(0, BROKEN, int(rng.integers(0, 25))).tolist()
    if rng.random() < 0.1:
        new = [*new, BROKEN, *new[:5]]
    return (*kept[:250], *new)


def compared(handle: Handle, tap: Tap, right: Handle, logits: np.ndarray | None) -> Count:
    if handle.finish_reason == "cancelled":
        return Count()
    m, many = handle.metrics, len(handle.tokens)
    differ = []
    if (handle.tokens, handle.finish_reason) != (right.tokens, right.finish_reason):
        differ = [
            f"request {handle.id}: {handle.tokens}, {handle.finish_reason}; alone {right.tokens}"
        ]
    elif many and not np.array_equal(tap.of(handle), logits):
        differ = [f"request {handle.id}, {m.cached_tokens} tokens cached: different logits"]
    failed = handle.finish_reason == "error"
    from_disk = m.cached_tokens if m.cached_from == "disk" else 0
    return Count(
        many,
        tuple(differ),
        0,
        m.reread_tokens,
        m.draft_tokens - m.accepted_tokens,
        0,
        failed,
        from_disk,
    )
