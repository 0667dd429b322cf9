"""Saving and resuming a run: what belongs to it besides tensors, from where to load, and Megatron's lines.

    model      under global names                                 iteration, samples, FLOPs   common.pt
    optimizer  under optimizer.*, in the same global names        schedule, loss scale        common.pt
    random generators, one entry a rank                           arguments                   args.json

A run that is killed and started again with the same command goes on bit for bit: everything that the next step reads
is in the checkpoint. Which file holds what, and why a crash cannot spoil it: `checkpointing/`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import collectives
from megatron_lite.checkpointing import folders, sharded
from megatron_lite.checkpointing.async_save import AsyncSaver, Outcome
from megatron_lite.checkpointing.checkpoint import (
    Content,
    HowToRead,
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
from megatron_lite.checkpointing.huggingface import TOKENIZER_FILES
from megatron_lite.checkpointing.megatron_dist import is_megatron_dist
from megatron_lite.checkpointing.megatron_dist import read as read_megatron_dist
from megatron_lite.checkpointing.megatron_dist import read_common as read_megatron_common
from megatron_lite.checkpointing.sharded import read_object, saved_objects
from megatron_lite.collectives import group_rank, group_size
from megatron_lite.distributed import DataParallelBase, held_part, whole_parameters
from megatron_lite.errors import CheckpointError
from megatron_lite.log import print_rank_0, say
from megatron_lite.optimizer import MegatronOptimizer
from megatron_lite.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.sharding import ShardSpec, whole
from megatron_lite.training.checkpoint_args import (
    args_to_save,
    grows_into_retro,
    has_fp8_history,
    has_vocabulary_of,
    is_fp8_history,
    is_retros_own,
    take_args,
)
from megatron_lite.training.checkpoint_search import find_checkpoint, find_local, local_root, rolling_root
from megatron_lite.training.derived import phase_transitions
from megatron_lite.training.global_vars import get_args
from megatron_lite.training.progress_file import append_progress, saved_message
from megatron_lite.training.resume_differences import check_args
from megatron_lite.training.rng_state import find_state, get_rng_state, layout_of, set_rng_state, state_name

CHECKPOINT_VERSION = 3.0  # Megatron's number for this set of contents
_OPTIMIZER = "optimizer."
_MAIN_PARAMS = "optimizer.state.param."
# --dist-ckpt-strictness -> is a tensor that only the run has (Megatron: unexpected) no error, and one that only the
# checkpoint has (missing); and are they said. Nothing is left out in silence by default.
_STRICTNESS = {
    "assume_ok_unexpected": (False, False, False, False),
    "raise_all": (False, False, False, False),
    "raise_unexpected": (False, True, False, True),
    "log_unexpected": (True, True, True, False),
    "log_all": (True, True, True, True),
    "ignore_all": (True, True, False, False),
}

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
    root: str | Path | None = None,
    how: HowToWrite | None = None,
    beside: AsyncSaver | None = None,
    rolling: bool = False,
    rerun_state: dict[str, Any] | None = None,
) -> Outcome | None:
    """Save everything that a resume needs under `--save`; collective over all ranks.

    Args:
        model: a chunk, or the list of this rank's chunks.
        release: a published model: weights alone, in the folder `release`.
        root: another folder than `--save`.
        how: None: as the flags say.
        rolling: the checkpoint that --non-persistent-save-interval asks for, which replaces the one before.
        rerun_state: what the watch over results remembers, plain values.
        beside: writes while the training goes on; the checkpoint is complete when its `poll` or `wait` says so.
    Returns: the outcome of the save before, where `beside` was still at it.
    Raises: CheckpointError, on every rank; older checkpoints and the tracker are then as before.
    """
    args, group, groups = get_args(), collectives.world(), ProcessGroupCollection.use_mpu_process_groups()
    root, local = Path(root or args.save), rolling and args.non_persistent_ckpt_type == "local"
    if rolling:
        root = local_root(args, group_rank(group)) if local else rolling_root(args, root)
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
    if rerun_state is not None:
        common["rerun_state_machine"] = rerun_state
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
        files=tokenizer_assets(args) if args.save_tokenizer_assets and group_rank(group) == 0 else {},
        description={"layout": layout_of(groups), "world_size": group_size(group)},
    )
    said = f"  successfully saved checkpoint from iteration {iteration:7d} to {root} {_place(groups)}"
    progress = saved_message(args, iteration, num_floating_point_operations_so_far)
    if beside is not None and not local:
        append_progress(args, f"Saving async checkpoint\t{progress}")
        progress = f"Saved async checkpoint\tIteration: {iteration}"
    else:
        progress = f"Saved checkpoint\t{progress}"

    def done() -> list[str]:
        append_progress(args, progress)
        return [
            said,
            *(_prune(root, None, 1) if rolling else _prune(root, args.save_retain_interval, args.save_keep_last)),
        ]

    if local:  # each rank its own; the one before goes when all ranks have the new one
        whole = HowToWrite(files=args.dist_ckpt_workers, partial=True)
        together(lambda: write_checkpoint(root, which, content, None, whole), group)
        folders.prune(root, newest=1)
        print_rank_0(said)
        return None
    if beside is not None:
        return beside.start(root, which, content, done)
    write_checkpoint(root, which, content, group, how or how_to_write(args))
    if group_rank(group) == 0:
        for line in done():
            say(line)
    return None


def tokenizer_assets(args: Namespace) -> dict[str, bytes]:
    """The files of the tokenizer, below `tokenizer/`: with them a checkpoint can be used by itself."""
    named = [Path(name) for name in (args.tokenizer_model, args.vocab_file, args.merge_file) if name]
    paths = [path / name for path in named if path.is_dir() for name in TOKENIZER_FILES]
    paths += [path for path in named if not path.is_dir()]
    return {f"tokenizer/{path.name}": path.read_bytes() for path in paths if path.is_file()}


def _has_tokenizer(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether the checkpoint holds exactly these files of a tokenizer."""
    kept = {f"tokenizer/{path.name}": path.read_bytes() for path in (folder / "tokenizer").glob("*")}
    return bool(files) and kept == files


