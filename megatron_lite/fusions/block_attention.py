"""Attention of some queries on some keys, as a part of attention on more keys: results that can be put together.

    lse = ln sum_j exp(q k_j^T scale)       y = sum_j exp(q k_j^T scale - lse) v_j          of this block's keys

Two blocks a, b of keys give   lse = ln(e^lse_a + e^lse_b),   y = y_a e^(lse_a - lse) + y_b e^(lse_b - lse).
Backward of a block needs y and lse of all keys: with p = exp(q k^T scale - lse) and delta = sum(g y),

    dv = p^T g      ds = p (g v^T - delta)      dq = ds k scale      dk = ds^T q scale

so nothing of a block is kept but what is there anyway (Dao et al. 2022, Liu et al. 2023).

    kernel     what it is                                               what it cannot do
    flash      torch's flash kernel, of the CPU or of a GPU             dropout; on a GPU masks, fp32
    products   batched products, a few heads at a time                  -

Hidden scores are -10000, not minus infinity: a query that sees nothing of a block has no weight in the sum of blocks,
and one that sees nothing at all sees everything equally, as in `fusions.attention`. Beside 10000 the digits that fp32
has left would not do for such a query; so lse is fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.fusions.attention import MASKED, parts_of, rows_of, split_groups, take_part
from megatron_lite.fusions.backends import matmul_kernel
from megatron_lite.fusions.largest_score import LargestScore

Kernel = Literal["flash", "products"]


@dataclass(frozen=True)
class Arithmetic:
    """How a block is computed.

    kernel: the wish; a block that it cannot do goes by products.
    scale: of the scores.
    dropout: share of the probabilities that is dropped; seed: of what is dropped, another one for each block.
    largest: is told the scores of every block.
    """

    kernel: Kernel
    scale: float
    dropout: float = 0.0
    seed: int = 0
    largest: LargestScore | None = None

    def of_block(self, number: int) -> Arithmetic:
        """For block `number` of a call: it drops others than the block before."""
        return replace(self, seed=self.seed + number) if self.dropout else self


def draw_seed(device: torch.device) -> int:
    """A seed from the present random state, which moves on. Waits for no device."""
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)  # a few bytes on the host: seed and place
        torch.empty(1, device=device).uniform_()
        seed, place = int.from_bytes(state[:8].tolist(), "little"), int.from_bytes(state[8:16].tolist(), "little")
        return (seed * 0x9E3779B97F4A7C15 + place * 0xBF58476D1CE4E5B9) % 2**62
    return int(torch.randint(2**62, ()))


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """One block.

    Args:
        q: `[b, n, sq, d]`; k: `[b, groups, sk, d]`; v: `[b, groups, sk, dv]`; any strides with dense channels.
        hidden: bool `[b or 1, n or 1, sq, sk]`, True = hidden.
        causal: hide the future; then sq = sk.
    Returns: y `[b, n, sq, dv]` in q's dtype; lse `[b, n, sq]` fp64.
    """
    if arithmetic.largest is not None:
        arithmetic.largest.note(q, k, hidden, causal, arithmetic.scale)
    q, k, v, out_dtype = _widened(q, k, v)
    if _takes_flash(q, hidden, arithmetic):
        y, lse = _flash_forward(q, k, v, hidden, causal, arithmetic.scale)
    else:
        y, lse = _products_forward(q, k, v, _with_future(hidden, causal, q, k), arithmetic)
    return y.to(out_dtype), lse


def block_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    causal: bool,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one block.

    Args:
        g, y, lse: gradient, result and lse over all keys; the others as for this block's forward.
    """
    out_dtype = q.dtype
    q, k, v, _ = _widened(q, k, v)
    g, y = g.to(q.dtype), y.to(q.dtype)
    if _takes_flash(q, hidden, arithmetic):
        grads = _flash_backward(g, q, k, v, y, lse, hidden, causal, arithmetic.scale)
    else:
        grads = _products_backward(g, q, k, v, y, lse, _with_future(hidden, causal, q, k), arithmetic)
    dq, dk, dv = (grad.to(out_dtype) for grad in grads)
    return dq, dk, dv


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """fp32 where this CPU has no products of the dtype."""
    dtype = q.dtype
    if matmul_kernel(dtype, q.device.type) == "widen":
        q, k, v = q.float(), k.float(), v.float()
    return q, k, v, dtype


