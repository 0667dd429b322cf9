"""How context-parallel ranks exchange keys and values, by name, and what each way needs. No torch here: flags ask."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.errors import ConfigError

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def problems_of_exchanges(a: Any) -> Iterator[ConfigError]:
    """Of what every layer's exchange needs.

    Args:
        a: a TransformerConfig, or a run's arguments with these names.
    """
    typed = [a.cp_comm_type] if isinstance(a.cp_comm_type, str) else a.cp_comm_type
    cp, tp, levels = a.context_parallel_size, a.tensor_model_parallel_size, a.hierarchical_context_parallel_sizes
    if len(typed) not in (1, a.num_layers):
        yield ConfigError(
            f"--cp-comm-type has {len(typed)} entries with --num-layers {a.num_layers}",
            why="a list says it for each layer",
            fix=f"a list of {a.num_layers} entries, or one for all",
        )
    if levels is not None and (math.prod(levels) != cp or min(levels) < 1):
        yield ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels))} with --context-parallel-size {cp}",
            why=f"the levels multiply to the context-parallel size, and these to {math.prod(levels)}",
            fix="sizes whose product is the context-parallel size",
        )
        return
    heads = a.num_attention_heads // tp
    groups = max(1, (a.num_query_groups or a.num_attention_heads) // tp)
    for kind in dict.fromkeys(typed):
        problem = problem_of_exchange(kind, cp, levels, heads, groups)
        if problem is not None:
            yield problem


def problem_of_exchange(
    comm_type: str, cp_size: int, levels: Sequence[int] | None, heads: int, groups: int
) -> ConfigError | None:
    """Of an exchange that these ranks cannot do.

    Args:
        levels: sizes of the levels of context parallelism, innermost first.
        heads, groups: query heads and key/value heads of a tensor-parallel rank.
    """
    if comm_type not in COMM_TYPES:
        return ConfigError(f"--cp-comm-type {comm_type}", why="no such exchange", fix=f"of {', '.join(COMM_TYPES)}")
    if comm_type == "a2a+p2p" and cp_size > 1 and (levels is None or len(levels) != 2):
        return ConfigError(
            "--cp-comm-type a2a+p2p without two --hierarchical-context-parallel-sizes",
            why="the all-to-all runs inside the first level, the ring across the second",
            fix=f"--hierarchical-context-parallel-sizes A B with A * B = {cp_size}",
        )
    ways = cp_size if comm_type == "a2a" else levels[0] if comm_type == "a2a+p2p" and levels else 1
    if heads % ways or groups % ways:
        return ConfigError(
            f"--cp-comm-type {comm_type} over {ways} ranks with {heads} query heads and {groups} key/value heads on "
            "each tensor-parallel rank",
            why="the ranks share out both kinds of heads equally",
            fix="--cp-comm-type p2p or all_gather, or fewer tensor-parallel ranks",
        )
    return None
