"""`--moe-use-upcycling`: a model with experts that starts from a dense one (Komatsuzaki et al. 2023; with granularity
He et al. 2024, "Upcycling large language models into mixture of experts").

The dense MLP of width F is cut into G parts of width f = F / G (gate and up each by themselves); expert j gets part
j mod G. The router of E experts has E / G different rows, each of them for the G experts that together are one MLP:

    expert     0   1   ..  G-1 | G  G+1 ..            part of the MLP     0   1   ..  G-1 | 0   1   ..
    router row 0   0   ..  0   | 1  1   ..

Each expert's weights are multiplied so that what the K chosen ones add up to has the size of the dense output. With
G = 1 and a softmax over the chosen the new model computes exactly what the dense one did.

An expert's parameter says where it lies in its own global tensor; here it is told where it lies in the dense one, and
the checkpoint is read as in any load: under every layout, without a copy of the dense model.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.checkpoint import HowToRead, on_rank_0, read_args, read_tensors, together
from megatron_lite.errors import CheckpointError
from megatron_lite.log import print_rank_0
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.sharding import Piece, ShardSpec
from megatron_lite.training.checkpoint_args import has_vocabulary_of
from megatron_lite.training.checkpointing import find_checkpoint, model_tensors, save_checkpoint
from megatron_lite.training.derived import is_gated
from megatron_lite.training.resume_differences import check_args

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_LAST = "linear_fc2.bias"
_ROUTER = re.compile(r".*\.mlp\.router\.(weight|bias|expert_bias)$")


def upcycle(args: Namespace, model: Sequence[nn.Module], optimizer: MegatronOptimizer | None) -> None:
    """Fill a model with experts from the dense checkpoint of `--load`, and save it under `--save` as a release.

    Raises: CheckpointError, on every rank, where the checkpoint is no dense model of this shape, or `--save` holds one.
    """
    group = collectives.world()
    found = on_rank_0(lambda: find_checkpoint(args), group)
    if on_rank_0(lambda: folders.read_tracker(Path(args.save)), group) is not None:
        raise CheckpointError(
            f"--moe-use-upcycling, and --save {args.save} holds a checkpoint",
            why="experts are made once, from the dense model; later runs go on with them",
            fix=f"--load {args.save} without --moe-use-upcycling, or another --save",
        )
    if found is None:
        raise CheckpointError("--moe-use-upcycling without a checkpoint in --load", fix="--load with a dense model")
    saved = together(lambda: read_args(found.folder), group)
    _check(args, saved, found.folder)

    tensors = {name: item for name, item in model_tensors(model).items() if not _ROUTER.match(name)}
    experts = [(match, *tensors.pop(name)) for name in list(tensors) if (match := _EXPERT.match(name))]
    same_vocabulary = has_vocabulary_of(args, saved)

    def padded(name: str) -> bool:
        return same_vocabulary and name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))

    granularity = args.moe_upcycling_granularity
    first = min((int(match[2]) for match, _, _ in experts), default=0)
    rounds = min(granularity, args.num_experts // args.expert_model_parallel_size)
    gated = is_gated(args)
    filled: dict[str, Tensor] = {}  # by dense name and part: experts with the same part are copies
    for number in range(rounds):
        wanted: dict[str, tuple[Tensor, ShardSpec]] = {} if number else dict(tensors)
        for match, tensor, spec in experts:
            if int(match[2]) == first + number:
                dense = f"{match[1]}.{match[3]}"
                wanted[dense] = (tensor, in_dense(spec, dense, int(match[2]) % granularity, granularity, gated))
                filled[f"{dense}/{int(match[2]) % granularity}"] = tensor
        every = not number

        def expected(name: str, every: bool = every) -> bool:
            return every and not name.startswith("optimizer.")

        # A round reads a part of each dense layer: together they are no cover of it.
        read_tensors(found.folder, wanted, group, expected=expected, padded=padded, how=HowToRead(check_cover=False))
    with torch.no_grad():
        for match, tensor, _ in experts:
            source = filled[f"{match[1]}.{match[3]}/{int(match[2]) % granularity}"]
            if tensor is not source:
                tensor.copy_(source)
        factors = scales(args)
        for match, tensor, _ in experts:
            tensor.mul_(factors[match[3]])
        for name, (tensor, _) in model_tensors(model).items():
            if (router := _ROUTER.match(name)) and router[1] != "expert_bias":
                tensor.copy_(tensor[: args.num_experts // granularity].repeat_interleave(granularity, 0))
    if optimizer is not None:
        optimizer.reload_model_params()
    save_checkpoint(0, model, None, None, 0.0, release=True)
    print_rank_0(f"Upcycled checkpoint saved to {args.save}")


def _check(args: Namespace, saved: dict, folder: Path) -> None:
    if saved.get("num_experts"):
        raise CheckpointError(
            f"--moe-use-upcycling from {folder}, which has {saved['num_experts']} experts",
            why="upcycling makes experts from a dense model",
            fix="--load with a dense model, or leave --moe-use-upcycling out",
        )
    width = args.moe_ffn_hidden_size * args.moe_upcycling_granularity
    if saved.get("ffn_hidden_size") != width:
        raise CheckpointError(
            f"{folder} has an MLP of width {saved.get('ffn_hidden_size')}; --moe-ffn-hidden-size "
            f"{args.moe_ffn_hidden_size} times --moe-upcycling-granularity {args.moe_upcycling_granularity} is {width}",
            why="experts are parts of equal width of the dense MLP",
            fix=f"--moe-ffn-hidden-size {saved.get('ffn_hidden_size', 0) // args.moe_upcycling_granularity}",
        )
    dense = Namespace(**{**vars(args), "ffn_hidden_size": width})
    given = {name: value for name, value in saved.items() if not name.startswith(("num_experts", "moe_"))}
    check_args(dense, given, folder, finetune=True)


def in_dense(spec: ShardSpec, name: str, part: int, parts: int, gated: bool) -> ShardSpec:
    """Where a rank's piece of an expert lies in the dense tensor.

    Args:
        spec: where it lies in the expert's own tensor.
        name: of the dense tensor: `...linear_fc1.weight` `[(2) F, h]`, `...linear_fc2.weight` `[h, F]`, or a bias.
        part, parts: the expert is so-and-so many of so many equal parts.
        gated: fc1 is [gate; up], each of which is cut.
    """
    if name.endswith(_LAST):
        return spec.renamed(name)
    dim = 1 if name.endswith("linear_fc2.weight") else 0
    blocks = 2 if gated and dim == 0 else 1
    width = spec.global_shape[dim] // blocks
    shape = tuple(n * parts if d == dim else n for d, n in enumerate(spec.global_shape))

    def pieces() -> Iterator[Piece]:
        for piece in spec.pieces:
            begin, end = piece.global_offset[dim], piece.global_offset[dim] + piece.shape[dim]
            for block in range(blocks):
                low, high = max(begin, block * width), min(end, (block + 1) * width)
                if low < high:
                    there = (block * parts + part) * width + low - block * width
                    local = piece.local_offset[dim] + low - begin
                    yield Piece(
                        _at(piece.global_offset, dim, there),
                        _at(piece.local_offset, dim, local),
                        _at(piece.shape, dim, high - low),
                    )

    return replace(spec, name=name, global_shape=shape, pieces=tuple(pieces()))


def _at(index: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*index[:dim], value, *index[dim + 1 :])


def scales(args: Namespace) -> dict[str, float]:
    """Factor on each of an expert's parameters.

    The chosen K experts' weights add up to 1 (or to the scaling factor), or, with a softmax over all E, to about K / E;
    each expert holds one part of G. S brings the sum to the size of the dense output. fc1 and fc2 share it: a cube root
    each where fc1 counts twice in the product (gated, or squared ReLU), else a square root, which is exact for
    activations that scale with their input.
    """
    granularity, topk = args.moe_upcycling_granularity, args.moe_router_topk
    per_weight = 1.0
    if args.moe_router_pre_softmax and args.moe_router_score_function == "softmax":
        per_weight = args.num_experts / topk
    per_weight /= args.moe_router_topk_scaling_factor or 1.0
    total = granularity * per_weight
    root = total ** (1 / 3 if is_gated(args) or args.squared_relu else 1 / 2)
    return {
        "linear_fc1.weight": root,
        "linear_fc1.bias": root,
        "linear_fc2.weight": root,
        "linear_fc2.bias": per_weight,
    }
