"""The feed-forward half of a layer.

    plain   y = act(x A + a) B + b            A [h, f]
    gated   y = (act(g) * u) B + b            [g, u] = x A + a, A [h, 2 f], gate first
            `glu_linear_offset` is added to u; `activation_func_clamp_value` bounds both before

A is split by columns and B by rows over tp, so nothing is communicated in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.fusions.bias_activation import bounded, gated, tanh_gelu, weighted
from megatron_lite.transformer.module import MegatronModule
from megatron_lite.transformer.spec_utils import ModuleSpec, build_module
from megatron_lite.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """The two linear layers."""

    linear_fc1: ModuleSpec | type = None  # type: ignore[assignment]
    linear_fc2: ModuleSpec | type = None  # type: ignore[assignment]


class MLP(MegatronModule):
    """`[s, b, h]` -> `[s, b, h]`, and the second bias where it is left to the caller.

    Args:
        config: `ffn_hidden_size`, `gated_linear_unit`, `activation_func`, `bias_activation_fusion` (which takes the
            tanh form of GELU, as Megatron's fused kernels do).
        submodules: classes of the two linear layers.
        is_expert: the weights belong to an expert.
        input_size: None = hidden_size.
        ffn_hidden_size: None = the config's.
        tp_group: None = the registered tensor-parallel group.
        bias: None = the config's `add_bias_linear`.
        output_size: None = hidden_size.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        bias: bool | None = None,
        output_size: int | None = None,
    ):
        super().__init__(config)
        bias = config.add_bias_linear if bias is None else bias
        self.input_size = config.hidden_size if input_size is None else input_size
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        assert width is not None
        self.activation_func = config.activation_func
        if config.bias_activation_fusion and self.activation_func is F.gelu:
            self.activation_func = tanh_gelu

        # The first bias is this rank's own share: the product adds it, where a fused kernel would add it later.
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            self.input_size,
            2 * width if config.gated_linear_unit else width,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=bias,
            skip_bias_add=False,
            stride=2 if config.gated_linear_unit else 1,
            is_expert=is_expert,
            tp_comm_buffer_name="fc1",
            tp_group=tp_group,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            config.hidden_size if output_size is None else output_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_comm_buffer_name="fc2",
            tp_group=tp_group,
        )

    def activate(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`[..., f]` or `[..., 2 f]` -> `[..., f]`, times a number for each row where `scale` is given."""
        limit, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
        if limit is not None or offset != 0.0:
            x = bounded(x, limit, offset, is_gated=self.config.gated_linear_unit)
        if scale is not None:
            return weighted(self.activation_func, x, scale, is_gated=self.config.gated_linear_unit)
        return gated(self.activation_func, x) if self.config.gated_linear_unit else self.activation_func(x)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x `[s, b, h]` -> (y `[s, b, h]`, bias `[h]` that is still to be added, or None).

        Args:
            per_token_scale: `[s, b]` factors on the inner activations and on the second bias, which is then added here
                (experts' routing weights).
        """
        inner, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            inner = inner + bias
        y, bias = self.linear_fc2(self.activate(inner, per_token_scale))
        if per_token_scale is not None and bias is not None:
            y, bias = y + (bias * per_token_scale.unsqueeze(-1)).to(y.dtype), None
        return y, bias
