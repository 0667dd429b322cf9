"""Rows of the matrix in which experts are spread over ranks: the whole table, and the part of it that the suite runs.

`python -m tests.distributed.expert_layouts [--part I/N] [--context]` runs the whole table: 160 rows, or the 32 with
context parallelism, on up to 8 ranks.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

from megatron_lite.training.layout_check import table
from tests.distributed.layouts import Layout, Matrix
from tests.world import Worlds

DISPATCHERS = ("allgather", "alltoall")
CAPACITY = {
    "dropless": (),
    "drop": ("--moe-expert-capacity-factor", "1.0"),
    "position": ("--moe-expert-capacity-factor", "1.0", "--moe-token-drop-policy", "position"),
    "pad": ("--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"),
}


def row(ep: int, etp: int, tp: int, pp: int, dp: int, dispatcher: str, capacity: str, number: int) -> Layout:
    """A row of these sizes; what has no dimension of its own takes turns by the row's number."""
    flags = ("--moe-token-dispatcher-type", dispatcher, *CAPACITY[capacity])
    flags += ("--moe-grouped-gemm",) if number % 3 != 1 else ()
    flags += ("--eod-mask-loss",) if number % 4 == 3 else ()  # micro-batches with different numbers of tokens
    return Layout(
        model="deepseek" if number % 5 == 4 else "mixtral",
        ep=ep,
        etp=etp,
        tp=tp,
        sp=tp > 1,
        pp=pp,
        dp=dp,
        distributed_optimizer=number % 2 == 1,
        per_token_loss=number % 4 == 3,
        recompute=("none", "full", "selective")[number % 7 % 3],
        flags=flags,
    )


def whole_table() -> list[Layout]:
    """ep 2, 4 x expert tp 1, 2 x tp 1, 2 x pp 1, 2 x dp x dispatcher x capacity, on up to 8 ranks."""
    sizes = [
        (ep, etp, tp, pp, dp)
        for ep, etp, tp, pp, dp in itertools.product((2, 4), (1, 2), (1, 2), (1, 2), (1, 2, 4))
        if tp * pp * dp <= 8 and tp * dp % (ep * etp) == 0
    ]
    cells = itertools.product(sizes, DISPATCHERS, CAPACITY)
    return [row(*size, dispatcher, capacity, n) for n, (size, dispatcher, capacity) in enumerate(cells)]


def context_rows() -> list[Layout]:
    """Sequences and experts spread together: cp 2, 4 x comm type x ep 2, 4 x expert tp, tp, pp, dp where they fit."""
    sizes = [
        (cp, ep, etp, tp, pp, dp)
        for cp, ep, etp, tp, pp, dp in itertools.product((2, 4), (2, 4), (1, 2), (1, 2), (1, 2), (1, 2))
        if cp * tp * pp * dp <= 8 and cp * tp * dp % (ep * etp) == 0
    ]
    rows = []
    for number, (cp, ep, etp, tp, pp, dp) in enumerate(sizes):
        dispatcher, capacity = DISPATCHERS[number % 2], list(CAPACITY)[number // 2 % 4]
        plain = row(ep, etp, tp, pp, dp, dispatcher, capacity, number)
        kinds = ("p2p", "all_gather", "a2a") if cp * tp <= 4 else ("p2p", "all_gather")  # four key heads are shared out
        kind = kinds[number % len(kinds)]
        rows.append(replace(plain, cp=cp, split=("--cp-comm-type", kind)))
    return rows


def facts(layout: Layout) -> dict[str, Any]:
    """What pairs are made of."""
    return {
        **{name: getattr(layout, name) for name in ("model", "ep", "etp", "tp", "pp", "distributed_optimizer")},
        "recompute": layout.recompute,
        "per_token_loss": layout.per_token_loss,
        "dispatcher": layout.flags[1],
        "capacity": next(name for name, flags in reversed(CAPACITY.items()) if set(flags) <= set(layout.flags)),
        "grouped": "--moe-grouped-gemm" in layout.flags,
    }


def pairs(layout: Layout) -> set[frozenset[tuple[str, Any]]]:
    """Every pair of two facts."""
    return {frozenset(pair) for pair in itertools.combinations(facts(layout).items(), 2)}


def covering_rows() -> list[Layout]:
    """Rows of the table in which every pair of facts occurs that occurs anywhere; few ranks where there is a choice."""
    table, seen, chosen = whole_table(), set(), []
    wanted = set().union(*map(pairs, table))
    while wanted - seen:
        best = max(table, key=lambda layout: len(pairs(layout) - seen) / (layout.world_size + 2))
        seen |= pairs(best)
        chosen.append(best)
    return chosen


def main() -> None:
    """Run a part of the table and print what deviates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--context", action="store_true", help="the rows with context parallelism")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    worlds, failed = Worlds(), 0
    matrix = Matrix(worlds)
    rows = (context_rows() if args.context else whole_table())[part::parts]
    for layout in rows:
        try:
            found = matrix.check(layout)
            if all(deviation.is_ok for deviation in found):
                continue
            print(f"{layout}\n{table(found)}", flush=True)
        except Exception as error:
            print(f"{layout}\n{error}", flush=True)
        failed += 1
    worlds.close()
    print(f"{len(rows)} rows, {failed} deviate")


if __name__ == "__main__":
    main()
