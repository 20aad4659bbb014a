"""Make the helpers of the project's tests importable for the exercises."""

# isort: off
from kernels import device  # noqa: F401 (first, or MLX would run on the slow BLAS)

# isort: on
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests" / "lib")]
