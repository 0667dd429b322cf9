"""softmax(q k^T / sqrt(d)) v, by one of several implementations that agree.

    --attention-backend   implementation                                            what it cannot do
    local                 written out: product, mask, softmax, dropout, product     nothing; it is the reference
    unfused               batched products with a written-out backward              sinks (left to local)
    fused                 torch's scaled_dot_product_attention, its own choice      sinks, bias
    flash                 the same, flash kernel only                               sinks, bias; dropout on a CPU
    auto                  the fastest of them that can do what is asked

Heads of values may have another size than those of queries and keys. torch's flash kernels want one size, so the
narrower side is filled up with zeros, which change no score, and the result is cut.

What a query may see: what the window (if there is one) and the given mask (True = hidden) both leave; without either,
in a causal layer, itself and what came before. Hidden scores become -10000, so a query that may see nothing looks at
everything equally; `fused` and `flash` use minus infinity, which is the same unless a query sees nothing. (There such
a query, of padding, attends to everything as if nothing were hidden.)

Where context-parallel ranks share a sequence, or documents are packed, attention goes block by block
(`context_parallel`), with the same choice of kernels: flash, or products for all else.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite import collectives
from megatron_lite.context_parallel.attention import ContextParallelAttention
from megatron_lite.context_parallel.partition import one_document
from megatron_lite.context_parallel.visibility import SegmentMask, Visible
from megatron_lite.errors import ConfigError
from megatron_lite.fusions.attention import MASKED, attention
from megatron_lite.fusions.backends import matmul_kernel
from megatron_lite.fusions.block_attention import Arithmetic, Kernel, draw_seed
from megatron_lite.fusions.largest_score import LargestScore
from megatron_lite.initialization import set_init
from megatron_lite.packed_seq_params import PackedSeqParams
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import split
from megatron_lite.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron_lite.tensor_parallel.random import get_cuda_rng_tracker
from megatron_lite.tensor_parallel.utils import divide
from megatron_lite.transformer.enums import AttnBackend, AttnMaskType
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.transformer_config import TransformerConfig

# Up to here batched products in bf16 beat torch's flash kernel on a CPU (measured: 3x at 256 keys, 1.4x at 1024).
_PRODUCTS_UP_TO_KEYS = 1024
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def is_layer_window_attention(config: TransformerConfig, layer_number: int) -> bool:
    """Whether this layer (counted from 1) looks through the window, or at everything."""
    if config.window_size is None:
        return False
    pattern = config.window_attn_skip_freq
    if pattern is None:
        return True
    return layer_number % pattern != 0 if isinstance(pattern, int) else bool(pattern[layer_number - 1])


def hidden_outside_window(sq: int, sk: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """bool `[1, 1, sq, sk]`, True where key j lies more than left before or right after query i; -1 = no limit.

    The last query stands at the last key.
    """
    left, right = window
    distance = torch.arange(sk, device=device) - torch.arange(sk - sq, sk, device=device).unsqueeze(1)  # key - query
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden.view(1, 1, sq, sk)


def _keep_narrow(dtype: torch.dtype) -> torch.autograd.graph.saved_tensors_hooks:
    """Keep q, k, v and y for backward in `dtype`, not in the fp32 in which they are computed with.

    q, k and v were widened from `dtype`, so nothing is lost; y is rounded as a kernel of `dtype` would.
    """

    def pack(t: Tensor) -> Tensor:
        return t.to(dtype) if t.dtype == torch.float32 and t.dim() == 4 else t

    def unpack(t: Tensor) -> Tensor:
        return t.float() if t.dtype == dtype and t.dim() == 4 else t

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class DotProductAttention(MegatronModule):
    """Attention between given queries, keys and values; this rank's heads.

    Args:
        layer_number: global, from 1: picks the window and the scaling of `apply_query_key_layer_scaling`.
        attn_mask_type: whether the layer is causal where no mask is given.
        attention_type: "self" or "cross"; accepted as Megatron has it.
        attention_dropout: None = the config's.
        softmax_scale: None = the config's, or 1 / sqrt(kv_channels).
        cp_comm_type: how context-parallel ranks exchange keys; None = the config's.
        pg_collection: None = the registered groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        assert config.kv_channels is not None
        self.softmax_scale = config.score_scale(config.kv_channels) if softmax_scale is None else softmax_scale
        self.window = config.window_size if is_layer_window_attention(config, self.layer_number) else None
        self.sink = config.softmax_type != "vanilla"
        self.largest_score: LargestScore | None = None  # set by who wants to know it
        backend = config.attention_backend
        self.backend = backend if isinstance(backend, AttnBackend) else AttnBackend[backend]
        if self.sink and self.backend in (AttnBackend.flash, AttnBackend.fused):
            raise ConfigError(
                f"--attention-backend {self.backend.name} with --softmax-type {config.softmax_type}",
                why="torch's fused attention has no sink in its softmax",
                fix="--attention-backend auto",
            )

        tp_rank, tp_size = collectives.group_rank(groups.tp), collectives.group_size(groups.tp)
        heads = divide(config.num_attention_heads, tp_size)
        self.cp_size = collectives.group_size(groups.cp)
        self.blockwise = ContextParallelAttention(
            cp_comm_type or config.cp_comm_type_of(self.layer_number),
            groups.cp,
            groups.hcp,
            heads,
            max(1, (config.num_query_groups or config.num_attention_heads) // tp_size),
        )
        if config.softmax_type == "learnable":
            offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            shard = split("softmax_offset", (heads,), 0, tp_rank, tp_size)
            offset.shard = shard  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
            assert config.readout_init_method is not None
            set_init(offset, config.readout_init_method, "softmax_offset", shard)
            self.softmax_offset = offset
        elif config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads), persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | SegmentMask | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query `[sq, b, np, hn]`, key and value `[sk, b, ng, hn]` -> `[sq, b, np * hn]`.

        Under context parallelism sq and sk are this rank's share. Packed documents lie in one sequence: b = 1, or left
        out of all shapes.

        Args:
            attention_mask: bool `[b or 1, 1, sq or 1, sk]`, True = hidden; sk is that of the whole sequence.
            attn_mask_type: None = the layer's.
            attention_bias: `[b or 1, np, sq, sk]`, added to the scaled scores.
            packed_seq_params: attend inside each of these documents.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if packed_seq_params is not None or self.cp_size > 1:
            if attention_bias is not None:
                raise ConfigError(
                    "an attention bias with " + ("packed sequences" if self.cp_size == 1 else "context parallelism"),
                    why="blocks of the sequence are attended to one by one, and there is no bias of a block",
                    fix="--context-parallel-size 1, or other positions",
                )
            return self._blockwise(query, key, value, attention_mask, mask_type, packed_seq_params)
        if isinstance(attention_mask, SegmentMask):
            attention_mask = attention_mask.dense(causal=mask_type in _CAUSAL)
        sq, b, heads, _ = query.shape
        hidden, causal = self._what_is_hidden(attention_mask, mask_type, sq, key)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n, s, hn], views
        if self.largest_score is not None:
            self.largest_score.note(q, k, hidden, causal and sq > 1, self.softmax_scale, attention_bias)
        dropout = self.dropout_p if self.training else 0.0
        backend = self._choose(q, k, hidden, mask_type, dropout, attention_bias)
        # Heads differ between tensor-parallel ranks, so their masks must too. Under sequence parallelism the block has
        # entered the region already.
        region = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with region:
            if backend in (AttnBackend.flash, AttnBackend.fused):
                y = self._torch_attention(q, k, v, hidden, causal, dropout, backend)
            else:
                if causal and sq > 1:
                    hidden = hidden_outside_window(sq, k.shape[2], (-1, 0), q.device)
                if backend is AttnBackend.unfused:
                    y = attention(q, k, v, hidden, self.softmax_scale, dropout, attention_bias)
                else:
                    y = self._written_out(q, k, v, hidden, attention_bias, dropout)
        return y.permute(2, 0, 1, 3).reshape(sq, b, heads * value.shape[-1])

    def _blockwise(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | SegmentMask | None,
        mask_type: AttnMaskType,
        packed: PackedSeqParams | None,
    ) -> Tensor:
        """Block by block: over context-parallel ranks, over packed documents, or both."""
        flat = query.dim() == 3
        if flat:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        sq, b, heads, _ = query.shape
        total, key_total = sq * self.cp_size, key.shape[0] * self.cp_size
        documents, key_documents = one_document(total), one_document(key_total)
        if packed is not None:
            documents, key_documents = packed.documents("q"), packed.documents("kv")
            if b != 1 or documents[-1].end != total or key_documents[-1].end != key_total:
                raise ConfigError(
                    f"packed documents of {documents[-1].end} tokens for {b} sequences of {total}",
                    why="they fill one sequence",
                    fix="a micro-batch of one sequence, and cu_seqlens that end at its length",
                )
        visible = self._visible(mask, mask_type)
        visible.check(sq, key_total, key_total)
        dropout = self.dropout_p if self.training else 0.0
        backend = self._choose_for_blocks(query, visible, mask_type, dropout)
        region = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with region:
            seed = draw_seed(query.device) if dropout else 0
        kernel: Kernel = "flash" if backend is AttnBackend.flash else "products"
        arithmetic = Arithmetic(kernel, self.softmax_scale, dropout, seed, self.largest_score)
        y = self.blockwise(
            query,
            key,
            value,
            visible,
            documents,
            key_documents,
            arithmetic,
            self.softmax_offset if self.sink else None,
        )
        y = y.reshape(sq, b, heads * value.shape[-1])
        return y.squeeze(1) if flat else y

    def _visible(self, mask: Tensor | SegmentMask | None, mask_type: AttnMaskType) -> Visible:
        """As `_what_is_hidden`, without making a mask."""
        left, right = (None if limit < 0 else limit for limit in self.window or (-1, -1))
        causal, given = mask_type in _CAUSAL, mask if mask_type is not AttnMaskType.no_mask else None
        if causal and not isinstance(given, Tensor) and (self.window is None or given is not None):
            right = 0
        if isinstance(given, SegmentMask):
            return Visible(left, right, segments=given.ids)
        return Visible(left, right, rows=given)

    def _choose_for_blocks(
        self, q: Tensor, visible: Visible, mask_type: AttnMaskType, dropout: float
    ) -> Literal[AttnBackend.flash, AttnBackend.unfused]:
        """The kernel of blocks."""
        if self.backend in (AttnBackend.local, AttnBackend.unfused):
            return AttnBackend.unfused
        if self.backend is AttnBackend.flash and dropout:
            raise ConfigError(
                f"--attention-backend flash with --attention-dropout {dropout} and blocks of a sequence",
                why="with torch's flash kernel backward could not drop the same probabilities again",
                fix="--attention-backend auto, or --attention-dropout 0",
            )
        odd = visible.masked and mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask)
        return AttnBackend.unfused if dropout or (odd and self.backend is AttnBackend.auto) else AttnBackend.flash

    def _what_is_hidden(
        self, mask: Tensor | None, mask_type: AttnMaskType, sq: int, key: Tensor
    ) -> tuple[Tensor | None, bool]:
        """A mask, or None and whether the kernel shall hide the future itself."""
        sk = key.shape[0]
        given = mask if mask_type is not AttnMaskType.no_mask else None
        if self.window is not None:
            outside = hidden_outside_window(sq, sk, self.window, key.device)
            return outside if given is None else outside | given, False
        if given is not None:
            return given, False
        if mask_type in _CAUSAL and sq > 1:
            if sq == sk:
                return None, True
            return hidden_outside_window(sq, sk, (-1, 0), key.device), False
        return None, False

    def _choose(
        self,
        q: Tensor,
        k: Tensor,
        hidden: Tensor | None,
        mask_type: AttnMaskType,
        dropout: float,
        bias: Tensor | None,
    ) -> AttnBackend:
        """The implementation for this call."""
        if bias is not None and self.backend in (AttnBackend.flash, AttnBackend.fused):
            raise ConfigError(
                f"--attention-backend {self.backend.name} with an attention bias",
                why="its kernels take none together with a causal mask",
                fix="--attention-backend auto",
            )
        if self.backend is AttnBackend.local or self.sink:
            return AttnBackend.local
        if bias is not None:
            return AttnBackend.unfused
        on_cpu = q.device.type == "cpu"
        if self.backend is AttnBackend.flash and dropout and on_cpu:
            raise ConfigError(
                f"--attention-backend flash with --attention-dropout {dropout} on a CPU",
                why="torch's flash kernel for CPUs has no dropout",
                fix="--attention-backend auto, or --attention-dropout 0",
            )
        if self.backend is not AttnBackend.auto:
            return self.backend
        of_queries = hidden is not None and hidden.shape[2] > 1  # else it hides padding, and all queries see the rest
        if of_queries and mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            return AttnBackend.unfused  # a padded query may see nothing, where minus infinity means something else
        if on_cpu and dropout:
            return AttnBackend.unfused  # torch would take its slowest path
        short = k.shape[2] <= _PRODUCTS_UP_TO_KEYS and q.shape[2] > 1
        if on_cpu and short and q.dtype == torch.bfloat16 and matmul_kernel(q.dtype, "cpu") == "torch":
            return AttnBackend.unfused
        return AttnBackend.fused

    def _torch_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        causal: bool,
        dropout: float,
        backend: AttnBackend,
    ) -> Tensor:
        dtype, size = q.dtype, v.shape[-1]
        if size != q.shape[-1]:
            wide = max(size, q.shape[-1])
            q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        kept: Any = nullcontext()
        if matmul_kernel(dtype, q.device.type) == "widen":
            q, k, v = q.float(), k.float(), v.float()
            kept = _keep_narrow(dtype)
        grouped = q.shape[1] != k.shape[1]
        seen = None if hidden is None else ~hidden
        if seen is not None and self.attn_mask_type not in _CAUSAL:
            seen = seen | ~seen.any(dim=-1, keepdim=True)  # a query that may see nothing sees everything, and no NaN
        only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if backend is AttnBackend.flash else nullcontext()
        try:
            with only, kept:
                y = F.scaled_dot_product_attention(
                    q, k, v, seen, dropout, causal, scale=self.softmax_scale, enable_gqa=grouped
                )
        except RuntimeError as error:
            if backend is AttnBackend.flash and "kernel" in str(error).lower():
                raise ConfigError(
                    f"--attention-backend flash with {dtype}, head size {q.shape[-1]}"
                    f"{', a mask' if hidden is not None else ''} on {q.device.type}",
                    why=f"torch has no flash kernel for it ({str(error).splitlines()[0]})",
                    fix="--attention-backend auto",
                ) from error
            raise
        return y[..., :size].to(dtype)

    def _written_out(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None, dropout: float
    ) -> Tensor:
        """The formula itself. q `[b, np, sq, hn]`, k and v `[b, ng, sk, hn]`."""
        dtype = q.dtype
        if matmul_kernel(dtype, q.device.type) == "widen":
            q, k, v = q.float(), k.float(), v.float()
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        # Dividing by the layer's number keeps deep layers' scores within fp16; the softmax, in fp32, undoes it.
        divisor = float(self.layer_number) if self.config.apply_query_key_layer_scaling else 1.0
        scores = (q @ k.transpose(-1, -2)) * (self.softmax_scale / divisor)  # [b, np, sq, sk]
        if self.config.attention_softmax_in_fp32:
            scores = scores.float()
        scores = scores * divisor if divisor != 1.0 else scores
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, MASKED)
        if self.sink:  # one more column, which takes probability and has no value
            offset = self.softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.softmax(torch.cat([scores, offset], dim=-1), dim=-1)[..., :-1]
        else:
            probabilities = torch.softmax(scores, dim=-1)
        probabilities = F.dropout(probabilities.to(q.dtype), dropout, training=dropout > 0.0)
        return (probabilities @ v).to(dtype)