def _takes_flash(q: Tensor, hidden: Tensor | None, arithmetic: Arithmetic) -> bool:
    if arithmetic.kernel != "flash" or arithmetic.dropout:
        return False
    if q.device.type == "cpu":
        return True
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and hidden is None and q.shape[-1] % 8 == 0


def _with_future(hidden: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if not causal:
        return hidden
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1).view(1, 1, -1, k.shape[2])
    return future if hidden is None else hidden | future


# -- flash: torch's operators, by their own names, because SDPA keeps lse to itself --------------------------------


def _same_channels(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels want one head size: the smaller ones are filled up with zeros, which change no product."""
    size = max(q.shape[-1], v.shape[-1])
    return tuple(x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))  # type: ignore


def _additive(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, MASKED)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    channels = v.shape[-1]
    q, k, v = _same_channels(q, k, v)
    if q.device.type == "cpu":
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_additive(hidden, q.dtype), scale=scale
        )
    else:
        y, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return y[..., :channels], lse.double()


def _flash_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    d, dv_size = q.shape[-1], v.shape[-1]
    q, k, v = _same_channels(q, k, v)
    size, lse = q.shape[-1], lse.to(torch.promote_types(q.dtype, torch.float32))
    if dv_size != size:
        g, y = F.pad(g, (0, size - dv_size)), F.pad(y, (0, size - dv_size))
    if q.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, y, lse, 0.0, causal, attn_mask=_additive(hidden, q.dtype), scale=scale
        )
    else:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, y, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state[:0],
            scale=scale,
        )  # fmt: skip
    return dq[..., :d], dk[..., :d], dv[..., :dv_size]


# -- products ----------------------------------------------------------------------------------------------------


def _products_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    b, n, sq, _ = q.shape
    groups, sk = k.shape[1], k.shape[2]
    q3, k3, v3 = (split_groups(x, groups) for x in (q, k, v))
    mask = None if hidden is None else rows_of(hidden, b, n, groups, sq, sk)
    y = torch.empty(b * groups, q3.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b * groups, q3.shape[1], dtype=torch.float64, device=q.device)
    generator = _generator(arithmetic, q.device)
    for part in parts_of(b * groups, q3.shape[1] * sk * q.element_size(), q.device):
        scores = _scores(q3[part], k3[part], mask, part, arithmetic.scale)
        p = torch.softmax(scores, dim=-1)
        lse[part] = scores.amax(-1).double() - p.amax(-1).double().log()
        if generator is not None:
            p.mul_(_kept(p, generator, arithmetic.dropout))
        torch.bmm(p.to(q.dtype), v3[part], out=y[part])
    return y.view(b, n, sq, -1), lse.view(b, n, sq)


def _products_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, hidden: Tensor | None, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, sq, _ = q.shape
    groups, sk = k.shape[1], k.shape[2]
    g3, q3, k3, v3, y3 = (split_groups(x, groups) for x in (g, q, k, v, y))
    lse = lse.reshape(b * groups, -1, 1)
    coarse = lse.to(_wide(q))
    fine = (lse - coarse).to(coarse.dtype)  # what fp32 leaves of an lse near -10000
    mask = None if hidden is None else rows_of(hidden, b, n, groups, sq, sk)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q3, k3, v3))
    generator = _generator(arithmetic, q.device)
    for part in parts_of(b * groups, q3.shape[1] * sk * q.element_size(), q.device):
        p = _scores(q3[part], k3[part], mask, part, arithmetic.scale).sub_(coarse[part])
        p = (p if mask is None else p.sub_(fine[part])).exp_()
        dp = torch.bmm(g3[part], v3[part].transpose(1, 2)).to(p.dtype)
        used = p
        if generator is not None:
            kept = _kept(p, generator, arithmetic.dropout)
            used = p * kept
            dp.mul_(kept)
        torch.bmm(used.to(q.dtype).transpose(1, 2), g3[part], out=dv[part])
        delta = (g3[part].to(p.dtype) * y3[part].to(p.dtype)).sum(-1, keepdim=True)
        ds = dp.sub_(delta).mul_(p)
        if mask is not None:
            ds.masked_fill_(take_part(mask, part), 0.0)
        ds = ds.mul_(arithmetic.scale).to(q.dtype)
        torch.bmm(ds, k3[part], out=dq[part])
        torch.bmm(ds.transpose(1, 2), q3[part], out=dk[part])
    return dq.view(b, n, sq, -1), dk.view(b, groups, sk, -1), dv.view(b, groups, sk, -1)


def _wide(x: Tensor) -> torch.dtype:
    """What sums are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, part: slice, scale: float) -> Tensor:
    """At least fp32, hidden ones filled."""
    scores = torch.bmm(q, k.transpose(1, 2)).to(_wide(q)).mul_(scale)
    return scores if mask is None else scores.masked_fill_(take_part(mask, part), MASKED)


