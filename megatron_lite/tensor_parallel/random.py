"""Random numbers by region, and recomputation that draws them again.

    region               differs between         used for
    data-parallel-rng    pipeline stages         dropout on what every tensor-parallel rank holds alike (default state)
    model-parallel-rng   tensor-parallel ranks   dropout on what is split: attention heads, sequence shards
    expert-parallel-rng  expert ranks            router jitter

`fork(region)` swaps the region's state in and out again, also on an exception. `checkpoint` forgets a function's inner
activations and runs it again in backward under the random states of its first run, so that dropout draws the same
masks. The states belong to the device that computes: CUDA's generator once CUDA is in use, else the CPU's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.errors import ConfigError
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.tensor_parallel.mappings import default_group, gathered_first
from megatron_lite.tensor_parallel.utils import divide

_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"


def get_data_parallel_rng_tracker_name() -> str:
    """The region of replicated activations."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


def get_model_parallel_rng_tracker_name() -> str:
    """The region of split activations."""
    return _MODEL_PARALLEL_RNG_TRACKER_NAME


def get_expert_parallel_rng_tracker_name() -> str:
    """The region of expert layers."""
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


# -- the generator of the device that computes -------------------------------------------------------------------


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if _on_cuda() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if _on_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed_device(seed: int) -> None:
    if _on_cuda():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


class CudaRNGStatesTracker:
    """Named states of the computing device's generator (of the CPU's where there is no GPU; the name is Megatron's)."""

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        """Whether any region exists."""
        return bool(self.states_)

    def reset(self) -> None:
        """Forget all regions."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Copies of the states by name, for checkpoints."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take over states by name."""
        self.states_ = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """A new region that starts from `seed`. Raises ConfigError if the name or the seed is taken."""
        if name in self.states_ or seed in self.seeds_:
            taken = f"region {name}" if name in self.states_ else f"seed {seed}"
            raise ConfigError(
                f"{taken} of the random number tracker exists already",
                why="two regions of one seed would draw the same numbers",
                fix="reset() the tracker first, or take another name and seed",
            )
        before = _get_state()
        _seed_device(seed)
        self.seeds_.add(seed)
        self.states_[name] = _get_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the region inside the block, and advance it; the state outside is as it was."""
        if name not in self.states_:
            raise ConfigError(
                f"the random number region {name} has no seed",
                why="dropout on split activations draws from a region of its own",
                fix="megatron_lite.tensor_parallel.model_parallel_cuda_manual_seed(seed), once at start-up",
            )
        outside = _get_state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_state()
            _set_state(outside)

    @contextmanager
    def leave(
        self, inside: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, name: str = _DATA_PARALLEL_RNG_TRACKER_NAME
    ) -> Iterator[None]:
        """Within a `fork(inside)`: draw from `name`. `inside` may be forked in the block, and goes on behind it."""
        self.states_[inside] = _get_state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_state()
            _set_state(self.states_[inside])


_tracker = CudaRNGStatesTracker()


def initialize_rng_tracker(force_reset: bool = False, **_: Any) -> None:
    """The tracker always exists; `force_reset` empties it. Megatron's choices of other trackers need a GPU library."""
    if force_reset:
        _tracker.reset()


def get_cuda_rng_tracker(*_: Any, **__: Any) -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def get_all_rng_states() -> dict[str, Tensor]:
    """The tracker's states by name."""
    return _tracker.get_states()


