"""Muon: the momentum of a matrix, made orthogonal, is the step. Tables, biases and norms are another optimizer's.

    m <- mu m + (1 - mu) g
    u  = m, or (1 - mu) g + mu m (Nesterov)
    W <- W (1 - lr wd) - lr * scale * orthogonal(u)

The step needs the whole matrix, and a rank may hold a part of it:

    sharded optimizer    a matrix across the border of two shards: its owners exchange their parts of u, each makes it
                         orthogonal and keeps its own part of the result. Momentum stays sharded.
    tensor parallelism   duplicated: u is gathered, every rank does the same    distributed: products of the cut matrix
                         are summed    blockwise: each rank's block by itself, which is another algorithm

Queries, keys and values are three matrices that share a weight: they are made orthogonal apart.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed.buffer_layout import Range, param_ranges_of_shard, shard_of_bucket
from megatron_lite.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron_lite.optimizer.blocks import blocks, grad_of, unscaled
from megatron_lite.optimizer.orthogonal import matmul_precision, orthogonalize, scale_of


@dataclass(frozen=True)
class Matrix:
    """What the step must know of a segment.

    param: whose part it is; in_param: which part; cut, tp: the dimension that tensor parallelism cuts (None: none) and
    its ranks; stacked: rows, of each query group, of the matrices that share the weight; None: it is one.
    """

    param: nn.Parameter
    in_param: Range
    cut: int | None = None
    tp: ProcessGroup | None = None
    stacked: tuple[int, ...] | None = None


class Muon(torch.optim.Optimizer):
    """On flat fp32 tensors, each one matrix or a part of one, whose state `momentum_buffer` exists already.

    Args:
        matrices: by tensor.
        exchanges: one for each buffer of which this rank owns shards; the same number on all owners.
        tp_mode, coefficient_type, num_ns_steps, scale_mode, extra_scale_factor, matmul: see `OptimizerConfig`.

    Attributes: grad_scale: what gradients are divided by, None: nothing.
    """

    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float,
        matrices: Mapping[Tensor, Matrix],
        exchanges: Sequence[PartExchange],
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        tp_mode: str = "duplicated",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        matmul: str = "medium",
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._matrices, self._exchanges = matrices, list(exchanges)
        self._momentum, self._nesterov, self._tp_mode = momentum, nesterov, tp_mode
        self._coefficient_type, self._num_ns_steps = coefficient_type, num_ns_steps
        self._scale_mode, self._extra_scale_factor, self._matmul = scale_mode, extra_scale_factor, matmul

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix; collective where matrices are split between ranks."""
        split = {param for exchange in self._exchanges for param in exchange.owners}
        parts: dict[nn.Parameter, Tensor] = {}
        for _, tensor in self._segments():
            param = self._matrices[tensor].param
            if param in split:
                parts[param] = self._direction(tensor)
        whole: dict[nn.Parameter, Tensor] = {}
        for exchange in self._exchanges:
            whole |= exchange.join(parts)
        for group, tensor in self._segments():
            matrix = self._matrices[tensor]
            direction = whole.pop(matrix.param) if matrix.param in split else self._direction(tensor)
            with matmul_precision(self._matmul, tensor.device.type):
                update = self._orthogonal(direction.view(matrix.param.shape), matrix).reshape(-1)
            tensor.mul_(1.0 - group["lr"] * group["weight_decay"])
            tensor.add_(update[matrix.in_param.start : matrix.in_param.end], alpha=-group["lr"])

    def _segments(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, t) for group in self.param_groups for t in group["params"] if grad_of(t) is not None]

    def _direction(self, tensor: Tensor) -> Tensor:
        """u of a segment, after its momentum took the gradient in."""
        grad = grad_of(tensor)
        assert grad is not None
        direction = torch.empty_like(tensor)
        for d, g, m in blocks(direction, grad, self.state[tensor]["momentum_buffer"]):
            g = unscaled(g, self.grad_scale)
            m.lerp_(g, 1.0 - self._momentum)
            d.copy_(g.lerp(m, self._momentum) if self._nesterov else m)
        return direction

    def _orthogonal(self, x: Tensor, matrix: Matrix) -> Tensor:
        """The step of this rank's `x`, matrix by matrix of those that it stacks."""
        if matrix.stacked is None:
            return self._one(x, matrix)
        columns = x.shape[1]
        by_group = x.view(-1, sum(matrix.stacked), columns).split(matrix.stacked, dim=1)  # [groups, rows, columns]
        steps = [self._one(y.reshape(-1, columns), matrix).view_as(y) for y in by_group]
        return torch.cat(steps, dim=1).view_as(x)

    def _one(self, x: Tensor, matrix: Matrix) -> Tensor:
        cut, tp = matrix.cut, matrix.tp
        size = group_size(tp) if cut is not None and self._tp_mode != "blockwise" else 1
        shape = [n * size if d == cut else n for d, n in enumerate(x.shape)]
        scale = scale_of(shape[0], shape[1], self._scale_mode) * self._extra_scale_factor
        how = {"steps": self._num_ns_steps, "coefficient_type": self._coefficient_type}
        if size == 1:
            return orthogonalize(x, **how).mul_(scale)  # type: ignore[arg-type]
        by_columns = x if cut == 1 else x.mT
        if self._tp_mode == "distributed":
            step = orthogonalize(by_columns, columns=tp, **how).mul_(scale)  # type: ignore[arg-type]
            return step if cut == 1 else step.mT
        rows = by_columns.mT.contiguous()  # what is cut goes first: ranks' parts then follow each other
        gathered = rows.new_empty(rows.shape[0] * size, rows.shape[1])
        collectives.all_gather(gathered, rows, tp, purpose="matrices to make orthogonal")
        step = orthogonalize(gathered, **how).mul_(scale).chunk(size)[group_rank(tp)]  # type: ignore[arg-type]
        return step if cut == 0 else step.mT


