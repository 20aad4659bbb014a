import blas  # first, as in a program of ours: what imports MLX before it would leave the tests on the slow BLAS


def pytest_report_header() -> str:
    return f"BLAS under MLX: {blas.name}"
