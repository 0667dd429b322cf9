"""Rules on context parallelism: those of the config, told with all others before anything is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.context_parallel.comm_types import problems_of_exchanges
from megatron_lite.errors import ConfigError


def problems_of_context(args: Namespace) -> list[ConfigError]:
    """What of the arguments about context parallelism cannot be, after `derived.derive`."""
    sizes = args.num_layers, args.num_attention_heads, args.tensor_model_parallel_size, args.context_parallel_size
    if any(size is None or size < 1 for size in sizes):
        return []  # which has its own rule
    groups = args.num_query_groups if args.group_query_attention else None
    return list(problems_of_exchanges(Namespace(**{**vars(args), "num_query_groups": groups})))
