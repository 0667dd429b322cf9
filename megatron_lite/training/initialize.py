"""Start-up: which device, which ranks, which groups, which random numbers.

    launcher's environment --> world --> device, backend --> process groups --> seeds

The launcher's RANK, WORLD_SIZE and LOCAL_RANK decide; the number of devices of the machine never does.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite import collectives, parallel_state
from megatron_lite.collectives import group_rank
from megatron_lite.errors import ConfigError, PeerLost
from megatron_lite.host_memory import keep_freed_memory
from megatron_lite.log import print_rank_0, set_rank, warn_rank_0
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.rank_grid import DEFAULT_ORDER, PIPELINE_BEFORE_DATA
from megatron_lite.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_lite.training import flight_recorder
from megatron_lite.training.arguments import all_flags
from megatron_lite.training.idle_flags import idle_on_device
from megatron_lite.training.launch import Launch, read_launch
from megatron_lite.training.rendezvous import fresh, launchers_store

# Algorithms of NCCL that always add in the same order.
_ORDERED_ALGORITHMS = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def choose_device(local_rank: int) -> torch.device:
    """This process's CUDA device, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and "SLURM_STEP_NUM_TASKS" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)  # srun --gpus-per-task=1 shows each task its own device alone
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} on a machine with {count} CUDA devices",
            why="each process drives a device of its own",
            fix=f"start at most {count} processes on this machine, or hide the devices with CUDA_VISIBLE_DEVICES=",
        )
    return torch.device("cuda", local_rank)


def initialize_megatron(args: Namespace) -> ProcessGroupCollection:
    """Bring up this process for a run: device (`args.device`), process groups (registered), seeds.

    Args:
        args: validated arguments.
    Returns: the registered process groups.
    """
    launch = read_launch(alone=args.fake_process_group)
    if args.logging_level is not None:
        logging.basicConfig(level=args.logging_level)
    args.device = choose_device(launch.local_rank)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    else:
        keep_freed_memory()
    if args.deterministic_mode:
        _deterministic()
    if args.disable_bf16_reduced_precision_matmul:
        _sum_in_fp32(args.device)
    if not dist.is_initialized():
        print_rank_0("> initializing torch distributed ...")
        with _connecting(launch.rank):
            _init_process_group(args, launch)
    set_rank(dist.get_rank(), dist.get_world_size())
    if not args.fake_process_group:
        check_stage_transport(args, dist.get_backend())
    for line in idle_on_device(args, all_flags(), args.device.type, dist.get_backend()):
        warn_rank_0(line)
    if not parallel_state.model_parallel_is_initialized():
        with _connecting(launch.rank):
            initialize_groups(args)
        print_rank_0(f"> initialized tensor model parallel with size {args.tensor_model_parallel_size}")
        print_rank_0(f"> initialized pipeline model parallel with size {args.pipeline_model_parallel_size}")
    print_rank_0(f"> setting random seeds to {args.seed} ...")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    set_random_seed(seed_of_rank(args, groups))
    return groups


def initialize_groups(args: Namespace) -> ProcessGroupCollection:
    """Make and register the process groups of `args`; torch.distributed is up."""
    return parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order=PIPELINE_BEFORE_DATA if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        high_priority_stream_groups=args.high_priority_stream_groups,
    )


def check_stage_transport(args: Namespace, backend: str) -> None:
    """Raises: ConfigError where `--pipeline-model-parallel-comm-backend` is not what the run's ranks talk over."""
    wanted = args.pipeline_model_parallel_comm_backend
    if wanted not in (None, backend):
        raise ConfigError(
            f"--pipeline-model-parallel-comm-backend {wanted} in a run over {backend}",
            why="stages talk over the library that all ranks talk over; without CUDA that is gloo",
            fix="leave it out",
        )


