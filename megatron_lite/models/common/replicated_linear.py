"""A plain linear layer that every tensor-parallel rank holds whole, for heads that are too small to cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.initialization import Constant, set_init
from megatron_lite.sharding import whole
from megatron_lite.transformer.transformer_config import TransformerConfig


def replicated_linear(
    rows: int,
    columns: int,
    config: TransformerConfig,
    init_method: Callable[[Tensor], Any] | None = None,
    sequence_parallel: bool = False,
) -> nn.Linear:
    """x `[..., rows]` -> `[..., columns]`, with a bias that starts at 0.

    Args:
        init_method: of the weight; None: the config's.
        sequence_parallel: the ranks see different positions, so that their gradients are parts of a sum.
    """
    method = init_method or config.init_method
    assert method is not None
    layer = nn.Linear(rows, columns, device="meta")
    layer.weight = _parameter("weight", (columns, rows), config, sequence_parallel)
    set_init(layer.weight, method, "weight")
    layer.bias = _parameter("bias", (columns,), config, sequence_parallel)
    set_init(layer.bias, Constant(0.0), "bias")
    return layer


def _parameter(name: str, shape: tuple[int, ...], config: TransformerConfig, sequence_parallel: bool) -> nn.Parameter:
    param = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    param.shard = whole(name, shape)  # type: ignore[attr-defined]
    param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return param
