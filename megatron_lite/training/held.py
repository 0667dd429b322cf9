"""Parts of global tensors, as ranks hold them, and the tensors that they are parts of.

each_weight, each_gradient    on a rank: (place in the global tensor, values), views
join_parts                    all ranks' parts -> global tensors by name
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron_lite.distributed import held_part, whole_parameters
from megatron_lite.errors import RankFailure
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.sharding import Piece, ShardSpec, whole

Held = list[tuple[ShardSpec, Tensor]]  # parts of global tensors


def each_weight(model: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, ShardSpec, Tensor]]:
    """The parameters that this rank computes with, or what it keeps of them where the model is fully sharded, of chunks
    under DDP: views. Collective where those of a sharded optimizer are still on their way."""
    model = list(model)
    whole_parameters(model)
    for chunk in model:
        for name, param in chunk.module.named_parameters():  # type: ignore[union-attr]
            yield param, getattr(param, "shard", None) or whole(name, tuple(param.shape)), held_part(param).detach()


def each_gradient(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, ShardSpec, Tensor]]:
    """The gradients that this rank's optimizer is about to step on, with their loss scale: views, of the parameter's
    shape or, where other ranks own the rest of it, flat."""
    for shard in optimizer.shards:
        flat = shard.main_grad()
        for part in shard.parts:
            grad = flat[part.place.start : part.place.end].detach()
            yield part.param, part.spec(), grad.view(part.param.shape) if part.is_whole else grad


def held_weights(model: Iterable[nn.Module]) -> Held:
    """Copies of the parameters in fp32."""
    return [(spec, part.float().clone()) for _, spec, part in each_weight(model)]


def held_gradients(optimizer: MegatronOptimizer) -> Held:
    """Copies of the gradients in fp32, without a loss scale."""
    scale = optimizer.get_loss_scale()
    return [(spec, grad.float().clone().div_(scale)) for _, spec, grad in each_gradient(optimizer)]


def join_parts(what: str, ranks: Iterable[Held]) -> tuple[dict[str, Tensor], float, str]:
    """Global tensors out of all ranks' parts.

    Returns: the tensors by name; the largest difference between two values of one element; the tensor where.
    Raises: RankFailure naming a tensor of which elements are missing.
    """
    tensors: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    worst, where = 0.0, ""
    for held in ranks:
        for spec, local in held:
            if spec.name not in tensors:
                tensors[spec.name] = torch.zeros(spec.global_shape)
                covered[spec.name] = torch.zeros(spec.global_shape, dtype=torch.bool)
            assert tuple(tensors[spec.name].shape) == spec.global_shape, f"{spec.name} has two global shapes"
            for piece in spec.pieces:
                place = piece.global_slices()
                values, there = _local(piece, local), covered[spec.name][place]
                if bool(there.any()):
                    known = tensors[spec.name][place]
                    # A NaN beside a number differs from it; two NaNs do not differ.
                    same = (known == values) | (known.isnan() & values.isnan()) | ~there
                    difference = torch.where(same, 0.0, (known - values).abs()).max().item()
                    if exceeds(difference, worst):
                        worst, where = difference, spec.name
                tensors[spec.name][place] = values
                covered[spec.name][place] = True
    missing = [name for name, mask in covered.items() if not bool(mask.all())]
    if missing:
        raise RankFailure(f"{what}: no rank holds all of {', '.join(missing[:5])}")
    return tensors, worst, where


def exceeds(value: float, worst: float) -> bool:
    """Whether a difference is worse than the worst so far. Nothing is worse than NaN."""
    return not math.isnan(worst) and not value <= worst


def _local(piece: Piece, local: Tensor) -> Tensor:
    """The piece's values. A part of a parameter is a flat tensor, of which the piece is a run."""
    if local.dim() == len(piece.shape):
        return local[piece.local_slices()]
    (begin,) = piece.local_offset
    return local[begin : begin + math.prod(piece.shape)].view(piece.shape)
