"""Where the exercises find what the project's tests share."""

# isort: off
from kernels import device  # noqa: F401 (first, as in a program of ours: else MLX would run on the slow BLAS)

# isort: on
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests" / "lib")]
