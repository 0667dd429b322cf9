"""The fields of TransformerConfig that make settings transfer from one width to another. No torch here.

muP (Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer",
table 8), with m = hidden size / base hidden size:

    matrices between hidden vectors    initial std / sqrt(m)      learning rate / m (adam, lion), as it is (sgd)
    tables, output layer, vectors      initial std as it is       learning rate as it is (adam, lion), * m (sgd)
    embeddings                         * embedding mult
    hidden states before the output    * 1 / m, or the output mult that is given
    scores of attention                / head ** power, * sqrt(base head) where that is given

At m = 1, with the base's head size given, it is the ordinary parametrisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError


@dataclass(kw_only=True)
class MupConfig:
    """Width transfer: what was tuned at a small width holds at a large one."""

    hidden_size: int
    softmax_scale: float | None

    use_mup: bool = flag(
        False, "Width transfer (muP): initial values, learning rates and factors such that settings keep their meaning."
    )
    mup_base_hidden_size: int | None = flag(None, "muP: the width at which settings were tuned. Default: this width.")
    mup_embedding_mult: float = flag(1.0, "muP: factor of the embedding's output.")
    mup_output_mult: float = flag(1.0, "muP: factor of the logits. Left at 1: base width / width.")
    mup_base_head_dim: float | None = flag(
        None, "muP: size of a head at the base width; scores are then multiplied by its root."
    )
    mup_attn_scale_power: float = flag(1.0, "muP: scores are divided by the head's size to this power.")

    @property
    def width_multiplier(self) -> float:
        """m of the table above; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def embedding_multiplier(self) -> float:
        """Factor of the embedding's output."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def output_multiplier(self) -> float:
        """Factor of what goes into the output layer."""
        if not self.use_mup:
            return 1.0
        return 1.0 / self.width_multiplier if self.mup_output_mult == 1.0 else self.mup_output_mult

    def score_scale(self, head_size: int) -> float:
        """Factor of attention's scores for heads of this size."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        if not self.use_mup:
            return 1.0 / math.sqrt(head_size)
        return math.sqrt(self.mup_base_head_dim or 1.0) / head_size**self.mup_attn_scale_power


def mup_problems(config: Any) -> Iterator[ConfigError]:
    """What cannot be, of anything with the fields of MupConfig."""
    for name in ("mup_base_hidden_size", "mup_base_head_dim", "mup_embedding_mult", "mup_output_mult"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            yield ConfigError(
                f"--{name.replace('_', '-')} {value}", why="it is a size or a factor", fix="a number above 0"
            )
    given = [name for name, default in _DEFAULTS.items() if getattr(config, name) != default]
    if given and not config.use_mup:
        yield ConfigError(
            " ".join(f"--{name.replace('_', '-')} {getattr(config, name)}" for name in given) + " without --use-mup",
            why="they are numbers of this parametrisation, and would do nothing",
            fix="--use-mup, or leave them out",
        )


_DEFAULTS = {
    "mup_base_hidden_size": None,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_base_head_dim": None,
    "mup_attn_scale_power": 1.0,
}
