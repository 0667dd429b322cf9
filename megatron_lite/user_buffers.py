"""Memory that NCCL registers with its network and NVLink (`--use-nccl-ub`): it then sends without copies of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.collectives import group_size
from megatron_lite.errors import ConfigError


@contextmanager
def user_buffers(group: ProcessGroup | None, device: torch.device, *, symmetric: bool) -> Iterator[None]:
    """What is allocated inside lies in memory registered with NCCL, which then sends it without copies of its own.

    Args:
        symmetric: registered on all ranks at once (newer NCCL has faster kernels for it), not each rank for itself.
    Raises: ConfigError where the group's backend is not NCCL.
    """
    backend = None if group_size(group) == 1 else dist.get_backend(group)
    if backend != "nccl" or device.type != "cuda":
        raise ConfigError(
            f"--use-nccl-ub on {device.type} with {backend or 'one rank'}",
            why="user buffers are memory that NCCL registers with its network and NVLink",
            fix="leave --use-nccl-ub out, or train on several GPUs",
        )
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in settings:
        raise ConfigError(
            "--use-nccl-ub with expandable segments (PYTORCH_CUDA_ALLOC_CONF)",
            why="registered memory must stay where it is",
            fix="expandable_segments:False, or leave --use-nccl-ub out",
        )
    nccl: Any = group._get_backend(device)  # type: ignore[union-attr]
    pool = torch.cuda.MemPool(nccl.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        yield
    nccl.register_mem_pool(pool, symm=symmetric)
    _POOLS.append(pool)


_POOLS: list[Any] = []  # registered memory lives as long as the run
