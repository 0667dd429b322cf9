"""`--save-params-interval` and its kin: tensors of a step as files, with their places in those of the whole model.

    <save>/params/iter_0000020/rank_00003_of_00008.pt        weights after the update of iteration 20
    <save>/wgrads/...          their gradients over the global batch, before clipping: what iteration 20 steps on
    <save>/activations/...     what the parts of the model computed in iteration 20, `[s, B, h]`: B samples, the batch
    <save>/dgrads/...          gradients of these activations, of the same loss as the weights'

    file     {"iteration": 20, "parts": [{"name", "global_shape", "pieces", "tensor"}, ...]}

A piece is (offset in the global tensor, offset in this part, shape). What several ranks hold is written by one of them.
`read_dump` puts a folder's parts together: the same tensors, whatever the layout.

The parts of the model: `input` of a stack of layers (the embedded tokens), each layer, its attention and MLP (without a
bias that is still to be added), the final norm. A part that runs several times for a sample has `#1`, `#2`, ... behind
its name. Of a layer that is recomputed the pass with gradients is written. With --calculate-per-token-loss `dgrads` are
of the sum of the losses; the number of tokens that weights' gradients are divided by is known after backward only.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.checkpointing.folders import folder_name
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.context_parallel.partition import held_runs, one_document, positions
from megatron_lite.errors import DataError
from megatron_lite.log import rank_and_world_size, say
from megatron_lite.models.common.language_module.language_module import global_module_names
from megatron_lite.num_microbatches_calculator import get_num_microbatches
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import Piece, ShardSpec
from megatron_lite.training.held import Held, each_gradient, each_weight, join_parts
from megatron_lite.transformer.identity_op import IdentityOp

_PARTS = re.compile(r"(^|\.)(layers\.\d+|transformer_layer|self_attention|cross_attention|mlp|final_layernorm)$")


class TensorDumps:
    """Writes what is due in a step.

    Args:
        args: the four intervals, and the save folder.
        model: this rank's chunks, under DDP.
    """

    def __init__(
        self, args: Namespace, model: Sequence[nn.Module], optimizer: MegatronOptimizer, groups: ProcessGroupCollection
    ):
        self._args, self._model, self._optimizer, self._groups = args, model, optimizer, groups
        self._due: set[str] = set()
        self._hooks: list[Any] = []
        self._finalize: Callable[..., Any] | None = None
        self._weight_grads: Held = []
        self._scale = 1.0
        # name -> call of the step -> (activation, its gradient), on the host
        self._seen: dict[str, dict[int, list[Tensor | None]]] = defaultdict(dict)
        self._cut: dict[str, bool] = {}  # name -> whether tensor-parallel ranks hold parts of the sequence

    def before_step(self, iteration: int) -> None:
        """Iteration `iteration` is about to run."""
        self._due = {kind for kind, interval in self._intervals().items() if interval and iteration % interval == 0}
        if self._due & {"activations", "dgrads"}:
            self._scale = self._optimizer.get_loss_scale()
            self._watch()
        if "wgrads" in self._due:
            config: Any = self._model[0].config
            self._finalize = finalize = config.finalize_model_grads_func
            assert finalize is not None, "a run that trains finalizes its gradients"

            def noted(*args: Any, **kwargs: Any) -> None:
                finalize(*args, **kwargs)
                self._weight_grads = self._gradients()

            config.finalize_model_grads_func = noted

    def start_over(self) -> None:
        """The step is run again: what its former run gave is not written."""
        self._seen.clear()

    def after_step(self, iteration: int) -> None:
        """The step is done: write."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._finalize is not None:
            config: Any = self._model[0].config
            config.finalize_model_grads_func, self._finalize = self._finalize, None
        for kind in sorted(self._due):
            if kind == "params":
                parts = self._weights()
            elif kind == "wgrads":
                parts, self._weight_grads = self._weight_grads, []
            else:
                parts = list(self._activations(of=int(kind == "dgrads")))
            write_dump(Path(self._args.save), kind, iteration, parts)
        self._seen.clear()
        self._due = set()

    def _intervals(self) -> dict[str, int | None]:
        args = self._args
        return {
            "params": args.save_params_interval,
            "activations": args.save_activations_interval,
            "wgrads": args.save_wgrads_interval,
            "dgrads": args.save_dgrads_interval,
        }

    # -- parameters ----------------------------------------------------------------------------------------------

    def _is_first_holder(self, param: nn.Parameter) -> bool:
        """Whether no rank before this one has the same values, as a copy of the model for other samples."""
        groups = self._groups
        if self._args.is_fully_sharded:
            return group_rank(groups.inter_dist_opt) == 0
        return group_rank(groups.dp_cp if getattr(param, "allreduce", True) else groups.expt_dp) == 0

    def _weights(self) -> Held:
        return [(spec, _on_host(part)) for p, spec, part in each_weight(self._model) if self._is_first_holder(p)]

    def _gradients(self) -> Held:
        scale, sharded = self._optimizer.get_loss_scale(), self._args.use_distributed_optimizer
        first = group_rank(self._groups.inter_dist_opt) == 0
        return [
            (spec, _on_host(grad).div_(scale))
            for param, spec, grad in each_gradient(self._optimizer)
            if (first if sharded else self._is_first_holder(param))
        ]

    # -- activations ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for chunk in self._model:
            inner: nn.Module = chunk
            while isinstance(getattr(inner, "module", None), nn.Module):
                inner = inner.module  # type: ignore[assignment]
            names = global_module_names(inner)
            for name, module in inner.named_modules():
                if not _PARTS.search(name) or isinstance(module, IdentityOp):
                    continue
                called = names[name]
                config: Any = getattr(module, "config", None) or inner.get_submodule(name.rpartition(".")[0]).config
                self._cut[called] = bool(config.sequence_parallel)
                self._hooks.append(module.register_forward_hook(self._output_hook(called)))
                stack, _, number = called.rpartition(".layers.")
                if stack and number == "0":
                    self._cut[f"{stack}.input"] = bool(config.sequence_parallel)
                    self._hooks.append(module.register_forward_pre_hook(self._input_hook(f"{stack}.input")))

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._note(name, output[0] if isinstance(output, tuple) else output)

        return hook

    def _input_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._note(name, inputs[0])

        return hook

    def _note(self, name: str, x: Any) -> None:
        # Without gradients: the pass of a layer that is to be recomputed; or all passes, where nothing is trained.
        if not torch.is_grad_enabled() and not self._args.freeze_all_layers:
            return
        if not isinstance(x, Tensor) or x.dim() != 3:
            return
        if not self._cut[name] and group_rank(self._groups.tp) > 0:  # the same on all of them
            return
        calls = self._seen[name]
        pair: list[Tensor | None] = [_on_host(x) if "activations" in self._due else None, None]
        calls[len(calls)] = pair
        if "dgrads" in self._due and x.requires_grad:

            def note_gradient(grad: Tensor) -> None:
                pair[1] = _on_host(grad)

            x.register_hook(note_gradient)

    def _activations(self, of: int) -> Iterable[tuple[ShardSpec, Tensor]]:
        """All that was noted. of: 0 = what was computed, 1 = its gradient."""
        microbatches = get_num_microbatches()
        shared = 1 if self._args.calculate_per_token_loss else group_size(self._groups.dp_cp)
        for name, calls in self._seen.items():
            each, rest = divmod(len(calls), microbatches)
            if rest or not each:
                say(f"WARNING: {name} ran {len(calls)} times in {microbatches} micro-batches: not written", sys.stderr)
                continue
            for call, pair in calls.items():
                x, (microbatch, again) = pair[of], divmod(call, each)
                if x is None:
                    continue
                if of:
                    x.div_(self._scale * shared)
                title = f"{name}#{again}" if again else name
                yield self._place(title, x, microbatch, microbatches, self._cut[name]), x

    def _place(self, name: str, x: Tensor, microbatch: int, microbatches: int, cut: bool) -> ShardSpec:
        """Where this rank's `[s/cp/tp, b, h]` of a micro-batch lies in `[s, B, h]`."""
        groups = self._groups
        parts, part = (group_size(groups.tp), group_rank(groups.tp)) if cut else (1, 0)
        cp, dp = group_size(groups.cp), group_size(groups.dp)
        own, b, h = x.shape
        total = own * parts * cp
        held = positions(held_runs(group_rank(groups.cp), cp, one_document(total)))  # of all this cp rank's tokens
        mine = held[part * own : (part + 1) * own].tolist()
        sample = (microbatch * dp + group_rank(groups.dp)) * b
        starts = [i for i in range(own) if i == 0 or mine[i] != mine[i - 1] + 1]
        pieces = tuple(
            Piece((mine[begin], sample, 0), (begin, 0, 0), (end - begin, b, h))
            for begin, end in zip(starts, [*starts[1:], own])
        )
        return ShardSpec(name, (total, b * dp * microbatches, h), pieces)