def _prune(root: Path, every: int | None, newest: int | None) -> list[str]:
    """Delete superseded checkpoints; one that cannot be deleted costs nothing but space. Returns: lines that say so."""
    if not every and not newest:
        return []
    try:
        deleted, links = folders.prune(root, every=every, newest=newest)
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
    strict &= args.strict_fsdp_dtensor_load
    found = on_rank_0(lambda: find_checkpoint(args, load_arg), group)
    if args.non_persistent_ckpt_type == "local" and args.ckpt_step is None:
        facts = {"layout": layout_of(groups), "world_size": group_size(group)}
        local = find_local(args, facts, group)
        newest = found.which if found is not None and isinstance(found.which, int) else -1
        if local is not None and int(local.which) > newest:
            found = local
    if found is None:
        print_rank_0(f"WARNING: could not find the metadata file {Path(getattr(args, load_arg)) / folders.TRACKER}")
        print_rank_0("    will not load any checkpoints and will start from random")
        return 0, 0
    folder, resume = found.folder, not found.weights_only
    kind = "local" if found.of_rank else "release" if found.which == "release" else "distributed"
    at = "" if found.which == "release" else f" at iteration {found.which}"
    print_rank_0(f" loading {kind} checkpoint from {found.root}{at}")
    megatrons = on_rank_0(lambda: args.auto_detect_ckpt_format and is_megatron_dist(folder), group)
    if megatrons:
        print_rank_0(f"{folder} is Megatron-LM's torch_dist format: its tensors are read under our names")
        common, saved_args = together(lambda: _common_of_megatron(folder, found.which), group)
    else:
        manifest = together(lambda: folders.read_manifest(folder), group)
        if args.verify_integrity:
            _compare_checksums(folder, manifest, None if found.of_rank else group)
        common, saved_args = together(lambda: (read_common(folder), read_args(folder)), group)
    check_args(
        args,
        saved_args,
        folder,
        finetune=found.weights_only,
        # What Megatron derives has not our values name by name: differences there are told, not refused.
        trains=optimizer is not None and resume and not args.skip_train and not megatrons,
        new_phase=common["iteration"] in phase_transitions(args),
        same_tokenizer=lambda: _has_tokenizer(folder, tokenizer_assets(args)),
    )

    tensors = [model_tensors(ddp_model)]
    with_optimizer = optimizer is not None and resume and not args.no_load_optim
    if with_optimizer:
        if "optimizer" not in common:
            raise CheckpointError(
                f"{folder} holds no optimizer state",
                why="it was saved with --no-save-optim"
                if not megatrons
                else "Megatron keeps it under names without a layout only with --dist-ckpt-optim-fully-reshardable",
                fix="--no-load-optim starts the optimizer afresh; --finetune the whole run",
            )
        assert optimizer is not None
        tensors.append(optimizer_tensors(optimizer))

    def expected(name: str) -> bool:
        return (with_optimizer or not name.startswith(_OPTIMIZER)) and not is_fp8_history(name)

    same_vocabulary = has_vocabulary_of(args, saved_args)
    if same_vocabulary and args.padded_vocab_size != saved_args.get("padded_vocab_size"):
        print_rank_0(
            f"NOTE: the vocabulary is padded to {args.padded_vocab_size} rows, in the checkpoint to "
            f"{saved_args.get('padded_vocab_size')}: padding is cut anew. Padded rows take part in the softmax, so the "
            f"loss is another than with --padded-vocab-size {saved_args.get('padded_vocab_size')}"
        )

    def padded(name: str) -> bool:
        of_words = name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
        return (same_vocabulary and of_words) or is_fp8_history(name)

    main_params = optimizer is not None and args.load_main_params_from_ckpt and not with_optimizer
    if main_params:
        assert optimizer is not None
        mine = optimizer_tensors(optimizer).items()
        tensors.append({name: part for name, part in mine if name.startswith(_MAIN_PARAMS)})
    allow_missing, allow_unexpected, say_missing, say_unexpected = _STRICTNESS[args.dist_ckpt_strictness]
    how = HowToRead(
        read=read_megatron_dist if megatrons else sharded.read,
        allow_missing=allow_missing or not strict,
        allow_unexpected=allow_unexpected or not strict,
        check_cover=args.ckpt_load_validate_sharding_integrity,
        shared=groups.dp_cp if args.ckpt_fully_parallel_load and not found.of_rank else None,
    )
    wanted = merge(tensors)
    if found.weights_only and grows_into_retro(args, saved_args):
        fresh = sorted(name for name in wanted if is_retros_own(name))
        wanted = {name: part for name, part in wanted.items() if name not in fresh}
        print_rank_0(f"not in a GPT's checkpoint, and starts afresh: {', '.join(fresh)}")
    if has_fp8_history(vars(args)) and (megatrons or not has_fp8_history(saved_args)):
        wanted = {name: part for name, part in wanted.items() if not is_fp8_history(name)}
        print_rank_0("not in the checkpoint, and starts afresh: the histories of --fp8-recipe delayed")
    missing, unexpected = read_tensors(folder, wanted, group, expected=expected, padded=padded, how=how)
    if missing and (say_missing or not strict):
        print_rank_0(f"tensors that only the run has, and keeps as they were: {', '.join(missing)}")
    if unexpected and (say_unexpected or not strict):
        print_rank_0(f"tensors that only the checkpoint has, and that are left: {', '.join(unexpected)}")
    if optimizer is not None:
        if with_optimizer:
            optimizer.load_common_state(common["optimizer"])
        elif not main_params:
            take_roundings(ddp_model, wanted)
            optimizer.reload_model_params()
    iteration, operations = 0, 0.0
    if resume:
        iteration, operations = common["iteration"], common["num_floating_point_operations_so_far"]
        args.consumed_train_samples = common["consumed_train_samples"]
        args.consumed_valid_samples = common["consumed_valid_samples"]
        args.skipped_train_samples = common["skipped_train_samples"]
        args.rerun_state = common.get("rerun_state_machine")
        schedule = dict(common.get("opt_param_scheduler", {}))
        if args.override_ckpt_iteration is not None:
            print_rank_0(f"iteration {iteration} of the checkpoint counts as {args.override_ckpt_iteration}")
            iteration = args.override_ckpt_iteration
            args.consumed_train_samples, args.skipped_train_samples = iteration * args.global_batch_size, 0
            schedule["num_steps"] = args.consumed_train_samples
        if opt_param_scheduler is not None and "opt_param_scheduler" in common:
            opt_param_scheduler.load_state_dict(schedule)
        if not args.no_load_rng and not megatrons:
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


