"""A hash of the demo model's answers, for comparison between machines.

Every processor with fused multiply-adds computes the same bits (`kernels/cpu_kernels.c`). So the demo's
answers are equal on any x86-64 or ARM CPU, down to the last bit of each log probability, and a single
hash is enough to compare them. It depends on the version of MLX, which computes the positions, the
softmax of the logits and the random numbers.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from benchmarks.answer_diff import Bits
from sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanobatch import Engine

QUESTIONS = ("Count from 3 to 12.", "What is 17 + 6?", "Tell me a story about a fox and a lantern.")
# MLX version -> hash. The README shows one of them
EXPECTED = {"0.32.4": "4dd3cd15a3c27a3c"}


def fingerprint(engine: Engine) -> str:
    """Ask the demo each question twice, greedy and sampled. Return the hash of all answers."""
    handles = []
    for question in QUESTIONS:
        for temperature in (0.0, 0.9):
            settings = {"max_tokens": 48, "ignore_eos": True, "logprobs": 10, "seed": 1}
            sampling = SamplingParams(temperature=temperature, **settings)
            handles.append(engine.submit(engine.text.ask(question), sampling))
    for handle in handles:
        handle.result()
    digests = [Bits.from_handle(handle).digest for handle in handles]
    return sha256(" ".join(digests).encode()).hexdigest()[:16]


def compared(found: str, version: str) -> str:
    """Return the hash with a note on whether it is the expected one."""
    expected = EXPECTED.get(version)
    if not expected:
        return f"{found}; none is recorded for MLX {version}"
    if found == expected:
        return f"{found}, as on every x86-64 and ARM CPU with MLX {version}"
    return f"{found}, expected {expected} with MLX {version}"