class PartExchange:
    """How owners of the parts of split matrices come by the whole ones: one all-to-all for each buffer.

    Attributes: owners: (rank, part) of every matrix that several ranks own, in buffer order.
    """

    def __init__(self, buffer: ParamAndGradBuffer, matrices: Sequence[nn.Parameter]):
        self._group = buffer.shard_group
        size = group_size(self._group) if buffer.ddp_config.use_distributed_optimizer else 1
        wanted = set(matrices)
        owners: dict[nn.Parameter, list[tuple[int, Range]]] = {p: [] for p in buffer.params.values() if p in wanted}
        for number, bucket in enumerate(buffer.layout.buckets):
            for rank in range(size):
                shard = shard_of_bucket(bucket, rank, size)
                for name, part in param_ranges_of_shard(buffer.layout, number, shard).items():
                    if buffer.params[name] in wanted:
                        owners[buffer.params[name]].append((rank, part.param))
        self.owners = {param: parts for param, parts in owners.items() if len(parts) > 1}

    def join(self, parts: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Whole flat tensors of the split matrices of which this rank owns a part; collective over the owners' group.

        Args:
            parts: this rank's, by parameter.
        """
        if not self.owners:
            return {}
        rank, size = group_rank(self._group), group_size(self._group)
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        coming: list[list[tuple[nn.Parameter, Range]]] = [[] for _ in range(size)]
        whole = {}
        for param, owners in self.owners.items():
            mine = dict(owners).get(rank)
            if mine is None:
                continue
            whole[param] = torch.empty(param.numel(), dtype=torch.float32, device=parts[param].device)
            whole[param][mine.start : mine.end] = parts[param]
            for peer, part in owners:
                if peer != rank:
                    sent[peer].append(parts[param])
                    coming[peer].append((param, part))
        device = next(iter(self.owners)).device
        outgoing = [tensor.to(device) for tensors in sent for tensor in tensors]
        input = torch.cat(outgoing) if outgoing else torch.empty(0, device=device)
        lengths = [sum(part.size for _, part in expected) for expected in coming]
        output = torch.empty(sum(lengths), dtype=torch.float32, device=device)
        collectives.all_to_all(
            output,
            input,
            self._group,
            output_splits=lengths,
            input_splits=[sum(tensor.numel() for tensor in tensors) for tensors in sent],
            purpose="parts of split matrices",
        )
        at = 0
        for expected in coming:
            for param, part in expected:
                whole[param][part.start : part.end] = output[at : at + part.size]
                at += part.size
        return whole
