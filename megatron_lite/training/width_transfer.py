"""Which parameters run at another learning rate because of the model's width: the optimizer's half of muP.

The table, and its source: `transformer/mup`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megatron_lite.errors import ConfigError
from megatron_lite.optimizer.param_groups import is_matrix
from megatron_lite.transformer.transformer_config import TransformerConfig


def width_transfer(
    config: TransformerConfig, optimizer: str
) -> tuple[Callable[[str, nn.Parameter], bool] | None, float]:
    """(which parameters, factor of their learning rate); (None, 1.0) where all run at the same.

    Raises: ConfigError for an optimizer without such a rule.
    """
    if not config.use_mup:
        return None, 1.0
    if optimizer in ("adam", "lion"):  # steps of one size, whatever the gradient's: a sum over m times the inputs
        return _is_hidden, 1.0 / config.width_multiplier
    if optimizer == "sgd":
        return lambda name, param: not _is_hidden(name, param), config.width_multiplier
    raise ConfigError(
        f"--use-mup with --optimizer {optimizer}",
        why="the size of its steps follows each matrix's shape already",
        fix="--optimizer adam, lion or sgd; or leave --use-mup out and see --muon-scale-mode",
    )


def _is_hidden(name: str, param: nn.Parameter) -> bool:
    """A matrix both sides of which grow with the width: no table of positions, of token types or of distances."""
    return is_matrix(param) and "embedding" not in name and "relative_attention_bias" not in name
