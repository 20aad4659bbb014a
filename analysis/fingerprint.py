"""A hash of what the demo model answers, to compare with other people's machines.

Every processor with fused multiply-adds computes the same bits (`kernels/matmul.c`). So the demo's
answers are the same on any x86-64 or ARM CPU, down to the last bit of each log probability, and one
line is enough to compare them. MLX's version belongs to the promise: positions, the logits' softmax
and random numbers are its own.
"""

from __future__ import annotations

from hashlib import sha256

from analysis.compare import Bits
from runtime.engine_protocol import AnyEngine
from runtime.sampling_params import SamplingParams

QUESTIONS = ("Count from 3 to 12.", "What is 17 + 6?", "Tell me a story about a fox and a lantern.")
# By the version of MLX. README prints one of them
EXPECTED = {"0.32.4": "4dd3cd15a3c27a3c"}


def fingerprint(engine: AnyEngine) -> str:
    """Ask the demo each question twice, greedy and drawn at random."""
    handles = []
    for question in QUESTIONS:
        for temperature in (0.0, 0.9):
            settings = {"max_tokens": 48, "ignore_eos": True, "logprobs": 10, "seed": 1}
            sampling = SamplingParams(temperature=temperature, **settings)
            handles.append(engine.submit(engine.text.ask(question), sampling))
    for handle in handles:
        handle.result()
    digests = [Bits.of(handle).digest for handle in handles]
    return sha256(" ".join(digests).encode()).hexdigest()[:16]


def compared(found: str, version: str) -> str:
    """The hash, and what it says about this machine."""
    expected = EXPECTED.get(version)
    if not expected:
        return f"{found}, and nobody has recorded that of MLX {version}"
    if found == expected:
        return f"{found}, as on every x86-64 and ARM CPU with MLX {version}"
    return f"{found}, which should be {expected} with MLX {version}"
