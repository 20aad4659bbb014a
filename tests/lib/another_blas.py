"""A BLAS that is not batch-invariant, like any fast one: it sums few rows in a different order from many."""

import subprocess
from pathlib import Path

from kernels import build

SOURCE = """
#define AT(x, turned, ld, i, j) x[(turned) ? (long)(j) * ld + i : (long)(i) * ld + j]
void cblas_sgemm(int order, int tx, int tw, int M, int N, int K, float alpha, const float *x, int ldx,
                 const float *w, int ldw, float beta, float *y, int ldy) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float sum = 0;
      for (int i = 0; i < K; i++) {
        int k = M < 4 ? i : K - 1 - i;
        sum += AT(x, tx == 112, ldx, m, k) * AT(w, tw == 112, ldw, k, n);
      }
      y[(long)m * ldy + n] = alpha * sum + (beta ? beta * y[(long)m * ldy + n] : 0);
    }
}
"""


def compiled(folder: Path) -> Path:
    library = folder / "libanother.so"
    options = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run([*build.compiler(), *options], input=SOURCE, text=True, check=True)
    return library
