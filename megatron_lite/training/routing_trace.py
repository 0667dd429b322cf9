"""`--moe-routing-trace-path`: which experts every token went to, as JSON lines, a file for each rank.

    rank_00000.jsonl         {"iteration": 1, "layer": 2, "pass": 0, "shape": [s, b],
                              "experts": [[3, 0], ...], "weights": [[.6, .4], ...]}    a list for each token
                             with "logits" [[...]] and "hidden_states" [[...]] where they are asked for
    rank_00000_weights.pt    layer -> router's weight, before the first traced step

Of a layer that is recomputed the pass with gradients is written: each pass once. Evaluation is not traced.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.log import rank_and_world_size
from megatron_lite.training.expert_log import routers_of
from megatron_lite.transformer.moe.router import TopKRouter


class RoutingTrace:
    """Writes until `--moe-routing-trace-max-training-iters` iterations of this run are done.

    Args:
        model: this rank's chunks.
    """

    def __init__(self, args: Namespace, model: Sequence[nn.Module]):
        self._args, self._iteration, self._first = args, 0, int(args.iteration) + 1
        folder = Path(args.moe_routing_trace_path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank_and_world_size()[0]:05d}"
        self._file = open(folder / f"{name}.jsonl", "a", encoding="utf-8")  # noqa: SIM115  (closed by `close`)
        self._passes: dict[int, int] = {}
        routers = routers_of(model)
        self._hooks = [router.register_forward_hook(self._hook(router)) for router in routers]
        if args.moe_routing_trace_dump_weights:
            weights = {router.layer_number: router.weight.detach().cpu().clone() for router in routers}
            torch.save(weights, folder / f"{name}_weights.pt")

    def before_step(self, iteration: int) -> None:
        """An iteration begins; the trace ends here if it is long enough."""
        limit = self._args.moe_routing_trace_max_training_iters
        if limit is not None and iteration >= self._first + limit:
            self.close()
        self._iteration = iteration
        self._passes.clear()

    def _hook(self, router: TopKRouter) -> Callable[..., None]:
        def traced(module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            if router.training and torch.is_grad_enabled():
                with torch.no_grad():
                    self._write(router, inputs[0], *output)

        return traced

    def _write(self, router: TopKRouter, x: Tensor, probs: Tensor, routing_map: Tensor) -> None:
        layer = router.layer_number or 0
        number = self._passes.get(layer, 0)
        self._passes[layer] = number + 1
        experts = [row.nonzero().flatten().tolist() for row in routing_map.cpu()]
        row: dict[str, Any] = {
            "iteration": self._iteration,
            "layer": layer,
            "pass": number,
            "shape": list(x.shape[:2]),
            "experts": experts,
            "weights": [values[chosen].tolist() for values, chosen in zip(probs.float().cpu(), experts)],
        }
        if self._args.moe_routing_trace_capture_logits:
            row["logits"] = router.gating(x).float().flatten(0, 1).tolist()
        if self._args.moe_routing_trace_capture_hidden_states:
            row["hidden_states"] = x.float().flatten(0, 1).tolist()
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """No more traces."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._file.close()
