"""The fields of TransformerConfig that concern rotary positions, and what of them cannot be. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError


@dataclass(kw_only=True)
class RotaryConfig:
    """Rotary positions: which channels, which layers, longer contexts."""

    rotary_interleaved: bool = flag(False, "Rotate pairs of even and odd channels, not first and second half.")
    no_rope_freq: int | list[int] | None = flag(
        None, "Which layers do without rotary positions: every N-th, or a list of 1 (without) and 0 (with)."
    )
    mrope_section: list[int] | None = flag(
        None, "Pairs of channels that turn by a token's time, height and width, with --position-embedding-type mrope."
    )

    # -- YaRN. Unset numbers: those of `YarnRotaryEmbedding`.
    yarn_original_max_position_embeddings: int | None = flag(
        None, "YaRN: context length that the model was trained with before. Default: 4096.", unit="tokens"
    )
    yarn_beta_fast: float | None = flag(
        None, "YaRN: channels that turn so many times in the old context keep their frequency. Default: 32."
    )
    yarn_beta_slow: float | None = flag(
        None, "YaRN: channels that turn so few times in it are slowed by the whole factor. Default: 1."
    )
    yarn_correction_range_round_to_int: bool = flag(True, "YaRN: mix between whole channels.", pair=True)
    yarn_rotary_scaling_factor: float | None = None  # these are set where the positions are YaRN's: their flags are
    yarn_mscale: float = 1.0  # in training/configs, because multi-latent attention has fields of its own for them
    yarn_mscale_all_dim: float = 0.0


def rotary_problems(config: Any) -> Iterator[ConfigError]:
    """What cannot be, of anything with the fields of RotaryConfig."""
    section = config.mrope_section
    if section is not None and (len(section) != 3 or min(section) < 0 or sum(section) < 1):
        yield ConfigError(
            f"--mrope-section {' '.join(map(str, section))}",
            why="time, height and width have a share of the channels each",
            fix="three numbers whose sum is half the rotated channels of a head, for example 16 24 24",
        )
    old = config.yarn_original_max_position_embeddings
    if old is not None and old < 1:
        yield ConfigError(
            f"--yarn-original-max-position-embeddings {old}", why="it is a length in tokens", fix="for example 4096"
        )
    fast = 32.0 if config.yarn_beta_fast is None else config.yarn_beta_fast
    slow = 1.0 if config.yarn_beta_slow is None else config.yarn_beta_slow
    if not 0.0 < slow <= fast:
        yield ConfigError(
            f"--yarn-beta-fast {fast} with --yarn-beta-slow {slow}",
            why="channels that turn often keep their frequency, those that turn seldom are slowed",
            fix="--yarn-beta-fast 32 --yarn-beta-slow 1",
        )
