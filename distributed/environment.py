"""Read a process's rank from the environment variables that `mlx.launch`, `mpirun` or the user sets. Does not
need MLX."""

import os

from base.validation import read_whole


def backend() -> str:
    """Return MLX's backend for the ranks; empty if the model runs in a single process."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "mpi"
    if "MLX_RANK" not in os.environ:
        return ""
    files = {"MLX_HOSTFILE": "ring", "MLX_IBV_DEVICES": "jaccl", "NCCL_HOST_IP": "nccl"}
    for variable, name in files.items():
        if os.environ.get(variable):
            return name
    raise ValueError(
        "MLX_RANK is set, but not MLX_HOSTFILE; give the file that lists the addresses of all ranks"
    )


def rank() -> int:
    """Return the rank of this process, 0 if it is the only one. Rank 0 leads; the others follow it."""
    name = "OMPI_COMM_WORLD_RANK" if backend() == "mpi" else "MLX_RANK"
    return read_whole(name, os.environ[name], 0, 1023) if backend() else 0