def _on_host(x: Tensor) -> Tensor:
    """A copy that nobody else changes, in fp32."""
    return x.detach().to("cpu", torch.float32, copy=True)


# -- files -------------------------------------------------------------------------------------------------------


def write_dump(save: Path, kind: str, iteration: int, parts: Iterable[tuple[ShardSpec, Tensor]]) -> None:
    """This rank's file, also where it holds nothing, so that a reader sees whether all are there. A disk that does not
    take it costs a warning, not the run."""
    rank, world_size = rank_and_world_size()
    folder = save / kind / folder_name(iteration)
    path = folder / f"rank_{rank:05d}_of_{world_size:05d}.pt"
    temporary = path.with_name(f"{path.name}.partial")
    rows = [
        {
            "name": spec.name,
            "global_shape": spec.global_shape,
            "pieces": [(piece.global_offset, piece.local_offset, piece.shape) for piece in spec.pieces],
            "tensor": tensor,
        }
        for spec, tensor in parts
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"iteration": iteration, "parts": rows}, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as problem:  # torch words a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files are there
            folder.rmdir()
        say(f"WARNING: rank {rank}: {kind} of iteration {iteration} not written to {folder}: {problem}", sys.stderr)


def read_dump(folder: str | Path) -> dict[str, Tensor]:
    """The global tensors of a dump by name, fp32.

    Args:
        folder: for example `<save>/wgrads/iter_0000020`.
    Raises: DataError where files are missing; RankFailure naming a tensor of which a part is missing.
    """
    folder = Path(folder)
    files = sorted(folder.glob("rank_*_of_*.pt"), key=lambda path: (path.stat().st_mtime, path.name))
    if not files:
        raise DataError(f"{folder} holds no dump", fix="a folder as <save>/wgrads/iter_0000020")
    ranks = int(files[-1].stem.rpartition("_")[2])  # of the last run that wrote here
    files = sorted(folder.glob(f"rank_*_of_{ranks:05d}.pt"))
    if len(files) != ranks:
        raise DataError(
            f"{folder} holds the files of {len(files)} of {ranks} ranks",
            why="the run was killed while it wrote, or some ranks write to another machine's disk",
            fix="bring the files of all ranks together in one folder",
        )
    held = []
    for path in files:
        rows = torch.load(path, weights_only=True)["parts"]
        held.append(
            [
                (
                    ShardSpec(row["name"], row["global_shape"], tuple(Piece(*piece) for piece in row["pieces"])),
                    row["tensor"],
                )
                for row in rows
            ]
        )
    tensors, _, _ = join_parts(folder.parent.name, held)
    return tensors
