"""What looks at every step from outside the step: one object that the loop calls before and after it.

    before_step    hooks of what is due: attention's scores, tensors for files, traces of the routing
    after_step     what was measured, for the log; files written; the device waited for

What is off is not there: it costs a comparison with None.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.attention_logits import LogitProbe
from megatron_lite.training.expert_log import ExpertStatistics, collect
from megatron_lite.training.model_setup import params_norm
from megatron_lite.training.routing_trace import RoutingTrace
from megatron_lite.training.tensor_dumps import TensorDumps


@dataclass(frozen=True)
class Measured:
    """Of one step, over all ranks; None where it was not measured.

    experts: what the step's routers counted.
    """

    params_norm: float | None = None
    experts: ExpertStatistics | None = None
    max_attention_logit: float | None = None


class Diagnostics:
    """All of them.

    Args:
        model: this rank's chunks.
        optimizer: None where nothing is trained.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[nn.Module],
        optimizer: MegatronOptimizer | None,
        pg_collection: ProcessGroupCollection,
    ):
        self._args, self._model, self._groups = args, list(model), pg_collection
        self._routing = RoutingTrace(args, model) if args.moe_routing_trace_path else None
        self._logits = LogitProbe(args, model) if args.log_max_attention_logit else None
        intervals = (
            args.save_params_interval,
            args.save_activations_interval,
            args.save_wgrads_interval,
            args.save_dgrads_interval,
        )
        self._dumps = None
        if any(intervals) and optimizer is not None:
            self._dumps = TensorDumps(args, model, optimizer, pg_collection)

    def before_step(self, iteration: int) -> None:
        """Iteration `iteration` is about to run."""
        for part in (self._routing, self._logits, self._dumps):
            if part is not None:
                part.before_step(iteration)

    def start_over(self) -> None:
        """The step is run, maybe not for the first time: the last run counts."""
        for part in (self._logits, self._dumps):
            if part is not None:
                part.start_over()

    def after_step(self, iteration: int) -> Measured:
        """It is done. Collective."""
        args = self._args
        if self._dumps is not None:
            self._dumps.after_step(iteration)
        norm = params_norm(self._model, self._groups) if args.log_params_norm else None
        experts = None
        if args.num_experts:
            layers = args.num_layers + (getattr(args, "mtp_num_layers", None) or 0)
            experts = collect(self._model, layers, args.num_experts, self._groups)
        logit = self._logits.after_step() if self._logits is not None else None
        interval = args.train_sync_interval
        if interval and iteration % interval == 0 and args.device.type != "cpu":
            torch.accelerator.synchronize(args.device)
        return Measured(norm, experts, logit)

    def close(self) -> None:
        """The run ends."""
        if self._routing is not None:
            self._routing.close()
