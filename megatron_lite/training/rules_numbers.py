"""Rules on how numbers are scaled and rounded: those of the config, told with all others before anything is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.transformer.mup import mup_problems


def problems_of_numbers(args: Namespace) -> list[ConfigError]:
    """What of the arguments about number formats and factors cannot be, after `derived.derive`."""
    return [*mup_problems(args)]
