"""LayerNorm and RMSNorm over the last dim; fp32 inside whatever the dtype.

`WrappedTorchNorm(config, hidden_size, eps)` gives the one that `config.normalization` names. With
`layernorm_zero_centered_gamma` the weight is stored as gamma - 1, so that weight decay pulls the scale towards 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.errors import ConfigError
from megatron_lite.fusions.norm import layer_norm, rms_norm
from megatron_lite.initialization import Constant, set_init
from megatron_lite.sharding import whole
from megatron_lite.transformer.transformer_config import TransformerConfig


class _Norm(nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, has_bias: bool):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = self._parameter("weight", 0.0 if self.zero_centered_gamma else 1.0, config)
        self.register_parameter("bias", None)
        if has_bias:
            self.bias = self._parameter("bias", 0.0, config)

    def _parameter(self, name: str, value: float, config: TransformerConfig) -> nn.Parameter:
        param = nn.Parameter(torch.empty(self.hidden_size, dtype=config.params_dtype))
        param.shard = whole(name, tuple(param.shape))  # type: ignore[attr-defined]
        # On sequence shards each rank sees some of the positions: its gradient is a part of the sum over tp.
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_init(param, Constant(value), name)
        return param

    def gamma(self) -> Tensor:
        """The scale itself, `[h]`."""
        return self.weight + 1.0 if self.zero_centered_gamma else self.weight

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}" + (", gamma - 1 stored" if self.zero_centered_gamma else "")


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * gamma + beta (Ba et al. 2016)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(config, hidden_size, eps, has_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` -> `[..., h]` in the parameters' dtype."""
        return layer_norm(x, self.gamma(), self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gamma (Zhang and Sennrich 2019)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(config, hidden_size, eps, has_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` -> `[..., h]` in the parameters' dtype."""
        return rms_norm(x, self.gamma(), self.eps)


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without weights: what Llama 4 does to queries and keys.

    Args:
        config: accepted as norms have it.
        eps: Megatron's for this norm, whatever the config's is.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, config: TransformerConfig | None = None, **_: Any):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` -> `[..., h]`."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class WrappedTorchNorm:
    """Makes the norm that the config names. (A class, because specs name classes.)"""

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> nn.Module:
        """A LayerNorm or RMSNorm.

        Args:
            persist_layer_norm, zero_centered_gamma, normalization: accepted as Megatron has them; the config decides.
        """
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ConfigError(f"--normalization {config.normalization}", why="no such norm", fix=" or ".join(kinds))
        return kinds[config.normalization](config, hidden_size, eps)