def _common_of_megatron(folder: Path, which: Which) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values and arguments of Megatron's folder, by our names. The optimizer's groups are not ours to take over."""
    common, args = read_megatron_common(folder)
    zero = {"iteration": 0 if which == "release" else which, "num_floating_point_operations_so_far": 0.0}
    counters = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
    values = {**zero, **dict.fromkeys(counters, 0), "checkpoint_version": CHECKPOINT_VERSION}
    values |= {name: args[name] for name in counters if name in args}
    known = (*values, "opt_param_scheduler")
    return values | {name: common[name] for name in known if name in common}, args


def load_args_from_checkpoint(args: Namespace, load_arg: str = "load") -> None:
    """`--use-checkpoint-args`, before the model and any process group exist: every rank reads the file itself.

    Raises: CheckpointError.
    """
    found = find_checkpoint(args, load_arg)
    if found is None:
        print_rank_0("Checkpoint not found to provide arguments, using provided arguments.")
        return
    if args.auto_detect_ckpt_format and is_megatron_dist(found.folder):
        saved = read_megatron_common(found.folder)[1]
    else:
        folders.read_manifest(found.folder)
        saved = read_args(found.folder)
    take_args(
        args,
        saved,
        parallel=args.use_mp_args_from_checkpoint_args,
        tokenizer=args.use_tokenizer_model_from_checkpoint_args,
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
    Of a fully sharded model of 16 bits, which keeps fp32 alone, these are roundings (`take_roundings`).
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    whole_parameters(chunks)
    return merge(_chunk_tensors(chunk) for chunk in chunks)


@torch.no_grad()
def take_roundings(model: Model, tensors: Mapping[str, tuple[Tensor, ShardSpec]]) -> None:
    """Make `tensors`, of `model_tensors`, the model's, where they are roundings that a checkpoint was read into."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        if _gives_roundings(chunk):
            for param in chunk.parameters():
                spec: ShardSpec = param.shard  # type: ignore[attr-defined]
                if spec.name in tensors:
                    held_part(param).copy_(tensors[spec.name][0])


def _gives_roundings(chunk: nn.Module) -> bool:
    return isinstance(chunk, DataParallelBase) and chunk.is_fully_sharded and chunk.model_dtype != torch.float32


@torch.no_grad()
def _chunk_tensors(chunk: nn.Module) -> dict[str, tuple[Tensor, ShardSpec]]:
    module, rounded = _unwrapped(chunk), _gives_roundings(chunk)
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
        part = held_part(tensor)
        if part.numel() == 0 and tensor.numel() > 0:
            continue  # all rows are other ranks'
        if rounded and isinstance(tensor, nn.Parameter):
            part = part.to(chunk.model_dtype)
        tensors[spec.name] = (part, spec)
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
