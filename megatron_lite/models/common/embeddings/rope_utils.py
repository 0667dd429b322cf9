"""Rotary embedding of queries or keys, under Megatron's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.context_parallel.partition import held_runs
from megatron_lite.fusions.rope import rotate
from megatron_lite.packed_seq_params import PackedSeqParams


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """t `[s, b, n, d]` turned by freqs `[s, 1, 1, r]`, r <= d; channels from r on pass.

    Args:
        config: its `rotary_interleaved` says which channels are pairs.
        cu_seqlens: `[documents + 1]`, where packed documents end, with their padding: positions restart in each, and
            freqs holds those of the longest, from 0.
        mscale: factor on cos and sin.
        cp_group: ranks that hold the other parts of packed documents.
    """
    if cu_seqlens is not None:
        packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens)
        freqs = angles_of_documents(freqs, packed, "q", cp_group)
    if t.dim() == 3:  # packed, without a dimension for the one sequence
        return rotate(t.unsqueeze(1), freqs, config.rotary_interleaved, mscale).squeeze(1)
    return rotate(t, freqs, config.rotary_interleaved, mscale)


def angles_of_documents(freqs: Tensor, packed: PackedSeqParams, of: str, cp_group: ProcessGroup | None) -> Tensor:
    """Angles `[s, 1, 1, r]` of positions from 0 on -> `[t/cp, 1, 1, r]`, one for each token that this rank holds.

    Args:
        of: "q" or "kv", whose documents are meant.
    """
    documents = packed.documents(of)
    held = held_runs(collectives.group_rank(cp_group), collectives.group_size(cp_group), documents)
    places = [
        torch.arange(run.begin - document.begin, run.begin - document.begin + run.length, device=freqs.device)
        for document, runs in zip(documents, held)
        for run in runs
    ]
    return freqs.index_select(0, torch.cat(places))