def region_seed(seed: int, region: str, *coordinates: int) -> int:
    """A seed for the region at these coordinates. A hash: sums of multiples collide (Megatron's expert seeds do)."""
    digest = hashlib.sha256(f"{seed}/{region}/{coordinates}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the default state and all regions.

    Args:
        seed: equal on the ranks of one tensor-parallel group (the caller mixes in the pipeline stage).
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng: refused where true: they belong to a GPU library.
        tp_rank, ep_rank, etp_rank: None = this rank's place in the registered groups.
    """
    if te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng:
        raise ConfigError(
            "another random number tracker was asked for",
            why="Transformer Engine's and the graph-capturable tracker are not part of megatron_lite",
            fix="leave te_rng_tracker, inference_rng_tracker and use_cudagraphable_rng false",
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    tp_rank = collectives.group_rank(groups.tp) if tp_rank is None else tp_rank
    ep_rank = collectives.group_rank(groups.ep) if ep_rank is None else ep_rank
    etp_rank = collectives.group_rank(groups.expt_tp) if etp_rank is None else etp_rank
    _tracker.reset()
    # Context-parallel ranks hold other tokens: their dropout differs (and see `vary_over_context_parallel_ranks`).
    context = (cp_rank,) if (cp_rank := collectives.group_rank(groups.cp)) else ()
    _seed_device(seed)
    _tracker.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, region_seed(seed, "model", tp_rank, *context))
    _tracker.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, region_seed(seed, "expert", ep_rank, etp_rank))


def vary_over_context_parallel_ranks(cp_group: ProcessGroup | None) -> None:
    """Another default state on each rank, for dropout outside of the regions. To be called once the weights are there:
    the default state's seed is theirs."""
    rank = collectives.group_rank(cp_group)
    if rank:
        _seed_device(region_seed(torch.initial_seed(), "context", rank))


# -- recomputation -----------------------------------------------------------------------------------------------


class _RandomState:
    """All states at one moment: CPU, CUDA, tracker."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if _on_cuda() else None
        self.regions = dict(_tracker.states_)  # states are replaced, never written to: no copies

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        _tracker.states_ = dict(self.regions)


@contextmanager
def _at(state: _RandomState) -> Iterator[None]:
    """Run the block under an earlier random state; afterwards all is as before."""
    now = _RandomState()
    state.restore()
    try:
        yield
    finally:
        now.restore()


class CheckpointFunction(torch.autograd.Function):
    """Keeps the arguments and the random states; backward runs the function again."""

    @staticmethod
    def forward(ctx, run_function, distribute_saved_activations, group, *args):
        ctx.run_function, ctx.state, ctx.group = run_function, _RandomState(), group
        with torch.no_grad():
            outputs = run_function(*args)
        # A layer may return its bias: autograd must not make the parameter itself an output of this function.
        if isinstance(outputs, tuple):
            outputs = tuple(y.detach() if isinstance(y, nn.Parameter) else y for y in outputs)
        ctx.cut = distribute_saved_activations and collectives.group_size(group) > 1
        if ctx.cut:  # the first argument is equal on all tensor-parallel ranks: each keeps a part
            ctx.first_shape = args[0].shape
            mine = split_tensor_into_1d_equal_chunks(args[0].detach(), new_buffer=True, tp_group=group)
            args = (mine.requires_grad_(args[0].requires_grad), *args[1:])
        ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        args = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors):
            args[place] = tensor
        if ctx.cut:
            args[0] = gather_split_1d_tensor(args[0], ctx.group).view(ctx.first_shape)
        needed = ctx.needs_input_grad[3:]
        args = [
            arg.detach().requires_grad_(need) if isinstance(arg, Tensor) else arg for arg, need in zip(args, needed)
        ]
        with _at(ctx.state), torch.enable_grad():
            outputs = ctx.run_function(*args)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [(y, g) for y, g in zip(outputs, grads) if isinstance(y, Tensor) and y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return None, None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool, *args: Any, tp_group: ProcessGroup | None = None
) -> Any:
    """`function(*args)`, remembering only `args`: backward computes its activations again, with the same dropout.

    Args:
        function: returns a tensor or a tuple; some argument must require a gradient.
        distribute_saved_activations: each tensor-parallel rank keeps a part of the first argument, which must be
            equal on all of them; backward gathers it.
        tp_group: over which ranks; None = the registered tensor-parallel group.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return CheckpointFunction.apply(function, distribute_saved_activations, default_group(tp_group), *args)


class CheckpointWithoutOutput:
    """Forget also a function's *output* after its consumer ran, and refill it just before the consumer's backward.

        keep = CheckpointWithoutOutput()
        y = keep.checkpoint(norm, x)                            no graph inside
        z = linear(y)                                           keeps y for its weight gradient
        keep.discard_output_and_register_recompute(z)           y's memory is freed; z's gradient refills it

    Worth it for cheap functions with large outputs (norms, activations) in front of a linear layer.
    """

    def __init__(self, fp8: bool = False):
        self._function: Callable[..., Any] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._again: tuple[Tensor, ...] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: Tensor) -> Any:
        """`function(*args)`; all arguments are tensors."""
        if not torch.is_grad_enabled():
            return function(*args)
        self._function, self._state = function, _RandomState()
        outputs = _WithoutOutput.apply(self, *args)
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs' memory; `hook_tensor`, computed from them, brings them back when its gradient arrives."""
        if not self._outputs or not hook_tensor.requires_grad:
            return
        for y in self._outputs:
            y.untyped_storage().resize_(0)
        hook_tensor.register_hook(self._refill)

    def _refill(self, _: Tensor) -> None:
        assert self._function is not None
        inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in self._inputs)
        with _at(self._state), torch.enable_grad():
            outputs = self._function(*inputs)
        self._again = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        self._inputs = inputs
        for old, new in zip(self._outputs, self._again):
            old.untyped_storage().resize_(new.untyped_storage().nbytes())
            with torch.no_grad():
                old.data.copy_(new)
        self._outputs = ()

    def _backward(self, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self._again is None:  # the output was kept after all
            self._refill(grads[0])
        assert self._again is not None
        torch.autograd.backward(self._again, grads)
        result = tuple(x.grad for x in self._inputs)
        self._again, self._inputs, self._function = None, (), None
        return result


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owner, *args):
        ctx.owner = owner
        with torch.no_grad():
            outputs = owner._function(*args)
        owner._inputs = args
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.owner._backward(grads)


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """This rank's part of the flattened tensor (a view unless `new_buffer`)."""
    group = default_group(tp_group)
    part = divide(tensor.numel(), collectives.group_size(group))
    begin = part * collectives.group_rank(group)
    mine = tensor.reshape(-1)[begin : begin + part]
    return mine.clone() if new_buffer else mine


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """The flattened whole of what `split_tensor_into_1d_equal_chunks` cut."""
    group = default_group(tp_group)
    if collectives.group_size(group) == 1:
        return tensor
    assert group is not None
    return gathered_first(tensor, group, "saved activations")
