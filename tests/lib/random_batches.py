"""Compare random requests in batches with the same requests alone, and count the logit vectors that differ in a bit.

The batches are those of `verify.py` (`benchmarks/random_neighbours.py`). Everything that could matter is
random: the model's shape, the number of slots, chunk, budget, policy, arrival times, shared prefixes,
cancels, conversations that continue, and the previous content of the slots. In most schedules a neighbour
with a prompt of up to 1,600 tokens decodes at the same time, since long sums differ most. The engine that
runs a request alone has a different number of slots, chunk and budget, and prefills each answer once more
as part of a prompt.

The matrix product is fixed per process, so each of its forms runs in a separate process: `python
tests/lib/random_batches.py SCHEDULES` with NANOBATCH_BLAS.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels import device  # imported first, as in our programs
from kernels.device import mx

# isort: split
import numpy as np
from checkpoints import make_checkpoint
from harness import Ask, Tap, check, random_asks
from long_forms import IS_LONG, number_of
from parity import CONFIGS, GEMMA4, GPT_OSS, LFM2, QWEN3_5, QWEN3_5_MOE

from benchmarks.random_neighbours import RandomBatch
from kernels import library
from models.load import read_model
from nanobatch import Engine, Handle, Model, SamplingParams, Tokenizer
from policies import POLICIES
from prompt_lookup import Drafter
from request import Plan, Request

# The slots are longer than the original length, so all sequences use the long factors.
LONGROPE = {
    "original_max_position_embeddings": 125,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1 + n / 8 for n in range(16)],
        "long_factor": [1.0 + n for n in range(16)],
    },
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "quantize": lambda module: (4, 32) if "switch_mlp" in module else None,
}
# 1 to 8 query heads per key head, heads of 12 to 128; most models are quantized. The short form uses the
# first three, and with activations of 8 bits four of the quantized ones
SHAPES = [
    QWEN3_5 | {"quantize": lambda name: None if "conv1d" in name else (4, 32)},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "dtype": mx.bfloat16},
    {
        "model_type": "gemma2",
        "num_key_value_heads": 4,
        "hidden_size": 96,
        "head_dim": 24,
        "sliding_window": 50,
        "quantize": lambda module: (8, 32),
    },
    QWEN3_5_MOE | {"quantize": lambda name: None if "conv1d" in name else (8, 32)},
    {"model_type": "qwen3_moe", "num_key_value_heads": 1, "head_dim": 24, **EXPERTS},
    {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "dtype": mx.float16,
        "quantize": lambda module: (4, 32),
        **LONGROPE,
    },
    {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 128},
    {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "hidden_size": 48,
        "sliding_window_pattern": 2,
        "sliding_window": 70,
        "dtype": mx.bfloat16,
    },
    {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 100,
        "intermediate_size": 1030,
    },
    # Widths that are not multiples of a power of two: a BLAS treats the last rows and columns of such a
    # product differently.
    {
        "num_key_value_heads": 1,
        "head_dim": 12,
        "hidden_size": 36,
        "intermediate_size": 33,
        "vocab_size": 275,
        "dtype": mx.float16,
    },
    {
        "model_type": "lfm2",
        "quantize": lambda name: None if "conv.conv" in name else (4, 32),
        **LFM2,
    },
    {
        "model_type": "gemma4_text",
        "quantize": lambda name: None if "layer_scalar" in name else (4, 32),
        **GEMMA4,
        "hidden_size_per_layer_input": 32,
    },
    {
        **GPT_OSS,
        "quantize": lambda name: ("mxfp4", 32) if ".experts." in name else None,
        "dtype": mx.bfloat16,
    },
    {"model_type": "olmo2", "num_key_value_heads": 2, "head_dim": 20},
    {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0],
        "dtype": mx.bfloat16,
        "quantize": lambda module: (6, 32) if "mlp" in module else (3, 64),
        "intermediate_size": 128,
    },
    CONFIGS["granitemoehybrid, without positions, 8 bits"],
    CONFIGS["ministral3, tied, 4 bits"],
    CONFIGS["olmo3, yarn in full layers, 4 bits"],
]


SCHEDULES = number_of("COMPANIES", 12)


class Count(NamedTuple):
    compared: int  # logit vectors
    differ: tuple[str, ...]  # one sentence for each logit vector that differs
    # Tokens whose rows were reused from another request, or from the previous turn of a conversation
    reused: int
    # Logit vectors compared while a neighbour with more rows than the request was in the batch
    beside: int
    # Logit vectors of answers that were prefilled as prompts, so that rows of a chunk are compared with
    # rows that were decoded one by one
    read: int
    masked: int  # logit vectors of requests under a grammar
    right: int  # draft tokens that were accepted
    wrong: int  # draft tokens that were rejected

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


NONE = Count(0, (), 0, 0, 0, 0, 0, 0)

# Each forbids most bytes, and some can end in several places.
GRAMMARS = [
    {"regex": "[a-z ]{1,12}[.!]"},
    {"choice": ["yes", "no", "perhaps", "it is hard to say"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9}},
    {"lark": 'start: "<" word+ ">"\nword: /[A-Z][a-z]*/ " "'},
]


def make_models(
    folder: Path, activations: int = 32, most: int | None = None
) -> list[tuple[Model, Tokenizer]]:
    """Create the first `most` models. With activations of 8 bits, only those with quantized weights."""
    shapes = [shape for shape in SHAPES if activations == 32 or "quantize" in shape][:most]
    folders = [make_checkpoint(folder / str(i), seed=i, **shape) for i, shape in enumerate(shapes)]
    models = [read_model(each, activations=activations) for each in folders]
    return [
        (model, Tokenizer(each, model.config.V))
        for each, model in zip(folders, models, strict=True)
    ]


def random_sizes(rng: np.random.Generator, is_long: bool, slots: int) -> dict:
    return {
        "slots": slots,
        "max_len": 1792 if is_long else 192,
        "chunk": int(rng.choice([32, 64, 64, 96, 128])),
        "budget": int(rng.choice([1, 64, 200, 400, 1_000_000])),
    }


def count(models: list[tuple[Model, Tokenizer]], seed: int, rounds: int = 4) -> Count:
    """Run random schedules one after another on the same engine, and their requests alone on another engine
    with different slots, chunk and budget."""
    rng = np.random.default_rng(seed)
    model, text = models[seed % len(models)]
    slots = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 11, 16, 33]))
    is_long = slots > 1 and rng.random() < 0.7
    policy = "continuous" if is_long else [*POLICIES][seed // len(models) % len(POLICIES)]
    long_prompt = rng.integers(0, 256, 1600).tolist() * is_long
    crowded = random_sizes(rng, is_long, slots)
    lonely = random_sizes(rng, is_long, int(rng.choice([1, 1, 2, 7])))
    total = NONE
    most = int(rng.choice([0, 1, 5]))
    speculate = Bold(most, rng) if most else 0
    run_ahead = bool(rng.random() < 0.7)
    with Engine(
        model, text, policy=policy, run_ahead=run_ahead, speculate=speculate, **crowded
    ) as engine:
        # Fill the slots with what an earlier request might have left
        length = engine.runner.slab.length
        for array in engine.runner.slab.arrays:
            shape = array[:, :, :length].shape
            array[:, :, :length] = mx.random.normal(shape, key=mx.random.key(seed)) * 3
        for states in engine.runner.slab.states:
            count = states.places.size(states.heads)
            states.memory[:count] = mx.random.normal([count], key=mx.random.key(seed)) * 3
        by_formula = model if seed % 2 == 0 else replace(model, attention="formula")
        with Engine(by_formula, text, prefix_cache=False, speculate=0, **lonely) as alone:
            taps = Tap(engine), Tap(alone)
            for turn in range(rounds):
                where = f"schedule {seed}, round {turn}, model {seed % len(models)}, {policy}"
                far = int(130 + 1470 * rng.random() ** 2)
                try:
                    played = play(engine, alone, taps, long_prompt[:far], rng)
                except BaseException as error:
                    error.add_note(f"It was {where}.")
                    raise
                told = tuple(f"{where}, {each}" for each in played.differ)
                total += played._replace(differ=told)
    return total


class Bold(Drafter):
    """The engine's drafter, but where it finds no draft, it repeats the newest token, because random models
    repeat themselves."""

    def __init__(self, most: int, rng: np.random.Generator):
        super().__init__(most)
        self.rng = rng

    def __call__(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        found = super().__call__(decoding, left)
        left -= sum(map(len, found.values()))
        for request in decoding:
            most = min(left, request.max_tokens - request.planned - 1, 3)
            # After numbers that are not finite, a request has no draft source
            is_open = request.drafting.source and request.planned == request.committed
            if most > 0 and request.id not in found and is_open:
                found[request.id] = (request.answer[-1],) * most
                left -= most
        return found

    def should_read_now(self, plan: Plan) -> bool:
        return bool(self.rng.random() < 0.7)


def play(
    engine: Engine,
    other: Engine,
    taps: tuple[Tap, Tap],
    long_prompt: list[int],
    rng: np.random.Generator,
) -> Count:
    """Run one schedule on one engine, and each of its requests alone on the other."""
    asks = drawn(rng, 4)
    far = (
        engine.submit(long_prompt, SamplingParams(max_tokens=120, ignore_eos=True))
        if long_prompt
        else None
    )
    while far and not far.tokens:
        engine.step()
        if far.finish_reason:
            raise RuntimeError(far.error)
    pairs = ask_in_batch(engine, asks, rng)
    going_on = [next_turn(handle, prompt, rng) for handle, prompt in pairs]
    pairs += ask_in_batch(engine, [Ask(prompt, 6) for prompt in going_on if prompt], rng)
    if far:
        far.cancel()
    while engine.step():
        pass  # let the last neighbours finish
    if far and rng.random() < 0.1:
        pairs.append((far, long_prompt))
    total = NONE
    for handle, prompt in pairs:
        total += compare(handle, prompt, other, taps, is_beside=far and handle is not far)
    return total


def drawn(rng: np.random.Generator, count: int) -> list[Ask]:
    """Return random requests. Most have a common prefix, and some have a grammar."""
    asks = random_asks(rng, count, longest=120, tokens=8, alike=0.6)
    for ask in asks:
        if rng.random() < 0.25:
            ask.grammar = GRAMMARS[int(rng.integers(len(GRAMMARS)))]
    return asks


def ask_in_batch(
    engine: Engine, asks: list[Ask], rng: np.random.Generator
) -> list[tuple[Handle, list[int]]]:
    """Submit requests in the random batches of `verify.py`, among neighbours that arrive, finish and are
    cancelled. Check every invariant after every step. Return the handles with their prompts."""
    waiting, pairs = [*asks], []

    def ask() -> Handle:
        asked = waiting.pop()
        pairs.append((engine.submit(asked.prompt, asked.sampling()), asked.prompt))
        return pairs[-1][0]

    def meet() -> Handle:
        (neighbour,) = drawn(rng, 1)
        return engine.submit(neighbour.prompt, neighbour.sampling())

    batch = RandomBatch(engine, Random(int(rng.integers(2**32))), ask, meet)
    while waiting or batch.open:
        batch.arrive(len(waiting))
        engine.step()
        check(engine)
        batch.leave()
    return pairs


def compare(
    handle: Handle, prompt: list[int], other: Engine, taps: tuple[Tap, Tap], is_beside: bool
) -> Count:
    """Compare a request with the same request alone on the other engine, and its answer with the same
    tokens prefilled there as a prompt."""
    crowded, lonely = taps
    many = min(len(handle.tokens), 10)
    alone = other.submit(prompt, replace(handle.sampling, max_tokens=max(1, many)))
    assert alone.result().metrics.cached_tokens == 0, "the other engine reuses rows"
    name = f"request {handle.id} ({len(prompt)} tokens, {handle.metrics.cached_tokens} reused)"
    found = []
    for index in range(many):
        ours, right = crowded.logits[handle.id, index], lonely.logits[alone.id, index]
        found += difference(f"{name}, token {index}", ours, right)
        if handle.tokens[index] != alone.tokens[index]:
            many = index + 1  # from here on the answers are different
            break
    beside = many if is_beside else 0
    masked = many if handle.sampling.grammar else 0
    m = handle.metrics
    wrong = m.draft_tokens - m.accepted_tokens
    total = Count(many, tuple(found), m.cached_tokens, beside, 0, masked, m.accepted_tokens, wrong)
    if many > 1:
        # The same answer as a prompt: its rows come from a chunk instead of single decode steps
        said = [*prompt, *handle.tokens[: many - 1]]
        whole = other.submit(said, SamplingParams(max_tokens=1, ignore_eos=True))
        whole.result()
        ours, right = crowded.logits[handle.id, many - 1], lonely.logits[whole.id, 0]
        told = difference(f"{name}, token {many - 1}, read as a prompt", ours, right)
        total += Count(1, tuple(told), 0, 0, 1, 0, 0, 0)
    return total


def difference(name: str, ours: np.ndarray, right: np.ndarray) -> list[str]:
    """Compare two logit vectors, (V,). Return one sentence in a list, or [] if all bits are equal."""
    if ours.tobytes() == right.tobytes():
        return []
    unlike = int((ours != right).sum())
    furthest = float(np.abs(ours - right).max())
    best = f"the best is {ours.argmax()}, alone {right.argmax()}"
    return [f"{name}: {unlike} of {len(ours)} logits differ, by up to {furthest:.2g}; {best}"]


def next_turn(handle: Handle, prompt: list[int], rng: np.random.Generator) -> list[int]:
    """Return the next prompt of a conversation: its text so far, perhaps without the last tokens, and
    something new. Return [] if the conversation ends here."""
    if rng.random() < 0.4 or handle.finish_reason != "length":
        return []
    said = [*prompt, *handle.tokens]
    kept = said[: len(said) - int(rng.integers(0, 4))]
    return kept[:150] + rng.integers(0, 256, int(rng.integers(1, 30))).tolist()


def forms() -> list[str]:
    """Return the NANOBATCH_BLAS values to test: the form of the product that this machine uses, or in the long
    form each that it can run. `tests/kernels/test_matmul.py` shows that all forms have the same bits."""
    return [f"rows:{form}" for form in library.forms_here()][: None if IS_LONG else 1]


def run(form: str, schedules: int) -> Count:
    """Return the counts from a process that uses one form of the product."""
    done = subprocess.run(
        [sys.executable, __file__, str(schedules)],
        env=os.environ | {"NANOBATCH_BLAS": form},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    return Count(*json.loads(done.stdout.splitlines()[-1]))


def main(schedules: int) -> None:
    form = os.environ["NANOBATCH_BLAS"].removeprefix("rows:")
    assert device.blas.kernels.startswith(form), device.blas
    with tempfile.TemporaryDirectory() as folder:
        # Four schedules for each pair of engines, so that later ones find rows that earlier ones wrote
        rounds = range(0, schedules, 4)
        models = make_models(Path(folder), most=len(rounds))
        total = NONE
        for seed, done in enumerate(rounds):
            total += count(models, seed, min(4, schedules - done))
    print(json.dumps(total))


if __name__ == "__main__":
    main(int(sys.argv[1]))