def seed_of_rank(args: Namespace, pg_collection: ProcessGroupCollection) -> int:
    """`--seed`; with `--data-parallel-random-init` each data-parallel rank's own, so that its dropout differs too.

    Weights are then those of the first rank: `get_model` sends them.
    """
    shift = 10 * group_rank(pg_collection.dp) if args.data_parallel_random_init else 0
    return args.seed + shift


@contextmanager
def _connecting(rank: int) -> Iterator[None]:
    """Around what has ranks call each other: who gets no answer is a witness, and another one's error is the cause."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise PeerLost(
            f"rank {rank} could not connect to the others: {str(error).splitlines()[0]}",
            why="another rank has ended while all of them started, or no network leads to its machine",
            fix="look at what the other ranks said; if nothing, GLOO_SOCKET_IFNAME names the network to take",
        ) from error


def init_fake_process_group(rank: int, world_size: int) -> None:
    """This process as one rank of a world that nobody else is in."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a part of torch that few runs need

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _init_process_group(args: Namespace, launch: Launch) -> None:
    if args.fake_process_group:
        init_fake_process_group(launch.rank, launch.world_size)
        print_rank_0(
            f"> rank {launch.rank} of {launch.world_size} under a fake process group: what other ranks would send is "
            "zero. Look at memory; losses and norms mean nothing, and nothing is saved"
        )
        return
    backend = args.distributed_backend if args.device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    flight_recorder.set_up(args, backend)
    if launch.world_size == 1:  # users' scripts may ask torch.distributed for their rank; no port is opened for it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    kept = launchers_store(timeout)
    store = None if kept is None else fresh(kept, launch.rank, launch.world_size, timeout)
    try:
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is taken on this machine",
            why="rank 0 listens there; another run or a program holds it",
            fix="another MASTER_PORT, or torchrun --standalone, which finds a free one",
        ) from None


def _sum_in_fp32(device: torch.device) -> None:
    """cuBLAS may round partial sums of bf16 products to bf16, unless it is told not to."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    else:
        print_rank_0("--disable-bf16-reduced-precision-matmul has no effect here: a CPU adds products of bf16 in fp32")


def _deterministic() -> None:
    """Only deterministic kernels; a setting that contradicts it is refused, never overruled in silence."""
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if workspace not in (":4096:8", ":16:8"):
        raise ConfigError(
            f"--deterministic-mode with CUBLAS_WORKSPACE_CONFIG={workspace}",
            why="cuBLAS is deterministic with :4096:8 or :16:8 only",
            fix="unset CUBLAS_WORKSPACE_CONFIG",
        )
    algorithms = os.environ.setdefault("NCCL_ALGO", "Ring")
    unordered = [word for word in algorithms.split(",") if word and word not in _ORDERED_ALGORITHMS]
    if unordered:
        raise ConfigError(
            f"--deterministic-mode with NCCL_ALGO={algorithms}",
            why=f"{', '.join(unordered)} may add in another order each time",
            fix="unset NCCL_ALGO, or NCCL_ALGO=Ring",
        )
    others = os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if others != "0":
        raise ConfigError(
            f"--deterministic-mode with NVTE_ALLOW_NONDETERMINISTIC_ALGO={others}",
            why="Transformer Engine would be free to choose kernels that add in another order each time",
            fix="unset NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy, torch and the regions of the tensor-parallel tracker.

    Where the seed is the same on every rank, so are initial weights: `initialization` makes them a function of names.
    """
    if seed is None or seed <= 0:
        raise ConfigError(f"--seed {seed}", why="seeds are positive", fix="--seed 1234")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def finish() -> None:
    """Leave the process groups in order: every rank is done, no reference is left, then they are destroyed.

    A group that lives on until the interpreter ends still has threads. One that then wants the interpreter's lock, to
    drop a tensor that it has sent, is ended by force and takes the process with it, after a run that went well.
    """
    collectives.barrier(collectives.world(), purpose="finish")
    parallel_state.destroy_model_parallel()
    collectives.forget_groups()
    gc.collect()  # models, their hooks and groups refer to each other in cycles
    if dist.is_initialized():
        dist.destroy_process_group()
