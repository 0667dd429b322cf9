"""The step of an optimizer over flat memory: gradients ready -> norm -> clip -> update -> weights.

    step()   main_grad (fp32)                        the buffer itself, or a cast of it
             norm over all ranks                     one sum: Inf or NaN anywhere makes it Inf or NaN everywhere, so
                                                     all ranks skip together and no other message is needed
             loss scale and clipping                 one divisor, applied by torch's fused kernel as it reads gradients
             torch.optim on segments of `main`
             main -> model parameters                one cast, where the model is 16-bit

fp32 models and mixed precision are one code path: what differs is whether `main` is the model's memory (flat_shard.py)
and whether there is a loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import CheckpointError
from megatron_lite.optimizer.clip_grads import clip_coefficient, count_zeros, sum_of_powers
from megatron_lite.optimizer.flat_shard import FlatShard
from megatron_lite.optimizer.grad_scaler import MegatronGradScaler
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.sharding import ShardSpec


class MegatronOptimizer:
    """Steps on flat shards with a torch optimizer.

    Args:
        optimizer: of torch, over the segments of the shards, with views of the shards' state as its state.
        grad_scaler: None: the loss is not scaled (fp32, bf16).
        grad_stats_group: ranks whose gradients together are those of one model copy.
        expert_grad_stats_group: the same for experts' gradients.
        has_experts: whether any rank of the model copy has experts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        shards: Sequence[FlatShard],
        grad_scaler: MegatronGradScaler | None,
        grad_stats_group: ProcessGroup | None,
        expert_grad_stats_group: ProcessGroup | None,
        has_experts: bool,
    ):
        self.optimizer, self.config, self.shards = optimizer, config, list(shards)
        self.grad_scaler = grad_scaler
        self._stats_groups = {False: grad_stats_group}
        if has_experts:
            self._stats_groups[True] = expert_grad_stats_group

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's groups; the schedule sets `lr` and `weight_decay` in them."""
        return self.optimizer.param_groups

    def get_loss_scale(self) -> float:
        """1 without loss scaling."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to do: the gradients are the model's (`zero_grad_buffer`).

        Args:
            set_to_none: accepted for scripts written for Megatron.
        """

    # -- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the weights from the `main_grad`s, which are scaled in place.

        Returns: (True, gradient norm before clipping, number of zeros or None), or (False, None, None) when a gradient
            on any rank is Inf or NaN: then weights and moments are as before.
        """
        scale = self.get_loss_scale()
        with self._timed("optimizer-copy-to-main-grad"):
            grads = [shard.main_grad() for shard in self.shards]
        with self._timed("optimizer-unscale-and-check-inf"):
            norm = self._norm(grads) / scale
            found_inf = not math.isfinite(norm)
            if self.grad_scaler is not None:
                self.grad_scaler.update(found_inf)
        if found_inf:
            return False, None, None
        with self._timed("optimizer-clip-main-grad"):
            coefficient = clip_coefficient(norm, self.config.clip_grad)
        num_zeros = None
        if self.config.log_num_zeros_in_grad:
            with self._timed("optimizer-count-zeros"):
                num_zeros = int(self._total([count_zeros(shard.counted_runs(g)) for shard, g in self._with(grads)]))
        with self._timed("optimizer-inner-step"):
            self._inner_step(grads, scale / coefficient)
        with self._timed("optimizer-copy-main-to-model-params"):
            for shard in self.shards:
                shard.copy_main_to_model()
        return True, norm, num_zeros

    def _with(self, grads: list[Tensor]) -> Iterator[tuple[FlatShard, Tensor]]:
        return zip(self.shards, grads)

    def _norm(self, grads: list[Tensor]) -> float:
        """L2 norm over all ranks; Inf or NaN when an element somewhere is. Waits for the device."""
        for exact in (False, True):  # squares may leave fp32 though no element does: then once more, slowly
            sums = []
            for shard, grad in self._with(grads):
                runs = [sum_of_powers(flat, exact=exact) for flat, _ in shard.counted_runs(grad)]
                sums.append(torch.stack(runs).sum() if runs else torch.zeros((), dtype=torch.float64))
            total = self._total(sums)
            if math.isfinite(total):
                break
        return math.sqrt(total) if math.isfinite(total) else math.nan

    def _total(self, values: list[Tensor]) -> float:
        """The shards' numbers, added over shards and ranks."""
        total = 0.0
        for is_expert, group in self._stats_groups.items():
            own = [v for v, shard in zip(values, self.shards) if shard.buffer.is_expert == is_expert]
            device = self.shards[0].main.device if self.shards else torch.device("cpu")
            number = torch.zeros((), dtype=torch.float64, device=device)
            for value in own:
                number += value.to(device)
            collectives.all_reduce(number, group, purpose="gradient norm")
            total += float(number)
        return total

    def _inner_step(self, grads: list[Tensor], divisor: float) -> None:
        """torch's update with gradients / divisor. The fused kernels divide as they read (and write back)."""
        for shard, grad in self._with(grads):
            for tensor, place in shard.segment_tensors:
                tensor.grad = grad[place.start : place.end]
        scale = None
        if divisor != 1.0 and self.shards:
            scale = torch.full((), divisor, dtype=torch.float32, device=self.shards[0].main.device)
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.step()
        for shard in self.shards:
            for tensor, _ in shard.segment_tensors:
                tensor.grad = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timers = self.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=1).start(barrier=self.config.barrier_with_L1_time)
        yield
        timers(name).stop()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def reload_model_params(self) -> None:
        """Take the main parameters from the model's: after weights were loaded without an optimizer state."""
        for shard in self.shards:
            shard.copy_model_to_main()

    def sharded_state(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Everything of parameter size, as views: reading them saves, writing into them loads.

        Returns: `optimizer.state.KIND.NAME` -> (view of the parameter's shape, its place in the global tensor), KIND in
            `param` (only where the main parameters are copies), `exp_avg`, `exp_avg_sq`, `momentum_buffer`.
        """
        state: dict[str, tuple[Tensor, ShardSpec]] = {}
        for shard in self.shards:
            for kind, views in shard.views().items():
                for name, (view, spec) in views.items():
                    key = f"optimizer.state.{kind}.{name}"
                    assert key not in state, f"two parameters are called {name}"
                    state[key] = (view, spec.renamed(key))
        return state

    def common_state(self) -> dict[str, Any]:
        """The rest, as plain values: number of updates, the groups' numbers, the loss scale."""
        groups = [
            {key: value for key, value in group.items() if key in _GROUP_KEYS} for group in self.optimizer.param_groups
        ]
        scaler = self.grad_scaler.state_dict() if self.grad_scaler is not None else {}
        return {"step": self._steps_done(), "param_groups": groups, "grad_scaler": scaler}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Take up `common_state`. Betas, epsilon and the like stay as the command line has them; `lr` and
        `weight_decay` are what the schedule's state will set again.

        Raises: CheckpointError when the groups are other ones.
        """
        ours, theirs = self.optimizer.param_groups, state["param_groups"]
        if [_kind(group) for group in ours] != [_kind(group) for group in theirs]:
            raise CheckpointError(
                f"the checkpoint's parameter groups (wd_mult, lr_mult, expert, decoupled) are "
                f"{[_kind(group) for group in theirs]}, this run's {[_kind(group) for group in ours]}",
                why="weight decay or learning rates are assigned to parameters in another way",
                fix="the flags of the saving run (--decoupled-lr, --apply-wd-to-qk-layernorm, ...), or --no-load-optim",
            )
        for group, saved in zip(ours, theirs):
            group["lr"], group["weight_decay"] = saved["lr"], saved["weight_decay"]
        for values in self.optimizer.state.values():
            if "step" in values:
                values["step"].fill_(state["step"])
        if self.grad_scaler is not None and state["grad_scaler"]:
            self.grad_scaler.load_state_dict(state["grad_scaler"])

    def _steps_done(self) -> int:
        steps = [int(values["step"]) for values in self.optimizer.state.values() if "step" in values]
        return steps[0] if steps else 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's whole state in one dict; tensors are views of the live ones."""
        return {"common": self.common_state(), "tensors": {k: view for k, (view, _) in self.sharded_state().items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up `state_dict`, copying values in."""
        tensors = state_dict["tensors"]
        for key, (view, _) in self.sharded_state().items():
            view.copy_(tensors[key])
        self.load_common_state(state_dict["common"])


_KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_GROUP_KEYS = (*_KINDS, "lr", "weight_decay", "max_lr", "min_lr")


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[key] for key in _KINDS)
