"""Saving and resuming a run: what belongs to it besides tensors, from where to load, and Megatron's lines.

    model      under global names                                 iteration, samples, FLOPs   common.pt
    optimizer  under optimizer.*, in the same global names        schedule, loss scale        common.pt
    random generators, one entry a rank                           arguments                   args.json

A run that is killed and started again with the same command goes on bit for bit: everything that the next step reads
is in the checkpoint. Which file holds what, and why a crash cannot spoil it: `checkpointing/`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.async_save import AsyncSaver, Outcome
from megatron_lite.checkpointing.checkpoint import (
    Content,
    HowToWrite,
    merge,
    on_rank_0,
    read_args,
    read_common,
    read_tensors,
    together,
    write_checkpoint,
)
from megatron_lite.checkpointing.folders import Which
from megatron_lite.checkpointing.sharded import read_object, saved_objects
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed import whole_parameters
from megatron_lite.errors import CheckpointError
from megatron_lite.log import print_rank_0, say, warn_rank_0
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import ShardSpec, whole
from megatron_lite.training.checkpoint_args import args_to_save, check_args, has_vocabulary_of, take_args
from megatron_lite.training.global_vars import get_args
from megatron_lite.training.progress_file import append_progress, saved_message
from megatron_lite.training.rng_state import find_state, get_rng_state, layout_of, set_rng_state, state_name

CHECKPOINT_VERSION = 3.0  # Megatron's number for this set of contents
_OPTIMIZER = "optimizer."

Model = nn.Module | Sequence[nn.Module]


# -- save --------------------------------------------------------------------------------------------------------


def save_checkpoint(
    iteration: int,
    model: Model,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    num_floating_point_operations_so_far: float,
    *,
    release: bool = False,
    root: Path | None = None,
    how: HowToWrite | None = None,
    beside: AsyncSaver | None = None,
) -> Outcome | None:
    """Save everything that a resume needs under `--save`; collective over all ranks.

    Args:
        model: a chunk, or the list of this rank's chunks.
        release: a published model: weights alone, in the folder `release`.
        root: another folder than `--save`.
        how: None: as the flags say.
        beside: writes while the training goes on; the checkpoint is complete when its `poll` or `wait` says so.
    Returns: the outcome of the save before, where `beside` was still at it.
    Raises: CheckpointError, on every rank; older checkpoints and the tracker are then as before.
    """
    args, group, groups = get_args(), collectives.world(), ProcessGroupCollection.use_mpu_process_groups()
    root = Path(args.save) if root is None else root
    which: Which = "release" if release else iteration
    print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {root} in {args.ckpt_format} format")
    tensors = [model_tensors(model)]
    common: dict[str, Any] = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        "consumed_train_samples": args.consumed_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
        "skipped_train_samples": args.skipped_train_samples,
        "layout": layout_of(groups),
    }
    objects = {}
    if not release:
        if opt_param_scheduler is not None:  # also with --no-save-optim: the position belongs to the iteration
            common["opt_param_scheduler"] = opt_param_scheduler.state_dict()
        if optimizer is not None and not args.no_save_optim:
            common["optimizer"] = optimizer.common_state()
            tensors.append(optimizer_tensors(optimizer))
        if not args.no_save_rng:
            objects[state_name(groups)] = get_rng_state()
    content = Content(
        tensors=merge(tensors),
        objects=objects,
        common=common,
        args=args_to_save(args),
        description={"layout": layout_of(groups), "world_size": group_size(group)},
    )
    said = f"  successfully saved checkpoint from iteration {iteration:7d} to {root} {_place(groups)}"
    progress = saved_message(args, iteration, num_floating_point_operations_so_far)

    def done() -> list[str]:
        append_progress(args, progress)
        return [said, *_prune(root, args)]

    if beside is not None:
        return beside.start(root, which, content, done)
    write_checkpoint(root, which, content, group, how or how_to_write(args))
    if group_rank(group) == 0:
        for line in done():
            say(line)
    return None


def _prune(root: Path, args: Namespace) -> list[str]:
    """Delete superseded checkpoints; one that cannot be deleted costs nothing but space. Returns: lines that say so."""
    if not args.save_retain_interval and not args.save_keep_last:
        return []
    try:
        deleted, links = folders.prune(root, every=args.save_retain_interval, newest=args.save_keep_last)
    except CheckpointError as error:
        return [f"WARNING: an old checkpoint stays on the disk.\n{error}"]
    return [
        *(f"  successfully deleted checkpoint from iteration {n:7d} at {root}" for n in deleted),
        *(f"  checkpoint from iteration {n:7d} is a symbolic link and stays" for n in links),
    ]


def how_to_write(args: Namespace) -> HowToWrite:
    """What the flags say on writing."""
    return HowToWrite(
        files=args.dist_ckpt_workers,
        spread=args.ckpt_fully_parallel_save,
        plans={} if args.ckpt_assume_constant_structure else None,
    )


# -- load --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A checkpoint to load. `weights_only`: a start from its weights, not the continuation of its run."""

    root: Path
    which: Which
    folder: Path
    weights_only: bool


