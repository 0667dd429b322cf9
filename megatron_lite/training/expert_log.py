"""What routers counted in a step, as numbers of the whole model: losses, load, dropped tokens.

    router of a layer, on a rank     sums over its micro-batches: parts of losses, tokens to each expert
    collect                          one table [layers, columns]: summed over the ranks that share layers, then stages
    ExpertStatistics                 means over micro-batches, by layer

Losses are without their coefficients: even load is 1.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.collectives import group_size
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.report_metrics import DROPPED, LOAD
from megatron_lite.training.run_logs import append_line
from megatron_lite.transformer.moe.router import LOG_NAMES, TopKRouter

_NAMES = tuple(LOG_NAMES.values())


@dataclass(frozen=True)
class ExpertStatistics:
    """A step's routing, over all ranks.

    layers: numbers, from 1, of the layers with experts; losses: name in the log -> a value for each of these;
    chosen, kept: tokens to each expert before and after dropping, `[layers, E]`.
    """

    layers: list[int]
    losses: dict[str, list[float]]
    chosen: Tensor
    kept: Tensor

    @property
    def mean_losses(self) -> dict[str, float]:
        """Over the layers with experts."""
        return {name: sum(values) / len(values) for name, values in self.losses.items()}

    @property
    def loads(self) -> list[float]:
        """The busiest expert's tokens over the mean, of each layer."""
        return (self.chosen.max(1).values / self.chosen.mean(1).clamp(min=1e-9)).tolist()

    @property
    def load(self) -> float:
        """Mean of `loads`."""
        return sum(self.loads) / len(self.loads)

    @property
    def dropped(self) -> float:
        """Share of the choices that a capacity dropped."""
        return float(1.0 - self.kept.sum() / self.chosen.sum().clamp(min=1e-9))


def routers_of(model: Sequence[nn.Module]) -> list[TopKRouter]:
    """Of this rank's chunks, in order."""
    return [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]


@torch.no_grad()
def collect(
    model: Sequence[nn.Module], num_layers: int, num_experts: int, pg_collection: ProcessGroupCollection
) -> ExpertStatistics | None:
    """Read and forget what the routers counted; collective. None where nothing was routed.

    Args:
        num_layers: of the whole model, those of further predictions included.
    """
    routers = routers_of(model)
    device = next(model[0].parameters()).device
    width = len(_NAMES)
    table = torch.zeros(num_layers, width + 1 + 2 * num_experts, dtype=torch.float64, device=device)
    for router in routers:
        assert router.layer_number is not None, "a router in a model knows its layer"
        if router.load is not None:
            row = table[router.layer_number - 1]
            for place, name in enumerate(_NAMES):
                if name in router.losses:
                    row[place] += router.losses[name]
            row[width] += router.microbatches
            row[width + 1 :] += router.load.view(-1)
        router.reset_statistics()
    collectives.all_reduce(table, pg_collection.tp_dp_cp, purpose="expert statistics")
    collectives.all_reduce(table, pg_collection.pp, purpose="expert statistics")
    table = table.cpu()
    # Ranks that share sequences hold parts of a loss, so their sum counts; data-parallel ones and micro-batches, means.
    counts = table[:, width] / group_size(pg_collection.tp_cp)
    found = counts.nonzero().flatten()
    if not len(found):
        return None
    values = table[found, :width] / counts[found].unsqueeze(1)
    load = table[found, width + 1 :].view(len(found), 2, num_experts)
    losses = {name: values[:, i].tolist() for i, name in enumerate(_NAMES) if values[:, i].any()}
    return ExpertStatistics([int(i) + 1 for i in found], losses, load[:, 0], load[:, 1])


class ExpertLog:
    """Means over the iterations of a log interval, scalars, and the file of counts."""

    def __init__(self, args: Namespace):
        self._args = args
        self._sums: dict[str, float] = {}
        self._steps = 0

    def step(self, found: ExpertStatistics) -> None:
        """Note a step."""
        self._steps += 1
        for name, value in {**found.mean_losses, LOAD: found.load, DROPPED: found.dropped}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """(losses, other values) of the interval so far; what does not apply is left out."""
        means = {name: total / self._steps for name, total in self._sums.items()}
        others = {LOAD: means.pop(LOAD)} if means else {}
        dropped = means.pop(DROPPED, 0.0)
        return means, {**others, **({DROPPED: dropped} if self._args.moe_expert_capacity_factor else {})}

    def start_over(self) -> None:
        """An interval begins."""
        self._sums.clear()
        self._steps = 0

    def scalars(self, found: ExpertStatistics) -> dict[str, float]:
        """Tag -> value."""
        tags = {**found.mean_losses, "expert-load": found.load}
        if self._args.moe_expert_capacity_factor:
            tags["expert-dropped"] = found.dropped
        if self._args.moe_per_layer_logging:
            for name, values in {**found.losses, "expert-load": found.loads}.items():
                tags |= {f"moe/{name}_layer_{layer}": value for layer, value in zip(found.layers, values)}
        return tags

    def write_counts(self, iteration: int, found: ExpertStatistics) -> None:
        """`--save-tokens-per-expert-interval`: one JSON object a line, tokens of each expert by layer."""
        counts = {str(layer): row for layer, row in zip(found.layers, found.chosen.long().tolist())}
        row: dict[str, Any] = {"iteration": iteration, "tokens_per_expert": counts}
        if self._args.moe_expert_capacity_factor:
            kept = found.kept.long().tolist()
            row["kept"] = {str(layer): values for layer, values in zip(found.layers, kept)}
        append_line(Path(self._args.save) / "tokens_per_expert.jsonl", json.dumps(row))
