"""The values of a new model depend on (seed, global name, global shape, method) alone, never on the layout.

A layer allocates its parameter and says how it starts (`set_init`). When the model is complete, every parameter has
its global name, and `initialize_parameters` fills this rank's pieces:

    set_init(weight, init_method_normal(0.02))        in the layer
    initialize_parameters(model)                      at the end of the model's constructor, seed = torch.initial_seed()

Normal values are drawn in blocks of 2**16 elements of the *global* tensor, each from a generator seeded by the
name and the block's number, so a rank draws only the blocks that its pieces touch. A method that this file does not
know is run on the whole global tensor. Values are always drawn in fp32 on the CPU and then cast and moved, so they are
equal on every device and for every parameter dtype.

A layer that is built outside of a model (`with deferred_initialization()` not active) is filled at once, under the
name that the layer gives.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_lite.sharding import ShardSpec, whole

InitMethod = Callable[[Tensor], object]
_BLOCK = 2**16
_deferred = False


@dataclass(frozen=True)
class Normal:
    """An init method: normal with mean 0. Calling it fills a tensor from the default generator, as Megatron's do."""

    std: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.normal_(tensor, mean=0.0, std=self.std)


@dataclass(frozen=True)
class Constant:
    """An init method: one value everywhere."""

    value: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.constant_(tensor, self.value)


def init_method_normal(sigma: float) -> Normal:
    """Normal with standard deviation `sigma`."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Normal with sigma / sqrt(multiplier * num_layers): the output projections of a residual stack of depth L, two
    additions a layer (Radford et al. 2019, section 2.3)."""
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def xavier_uniform(tensor: Tensor) -> Tensor:
    """Glorot and Bengio 2010; looks at the whole tensor's shape."""
    return nn.init.xavier_uniform_(tensor)


def set_init(param: nn.Parameter, method: InitMethod, name: str, shard: ShardSpec | None = None) -> None:
    """Say how `param` starts. Filled at once, unless a model under construction will do it under the global name.

    Args:
        name: the parameter's name in its layer, used when the layer stands alone.
        shard: its place in the layer's global tensor; None = every rank holds all of it.
    """
    param.init_method = method  # type: ignore[attr-defined]
    if not _deferred:
        fill(param, shard.renamed(name) if shard else whole(name, tuple(param.shape)), method, torch.initial_seed())


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Layers built inside do not fill their parameters; the model does, when names are known."""
    global _deferred
    before, _deferred = _deferred, True
    try:
        yield
    finally:
        _deferred = before


class parameters_on_meta(TorchFunctionMode):
    """Models built inside have parameters without memory (made by `torch.empty`) and buffers with values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and "out" not in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def initialize_parameters(model: nn.Module, seed: int | None = None) -> None:
    """Fill every parameter of a model whose parameters carry `shard` (their ShardSpec) and `init_method`.

    Args:
        seed: None takes `torch.initial_seed()`, that is, what the user gave to `torch.manual_seed`.
    """
    seed = torch.initial_seed() if seed is None else seed
    for name, param in model.named_parameters():
        method, shard = getattr(param, "init_method", None), getattr(param, "shard", None)
        assert method is not None and shard is not None, f"{name} says not how it starts or where it lies"
        if param.device.type != "meta":
            fill(param, shard, method, seed)


@torch.no_grad()
def fill(param: Tensor, shard: ShardSpec, method: InitMethod, seed: int) -> None:
    """Write this rank's part of the global tensor's initial value into `param`."""
    if isinstance(method, Constant):
        param.fill_(method.value)
    elif isinstance(method, Normal):
        for piece in shard.pieces:
            values = torch.empty(piece.shape, dtype=torch.float32)
            for flat, begin, end in _runs(shard.global_shape, piece.global_offset, piece.shape):
                values.view(-1)[flat : flat + end - begin] = _normal(shard.name, begin, end, method.std, seed)
            param[piece.local_slices()].copy_(values)
    else:
        full = torch.empty(shard.global_shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, shard.name, 0))
            method(full)
        for piece in shard.pieces:
            param[piece.local_slices()].copy_(full[piece.global_slices()])


def _runs(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The box as ranges of the flattened global tensor: (place in the flattened box, begin, end)."""
    # Trailing dimensions that the box holds completely join into one run.
    joined = len(shape)
    while joined > 0 and size[joined - 1] == shape[joined - 1]:
        joined -= 1
    inner = math.prod(shape[joined:])
    outer = [range(o, o + n) for o, n in zip(offset[: max(joined - 1, 0)], size[: max(joined - 1, 0)])]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    run = (size[joined - 1] if joined else 1) * inner
    for number, index in enumerate(itertools.product(*outer)):
        begin = sum(i * stride for i, stride in zip(index, strides))
        if joined:
            begin += offset[joined - 1] * strides[joined - 1]
        yield number * run, begin, begin + run


def _normal(name: str, begin: int, end: int, std: float, seed: int) -> Tensor:
    """Elements `[begin, end)` of the flattened global tensor."""
    parts = []
    for block in range(begin // _BLOCK, -(-end // _BLOCK)):
        values = _block(name, block, seed)
        parts.append(values[max(begin - block * _BLOCK, 0) : end - block * _BLOCK])
    return torch.cat(parts).mul_(std)


@functools.lru_cache(maxsize=8)  # a column cut touches every block once a row
def _block(name: str, block: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(_seed(seed, name, block))
    return torch.randn(_BLOCK, generator=generator)


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: a generator takes no more without a sign
