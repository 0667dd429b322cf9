"""The step of an optimizer over flat memory: gradients ready -> norm -> clip -> update -> weights.

    step()   main_grad (fp32)                        the buffer itself, or a cast of it
             norm over all ranks                     one sum: Inf or NaN anywhere makes it Inf or NaN everywhere, so
                                                     all ranks skip together and no other message is needed
             loss scale and clipping                 one divisor, applied by torch's fused kernel as it reads gradients
             torch.optim on segments of `main`
             main -> model parameters                one cast, where the model is 16-bit
             gather                                  where the optimizer is sharded (distrib_optimizer.py)

fp32 models and mixed precision are one code path: what differs is whether `main` is the model's memory (flat_shard.py)
and whether there is a loss scale. Dense parameters and experts are reduced over other ranks: each kind has its
optimizer, and a `ChainedOptimizer` steps both by one norm.
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
from megatron_lite.distributed.data_parallel_base import DataParallelBase, GradBuffer
from megatron_lite.errors import CheckpointError
from megatron_lite.optimizer.clip_grads import clip_coefficient, count_zeros, norm_of_power, total_power
from megatron_lite.optimizer.flat_shard import FlatShard
from megatron_lite.optimizer.grad_scaler import MegatronGradScaler
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.sharding import ShardSpec

Result = tuple[bool, float | None, int | None]


class MegatronOptimizer:
    """Steps on flat shards with torch optimizers.

    Args:
        optimizers: of torch, over the segments of the shards, with views of the shards' state as their state. One, or
            one for each kind of update (matrices and the rest).
        grad_scaler: None: the loss is not scaled (fp32, bf16).
        grad_stats_group: ranks whose gradients together are those of one model copy, each counted once.
        device: the model's.
    """

    gathered_chunks: Sequence[DataParallelBase] = ()  # whose parameters must be gathered after an update

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: OptimizerConfig,
        shards: Sequence[FlatShard],
        grad_scaler: MegatronGradScaler | None,
        grad_stats_group: ProcessGroup | None,
        device: torch.device,
    ):
        self.optimizers, self.config, self.shards = list(optimizers), config, list(shards)
        self.grad_scaler, self.grad_stats_group, self.device = grad_scaler, grad_stats_group, device
        self._grads: list[Tensor] = []  # of the step under way, by shard
        self._num_updates = 0

    @property
    def parts(self) -> Sequence[MegatronOptimizer]:
        """The optimizers that are stepped together: this one."""
        return [self]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's, the first one."""
        return self.optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's groups; the schedule sets `lr` and `weight_decay` in them."""
        return [group for part in self.parts for optimizer in part.optimizers for group in optimizer.param_groups]

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
    def step(self) -> Result:
        """Update the weights from the `main_grad`s, which are scaled in place.

        Returns: (True, gradient norm before clipping, number of zeros or None); (False, None, None) when a gradient on
            any rank is Inf or NaN, and (False, norm, None) when the norm is above `grad_norm_skip_threshold`: then
            weights and moments are as before.
        """
        config, scale = self.config, self.get_loss_scale()
        with self._timed("optimizer-copy-to-main-grad"):
            for part in self.parts:
                part.prepare_grads()
        with self._timed("optimizer-unscale-and-check-inf"):
            norm = self.get_grad_norm()
            found_inf = not math.isfinite(norm)
            if self.grad_scaler is not None:
                self.grad_scaler.update(found_inf)
        if found_inf:
            return False, None, None
        if norm > config.grad_norm_skip_threshold:
            return False, norm, None
        with self._timed("optimizer-clip-main-grad"):
            coefficient = clip_coefficient(norm, config.clip_grad)
        num_zeros = None
        if config.log_num_zeros_in_grad:
            with self._timed("optimizer-count-zeros"):
                num_zeros = self.count_zeros()
        with self._timed("optimizer-inner-step"):
            ahead = self._step_first_chunk(scale / coefficient)
            rest = [shard for part in self.parts for shard in part.shards if shard.buffer not in ahead]
            self._inner_step(rest, scale / coefficient)
        with self._timed("optimizer-copy-main-to-model-params"):
            for shard in rest:
                shard.copy_main_to_model()
        for part in self.parts:
            part._grads, part._num_updates = [], part._num_updates + 1
        with self._timed("params-all-gather"):
            self.gather_params(done=ahead)
        return True, norm, num_zeros

    def prepare_grads(self) -> None:
        """Look at the gradients that the model's buffers hold now; a step starts with it."""
        self._grads = [shard.main_grad() for shard in self.shards]

    def get_grad_norm(self, norm_type: float = 2.0) -> float:
        """p-norm of the unscaled gradients of one model copy, each element counted once; collective.

        Returns: NaN when an element of any rank is Inf or NaN. Waits for the device.
        """
        for exact in (False, True):  # squares may leave fp32 though no element does: then once more, slowly
            powers = [part.power_of_grads(norm_type, exact) for part in self.parts]
            total = max(powers) if norm_type == math.inf else sum(powers)
            if math.isfinite(total) and not math.isnan(sum(powers)):
                return norm_of_power(total, norm_type) / self.get_loss_scale()
        return math.nan

    def power_of_grads(self, norm_type: float, exact: bool) -> float:
        """The sum of |gradient|^p over the ranks of the model copy."""
        flats = [flat for shard, grad in zip(self.shards, self._grads) for flat, _ in shard.counted_runs(grad)]
        return total_power(flats, norm_type, self.grad_stats_group, self.device, exact)

    def count_zeros(self) -> int:
        """Gradient elements of one model copy that are exactly 0; collective."""
        return sum(part.zeros_of_grads() for part in self.parts)

    def zeros_of_grads(self) -> int:
        """The same of this optimizer's parameters."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard, grad in zip(self.shards, self._grads):
            total += count_zeros(shard.counted_runs(grad)).to(self.device)
        collectives.all_reduce(total, self.grad_stats_group, purpose="zeros in gradients")
        return int(total)

    def _inner_step(self, shards: Sequence[FlatShard], divisor: float) -> None:
        """torch's update of these shards with gradients / divisor. The fused kernels divide as they read (and write
        back)."""
        chosen = set(map(id, shards))
        scale = None
        if divisor != 1.0:
            # Where a part steps on the host the number starts there: torch would fetch it without waiting for it.
            on_host = any(shard.on_host for shard in shards)
            scale = torch.full((), divisor, dtype=torch.float32, device="cpu" if on_host else self.device)
        for part in self.parts:
            for shard, grad in zip(part.shards, part._grads):
                if id(shard) in chosen:
                    shard.attach_grads(grad)
            for optimizer in part.optimizers:
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                optimizer.step()
        for shard in shards:
            shard.detach_grads()

    def _step_first_chunk(self, divisor: float) -> Sequence[GradBuffer]:
        """`--overlap-param-gather-with-optimizer-step`: update the first chunk, whose forward comes first, and let its
        parameters travel while the others are updated.

        Returns: its buffers; none without the flag.
        """
        chunks = [chunk for part in self.parts for chunk in part.gathered_chunks]
        # Muon exchanges parts of all matrices at once, and a package's Adam counts its steps by group: they step once.
        steps_once = self.config.optimizer == "muon" or any("step" in group for group in self.param_groups)
        if not self.config.overlap_param_gather_with_optimizer_step or not chunks or steps_once:
            return []
        first = chunks[0]
        shards = [shard for part in self.parts for shard in part.shards if shard.buffer in first.grad_buffers]
        self._inner_step(shards, divisor)
        for shard in shards:
            shard.copy_main_to_model()
        first.params_updated()
        first.start_param_sync()
        return first.grad_buffers

    def gather_params(self, done: Sequence[GradBuffer] = ()) -> None:
        """Give every rank the parameters that other ranks have updated, now or (overlap) in the next forward; nothing
        where the optimizer is not sharded.

        Args:
            done: buffers of chunks that are on their way.
        """
        for chunk in {id(chunk): chunk for part in self.parts for chunk in part.gathered_chunks}.values():
            if not any(buffer in done for buffer in chunk.grad_buffers):
                chunk.params_updated()

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
        for part in self.parts:
            for shard in part.shards:
                shard.copy_model_to_main()

    def sharded_state(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Everything of parameter size, as views: reading them saves, writing into them loads.

        Returns: `optimizer.state.KIND.NAME` -> (this rank's part, its place in the global tensor), KIND in `param`
            (only where the main parameters are copies), `exp_avg`, `exp_avg_sq`, `momentum_buffer`. The part has the
            parameter's shape, or is flat where other ranks hold the rest (`sharding.flat_range`).
        """
        state: dict[str, tuple[Tensor, ShardSpec]] = {}
        for part in self.parts:
            for shard in part.shards:
                for kind, views in shard.views().items():
                    for name, (view, spec) in views.items():
                        key = f"optimizer.state.{kind}.{name}"
                        assert key not in state, f"two parameters are called {name}"
                        state[key] = (view, spec.renamed(key))
        return state

    def common_state(self) -> dict[str, Any]:
        """The rest, as plain values: number of updates, the groups' numbers, the loss scale."""
        groups = [{key: value for key, value in group.items() if key in _GROUP_KEYS} for group in self.param_groups]
        scaler = self.grad_scaler.state_dict() if self.grad_scaler is not None else {}
        return {"step": self.parts[0]._num_updates, "param_groups": groups, "grad_scaler": scaler}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Take up `common_state`. Betas, epsilon and the like stay as the command line has them; `lr` and
        `weight_decay` are what the schedule's state will set again.

        Raises: CheckpointError when the groups are other ones.
        """
        ours, theirs = self.param_groups, {_kind(group): group for group in state["param_groups"]}
        if {_kind(group) for group in ours} != theirs.keys():
            raise CheckpointError(
                f"the checkpoint's parameter groups (wd_mult, lr_mult, decoupled, matrix) are {sorted(theirs)}, this "
                f"run's {sorted({_kind(group) for group in ours})}",
                why="weight decay or learning rates are assigned to parameters in another way",
                fix="the flags of the saving run (--decoupled-lr, --apply-wd-to-qk-layernorm, ...), or --no-load-optim",
            )
        for group in ours:
            saved = theirs[_kind(group)]
            group["lr"], group["weight_decay"] = saved["lr"], saved["weight_decay"]
        for part in self.parts:
            part._num_updates = int(state["step"])
            for optimizer in part.optimizers:
                for values in optimizer.state.values():
                    if "step" in values:
                        values["step"].fill_(state["step"])
                for group in optimizer.param_groups:
                    if "step" in group:
                        group["step"] = int(state["step"])
        if self.grad_scaler is not None and state["grad_scaler"]:
            self.grad_scaler.load_state_dict(state["grad_scaler"])

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


class ChainedOptimizer(MegatronOptimizer):
    """Optimizers over disjoint parameters that step as one: one norm, one decision to skip, one loss scale.

    Args:
        chained_optimizers: at least one, all of one config and one grad scaler; their groups follow each other.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]):
        self.chained_optimizers = list(chained_optimizers)
        first = self.chained_optimizers[0]
        optimizers = [optimizer for part in self.chained_optimizers for optimizer in part.optimizers]
        shards = [shard for part in self.chained_optimizers for shard in part.shards]
        super().__init__(optimizers, first.config, shards, first.grad_scaler, first.grad_stats_group, first.device)

    @property
    def parts(self) -> Sequence[MegatronOptimizer]:
        """The optimizers that are stepped together."""
        return self.chained_optimizers


_KINDS = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_matrix")
_GROUP_KEYS = (*_KINDS, "is_expert_parallel", "lr", "weight_decay", "max_lr", "min_lr")


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes the numbers of two groups differ. Experts are a group of their own or not, as the layout has it."""
    return tuple(group.get(key, False) for key in _KINDS)  # is_matrix is younger than some checkpoints
