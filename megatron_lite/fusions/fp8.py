"""Numbers of eight bits, simulated: operands of a linear layer's products are cast to FP8 and back.

    y  = Q(x) Q(w)^T       Q(x) Q(w) in the forward format, e4m3: 4 bits of exponent, up to 448
    dx = Q(g) Q(w)         Q(g)      in the backward format: e5m2 (up to 57344) under "hybrid", else e4m3
    dw = Q(g)^T Q(x)       or of the operands as they are, without `wgrad`

(Micikevicius et al. 2022, "FP8 Formats for Deep Learning".) Q multiplies by a scale that brings the largest number near
the format's largest, rounds, and divides by the scale. The products are those of the model's own format: the numbers
are what FP8 makes of them, the time is not.

    tensorwise   one scale a tensor, from its largest number now
    delayed      one scale a tensor, from its largest numbers in steps before (see `tensor_parallel/fp8`)
    blockwise    a power of two for each 128 numbers along the sum, for weights for each 128 x 128
                 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2)
    mxfp8        a power of two for each 32 numbers along the sum (Rouhani et al. 2023, "Microscaling Data Formats for
                 Deep Learning"), rounded up, so that nothing saturates

Inf and NaN stay what they are: a cast to e4m3 would hide an overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Operand(IntEnum):
    """What a linear layer multiplies."""

    INPUT, WEIGHT, GRAD = 0, 1, 2


@dataclass(frozen=True)
class Recipe:
    """How a run casts.

    kind: tensorwise, delayed, blockwise or mxfp8. margin: powers of two that delayed scales leave free.
    wgrad: weight gradients are products of FP8 as well. history, largest_of_history: steps that delayed scales look
    back on, and whether the largest of them counts, or the last.
    """

    kind: str
    forward: torch.dtype = torch.float8_e4m3fn
    backward: torch.dtype = torch.float8_e4m3fn
    margin: int = 0
    wgrad: bool = True
    history: int = 1
    largest_of_history: bool = False

    @property
    def by_blocks(self) -> bool:
        """Whether scales follow from the numbers beside, and are no matter of other ranks or steps."""
        return self.kind in ("blockwise", "mxfp8")

    def format(self, operand: Operand) -> torch.dtype:
        """The FP8 format of an operand."""
        return self.backward if operand is Operand.GRAD else self.forward

    def scale(self, operand: Operand, amax: Tensor) -> Tensor:
        """The factor in front of a cast, for a tensor whose largest number is `amax` (0: 1)."""
        margin = self.margin if self.kind == "delayed" else 0
        top = torch.finfo(self.format(operand)).max
        return torch.where(amax > 0, top / amax / 2.0**margin, 1.0)

    def block(self, operand: Operand, along_rows: bool) -> tuple[int, int]:
        """(rows, columns) that share a scale. `along_rows`: the product sums over the rows, not over the columns."""
        if self.kind == "blockwise" and operand is Operand.WEIGHT:
            return 128, 128
        length = 32 if self.kind == "mxfp8" else 128
        return (length, 1) if along_rows else (1, length)


@dataclass
class Casts:
    """The casts of one call of a layer. scales: fp32 `[3]`, by operand; None where blocks have their own."""

    recipe: Recipe
    scales: Tensor | None = None

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of y: x `[..., k]`, w `[n, k]`."""
        return self._cast(Operand.INPUT, x, False), self._cast(Operand.WEIGHT, w, False)

    def dgrad(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of dx: g `[..., n]`, w `[n, k]`."""
        return self._cast(Operand.GRAD, g, False), self._cast(Operand.WEIGHT, w, True)

    def wgrad(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of dw: g `[m, n]`, x `[m, k]`."""
        if not self.recipe.wgrad:
            return g, x
        return self._cast(Operand.GRAD, g, True), self._cast(Operand.INPUT, x, True)

    def _cast(self, operand: Operand, x: Tensor, along_rows: bool) -> Tensor:
        if self.scales is not None:
            return rounded(x, self.scales[operand], self.recipe.format(operand))
        return rounded_in_blocks(x, self.recipe.block(operand, along_rows), self.recipe.format(operand))


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of the finite numbers, fp32 `[]`; 0 of none."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.nan_to_num(x.detach(), 0.0, 0.0, 0.0).abs().amax().float()


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x, to FP8 at a scale (broadcast against x) and back; numbers beyond the format become its largest."""
    top = torch.finfo(dtype).max
    cast = (x.float() * scale).clamp_(-top, top).to(dtype).float()
    return torch.where(x.isfinite(), cast / scale, x).to(x.dtype)


def rounded_in_blocks(x: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """x `[..., columns]`, to FP8 and back, each block of (rows, columns) at a scale of its own, a power of two.

    The last blocks of a row or a column are shorter where the sizes do not divide.
    """
    rows = x.reshape(-1, x.shape[-1])
    (m, k), (high, wide) = rows.shape, block
    padded = torch.nn.functional.pad(rows, (0, -k % wide, 0, -m % high))
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    amax = torch.nan_to_num(tiles.detach(), 0.0, 0.0, 0.0).abs().amax((1, 3), keepdim=True).float()
    cast = rounded(tiles, _power_of_two(amax / torch.finfo(dtype).max), dtype)
    return cast.view_as(padded)[:m, :k].reshape(x.shape)


def _power_of_two(size: Tensor) -> Tensor:
    """1 / the next power of two from `size` on upwards; 1 for size 0."""
    mantissa, exponent = torch.frexp(size)  # size = mantissa 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(size), -exponent.clamp(-126, 126))
    return torch.where(size > 0, scale, 1.0)