def _generator(arithmetic: Arithmetic, device: torch.device) -> torch.Generator | None:
    return torch.Generator(device).manual_seed(arithmetic.seed) if arithmetic.dropout else None


def _kept(p: Tensor, generator: torch.Generator, dropout: float) -> Tensor:
    """0 where dropped, 1 / (1 - dropout) elsewhere; forward and backward draw the same."""
    return torch.empty_like(p).bernoulli_(1.0 - dropout, generator=generator).mul_(1.0 / (1.0 - dropout))


# -- putting blocks together -------------------------------------------------------------------------------------


def zeros_for_sums(x: Tensor) -> Tensor:
    """Where gradients of `x` are added up: at least fp32."""
    return torch.zeros(x.shape, dtype=_wide(x), device=x.device)


class Sum:
    """Attention over blocks of keys that come one after another.

    y: `[b, n, sq, dv]`, at least fp32, laid out as layers have it, `[sq, b, n, dv]`: no copy; lse: `[b, n, sq]`, fp64.

    Args:
        q: the queries `[b, n, sq, d]`.
        channels: dv.
    """

    def __init__(self, q: Tensor, channels: int):
        b, n, sq, _ = q.shape
        self.y = torch.zeros(sq, b, n, channels, dtype=_wide(q), device=q.device).permute(1, 2, 0, 3)
        self.lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)

    def add(self, queries: slice, y: Tensor, lse: Tensor) -> None:
        """A block's result for some of the queries."""
        before = self.lse[:, :, queries]
        total = torch.logaddexp(before, lse)
        share = self.y[:, :, queries]
        share.mul_(self._weight(before, total)).addcmul_(y.to(share.dtype), self._weight(lse, total))
        before.copy_(total)

    def add_sink(self, sink: Tensor) -> None:
        """One more key with these scores `[n]` and no value. The last block."""
        total = torch.logaddexp(self.lse, sink.double().view(1, -1, 1).expand_as(self.lse))
        self.y.mul_(self._weight(self.lse, total))
        self.lse = total

    def kept(self, q: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        """y in q's dtype and lse, for backward.

        Args:
            masked: queries may see nothing: their lse needs its digits.
        """
        return self.y.to(q.dtype), self.lse if masked else self.lse.to(self.y.dtype)

    def _weight(self, part: Tensor, total: Tensor) -> Tensor:
        return (part - total).exp_().to(self.y.dtype).unsqueeze(-1)


def sink_backward(sink: Tensor, g: Tensor, y: Tensor, lse: Tensor) -> Tensor:
    """Gradient of the sink's scores `[n]`: its value is 0, so that ds = -p delta."""
    delta = (g.double() * y.double()).sum(-1)
    return -((sink.double().view(1, -1, 1) - lse).exp() * delta).sum((0, 2)).to(sink.dtype)