def will_load_checkpoint(args: Namespace) -> bool:
    """Whether the run was told to look for a checkpoint."""
    return args.load is not None or args.pretrained_checkpoint is not None


def load_checkpoint(
    ddp_model: Model,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    load_arg: str = "load",
    strict: bool = True,
) -> tuple[int, float]:
    """Continue from `--load`: fills model, optimizer and schedule in place, and the counters in the arguments.

    Args:
        load_arg: the argument that names the folder.
        strict: False: tensors that only one side has are left alone, with a line.
    Returns: the iteration to continue after, and the floating-point operations until then. (0, 0) for a first start,
        whose `--load` is its `--save` and holds nothing yet.
    Raises: CheckpointError, on every rank.
    """
    args, group, groups = get_args(), collectives.world(), ProcessGroupCollection.use_mpu_process_groups()
    found = on_rank_0(lambda: find_checkpoint(args, load_arg), group)
    if found is None:
        print_rank_0(f"WARNING: could not find the metadata file {Path(getattr(args, load_arg)) / folders.TRACKER}")
        print_rank_0("    will not load any checkpoints and will start from random")
        return 0, 0
    folder, resume = found.folder, not found.weights_only
    kind = "release" if found.which == "release" else "distributed"
    at = "" if found.which == "release" else f" at iteration {found.which}"
    print_rank_0(f" loading {kind} checkpoint from {found.root}{at}")
    manifest = on_rank_0(lambda: folders.read_manifest(folder), group)
    if args.verify_integrity:
        _compare_checksums(folder, manifest, group)
    common, saved_args = together(lambda: (read_common(folder), read_args(folder)), group)
    check_args(args, saved_args, folder, finetune=found.weights_only)

    tensors = [model_tensors(ddp_model)]
    with_optimizer = optimizer is not None and resume and not args.no_load_optim
    if with_optimizer:
        if "optimizer" not in common:
            raise CheckpointError(
                f"{folder} holds no optimizer state",
                why="it was saved with --no-save-optim",
                fix="--no-load-optim starts the optimizer afresh; --finetune the whole run",
            )
        assert optimizer is not None
        tensors.append(optimizer_tensors(optimizer))

    def expected(name: str) -> bool:
        return with_optimizer or not name.startswith(_OPTIMIZER)

    same_vocabulary = has_vocabulary_of(args, saved_args)
    if same_vocabulary and args.padded_vocab_size != saved_args.get("padded_vocab_size"):
        print_rank_0(
            f"NOTE: the vocabulary is padded to {args.padded_vocab_size} rows, in the checkpoint to "
            f"{saved_args.get('padded_vocab_size')}: padding is cut anew. Padded rows take part in the softmax, so the "
            f"loss is another than with --padded-vocab-size {saved_args.get('padded_vocab_size')}"
        )

    def padded(name: str) -> bool:
        return same_vocabulary and name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))

    left = read_tensors(folder, merge(tensors), group, expected=expected, strict=strict, padded=padded)
    if left:
        print_rank_0(f"tensors that only the run or only the checkpoint has: {', '.join(left)}")
    if optimizer is not None:
        if with_optimizer:
            optimizer.load_common_state(common["optimizer"])
        else:
            optimizer.reload_model_params()
    iteration, operations = 0, 0.0
    if resume:
        iteration, operations = common["iteration"], common["num_floating_point_operations_so_far"]
        args.consumed_train_samples = common["consumed_train_samples"]
        args.consumed_valid_samples = common["consumed_valid_samples"]
        args.skipped_train_samples = common["skipped_train_samples"]
        if opt_param_scheduler is not None and "opt_param_scheduler" in common:
            opt_param_scheduler.load_state_dict(common["opt_param_scheduler"])
        if not args.no_load_rng:
            _load_rng(folder, common["layout"], groups, group)
    print_rank_0(f" checkpoint version {common['checkpoint_version']}")
    print_rank_0(f"  successfully loaded checkpoint from {found.root} {_place(groups)} at iteration {iteration}")
    return iteration, operations


def _compare_checksums(folder: Path, manifest: dict[str, Any], group: Any) -> None:
    """`--verify-integrity`: the ranks share the files. Raises: CheckpointError, on every rank."""
    mine = sorted(manifest["files"])[group_rank(group) :: group_size(group)]

    def compare() -> None:
        damage = folders.damaged_files(folder, mine, manifest)
        if damage:
            raise folders.damaged(folder, damage)

    together(compare, group)


def load_args_from_checkpoint(args: Namespace, load_arg: str = "load") -> None:
    """`--use-checkpoint-args`, before the model and any process group exist: every rank reads the file itself.

    Raises: CheckpointError.
    """
    found = find_checkpoint(args, load_arg)
    if found is None:
        print_rank_0("Checkpoint not found to provide arguments, using provided arguments.")
        return
    folders.read_manifest(found.folder)
    take_args(args, read_args(found.folder))


