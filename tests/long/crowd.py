"""Two, three and four ranks by MPI, against one process: the same tokens, and the same bits in any
company.

    python tests/long/crowd.py                # takes some minutes; needs mpirun, such as Debian's openmpi-bin

Each rank is a process. Rank 0 says what it has found; the exit code is 1 if anything differs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from parts.device import mlx as device  # noqa: E402, F401  first, as in a program of ours

# isort: split
import numpy as np  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from harness import Tap, random_asks, run_schedule  # noqa: E402
from rank import SIZES, live  # noqa: E402

from nanobatch import Engine  # noqa: E402

KINDS = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "granite, tied": {
        "model_type": "granite",
        "tie_word_embeddings": True,
        "residual_multiplier": 0.8,
    },
    "phi3": {"model_type": "phi3"},
    "phi3, a part turns": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 20},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "gqa": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "4 bit": {"quantize": lambda module: (4, 32)},
}


ROUNDS = 6  # random schedules for each model; the suite has fewer


def compare_bits(engine: Engine, rng: np.random.Generator, rounds: int) -> tuple[int, int]:
    """Random schedules, then each request alone: how many logit vectors were compared, and how many
    differ."""
    compared = different = 0
    for _ in range(rounds):
        asks = random_asks(rng, 10, 90, 10, alike=0.5)
        tap = Tap(engine)
        together = [tap.of(handle) for handle in run_schedule(engine, asks, rng)]
        for ask, logits in zip(asks, together, strict=True):
            (handle,) = run_schedule(engine, [ask], rng)
            alone = tap.of(handle)
            compared += len(alone)
            different += int((alone != logits).any(axis=1).sum())
    return compared, different


def as_rank(rounds: int, folders: list[str]) -> None:
    """For each model: the tokens of a short life, whether the engine is exact, and what came of
    comparing bits."""
    for folder in folders:
        with Engine.load(folder, **SIZES) as engine:
            if engine.ranks.rank:
                engine.follow()
            else:
                tokens = live(engine)
                engine.drain("continuous")
                found = compare_bits(engine, np.random.default_rng(1), rounds)
                print(json.dumps([tokens, engine.exact, *found]), flush=True)


def main() -> int:
    if not (mpirun := shutil.which("mpirun")):
        print("there is no mpirun; on Debian: apt install openmpi-bin")
        return 2
    faults = 0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [
            str(make_checkpoint(Path(temporary) / kind, seed=2, **changes))
            for kind, changes in KINDS.items()
        ]
        alone = []
        for folder in folders:
            with Engine.load(folder, **SIZES) as engine:
                alone.append(live(engine))
        for size in (2, 3, 4):
            command = [
                mpirun,
                "--allow-run-as-root",
                "--oversubscribe",
                "-n",
                str(size),
                sys.executable,
                __file__,
                str(ROUNDS),
            ]
            environment = {"MLX_MPI_LIBNAME": "libmpi.so.40"} | os.environ
            done = subprocess.run(
                [*command, *folders], env=environment, capture_output=True, text=True
            )
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
            if done.returncode or len(lines) != len(folders):
                print(f"{size} ranks ended with code {done.returncode}: {done.stderr[-2000:]}")
                return 1
            for kind, expected, (tokens, is_exact, compared, different) in zip(
                KINDS, alone, lines, strict=True
            ):
                equal = "equal" if tokens == expected else "DIFFER"
                print(
                    f"{size} ranks, {kind}: {len(tokens)} answers {equal}, exact: {is_exact}, ",
                    end="",
                )
                print(
                    f"{compared} logit vectors alone and in company, {different} differ", flush=True
                )
                faults += tokens != expected or not is_exact or different or not compared
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(as_rank(int(sys.argv[1]), sys.argv[2:]) if sys.argv[1:] else main())
