"""What the environment says about ranks: `mlx.launch`, `mpirun`, or a person by hand sets these variables for
each process that shares a model. No MLX is needed to read them."""

import os

from base.validation import read_whole


def backend() -> str:
    """The way in which ranks were started (`group.py`); empty if this process is alone."""
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
    """The rank of this process. Rank 0 answers, the others follow."""
    name = "OMPI_COMM_WORLD_RANK" if backend() == "mpi" else "MLX_RANK"
    return read_whole(name, os.environ[name], 0, 1023) if backend() else 0
