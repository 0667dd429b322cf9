"""Rules on context parallelism: those of the config, told with all others before anything is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.context_parallel.comm_types import problems_of_exchanges
from megatron_lite.errors import ConfigError
from megatron_lite.training.families import FAMILIES, family_of


def problems_of_context(args: Namespace) -> list[ConfigError]:
    """What of the arguments about context parallelism cannot be, after `derived.derive`."""
    sizes = args.num_layers, args.num_attention_heads, args.tensor_model_parallel_size, args.context_parallel_size
    if any(size is None or size < 1 for size in sizes):
        return []  # which has its own rule
    family = FAMILIES[family_of(args)]
    if args.context_parallel_size > 1 and not family.splits_sequences:
        able = [other.title for other in FAMILIES.values() if other.splits_sequences]
        return [
            ConfigError(
                f"--context-parallel-size {args.context_parallel_size} with {family.title}",
                why="its sequences are not spread over ranks yet",
                fix=f"--context-parallel-size 1; {', '.join(able)} can",
            )
        ]
    groups = args.num_query_groups if args.group_query_attention else None
    return list(problems_of_exchanges(Namespace(**{**vars(args), "num_query_groups": groups})))