def find_checkpoint(args: Namespace, load_arg: str = "load") -> Found | None:
    """Which checkpoint the arguments mean. None: a first start, whose `--load` is its `--save` and holds nothing yet.

    Raises: CheckpointError when there is none and the user meant one, with what is there instead.
    """
    load: str | None = getattr(args, load_arg)
    if load is not None:
        which = _which(Path(load), args.ckpt_step)
        if which is not None:
            weights_only = args.finetune or which == "release"
            return Found(Path(load), which, folders.find(Path(load), which), weights_only)
    if args.pretrained_checkpoint is not None:
        root = Path(args.pretrained_checkpoint)
        which = _which(root, None)
        if which is None:
            raise _nothing_in(root, "--pretrained-checkpoint")
        return Found(root, which, folders.find(root, which), weights_only=True)
    if load is None:
        return None
    same = args.save is not None and Path(args.save).resolve() == Path(load).resolve()
    if not same or args.exit_on_missing_checkpoint:
        raise _nothing_in(Path(load), "--" + load_arg.replace("_", "-"))
    return None


def _which(root: Path, ckpt_step: int | None) -> Which | None:
    if ckpt_step is not None:
        return ckpt_step
    tracked = folders.read_tracker(root)
    if tracked is not None:
        return tracked
    complete = folders.complete_iterations(root)
    if complete:  # killed after the first checkpoint was complete and before the tracker named it
        warn_rank_0(
            f"{root} has no {folders.TRACKER}; its newest complete checkpoint is {complete[-1]}, which is loaded"
        )
        return complete[-1]
    return None


def _nothing_in(root: Path, flag: str) -> CheckpointError:
    if (root / folders.MANIFEST).is_file():
        return CheckpointError(
            f"{flag} {root} is one checkpoint, not a folder of checkpoints",
            why=f"the flag names the folder that holds {folders.TRACKER}",
            fix=f"{flag} {root.parent}, with --ckpt-step for an older one",
        )
    state = "does not exist" if not root.exists() else "holds no checkpoint" if root.is_dir() else "is a file"
    return CheckpointError(
        f"{flag} {root}: the folder {state}",
        why="training would start from random weights, which is meant only when --load equals --save",
        fix=f"correct the path; for a first start leave {flag} out, or let --save name the same folder",
    )


def _load_rng(folder: Path, layout: dict[str, int], groups: ProcessGroupCollection, group: Any) -> None:
    """Restore the random generators, as far as the layout lets them mean the same."""
    now = layout_of(groups)
    if any(now[name] != layout[name] for name in ("tp", "pp", "cp")):
        both = " vs ".join(f"({sizes['tp']}, {sizes['pp']}, {sizes['cp']})" for sizes in (now, layout))
        print_rank_0(f"(TP, PP, CP) mismatch after resume ({both}): RNG state will be ignored")
        return

    def restore() -> bool:
        name = find_state(saved_objects(folder), groups)
        if name is None:
            raise CheckpointError(
                f"{folder} holds no states of random generators",
                why="it was saved with --no-save-rng",
                fix="--no-load-rng starts them from --seed",
            )
        return set_rng_state(read_object(folder, name))

    if not together(restore, group):
        print_rank_0("the run moved between CPU and GPU: the RNG state of the device will be ignored")


# -- what is saved -----------------------------------------------------------------------------------------------


def model_tensors(model: Model) -> dict[str, tuple[Tensor, ShardSpec]]:
    """Parameters and persistent buffers of this rank's chunks, under their global names.

    A tensor says where it belongs by `tensor.shard`; one that says nothing is held by every rank under its own name.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    whole_parameters(chunks)
    return merge(_chunk_tensors(_unwrapped(chunk)) for chunk in chunks)


def _chunk_tensors(module: nn.Module) -> dict[str, tuple[Tensor, ShardSpec]]:
    tensors: dict[str, tuple[Tensor, ShardSpec]] = {}
    seen = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or id(tensor) in seen:  # tied weights have two names and are one tensor
            continue
        seen.add(id(tensor))
        spec = getattr(tensor, "shard", None)
        if spec is None:
            assert not getattr(tensor, "tensor_model_parallel", False), f"{name} is split, but has no shard description"
            spec = whole(name, tuple(tensor.shape))
        tensors[spec.name] = (tensor, spec)
    return tensors


def optimizer_tensors(optimizer: MegatronOptimizer) -> dict[str, tuple[Tensor, ShardSpec]]:
    """The optimizer's state per parameter, under names that start with `optimizer.`."""
    state = optimizer.sharded_state()
    return {key if key.startswith(_OPTIMIZER) else _OPTIMIZER + key: value for key, value in state.items()}


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and Float16Module."""
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module  # type: ignore[assignment]
    return module


def _place(groups: ProcessGroupCollection) -> str:
    t, p = groups.tp, groups.pp
    return f"[ t {group_rank(t) + 1}/{group_size(t)}, p {group_rank(p) + 1}/{group_size(p)} ]"
