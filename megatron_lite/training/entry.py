"""`pretrain`: what every entry script calls. Arguments come first, without torch: mistakes answer at once."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError, MegatronLiteError, PeerLost
from megatron_lite.log import rank_and_world_size, say, speaks_for_rank_0
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.launch import read_launch

# A rank that lost another one knows less than the launcher, which ends all ranks when it sees who ended first. So it
# holds its message back: the guilty rank's error is the first in the log, and mostly the only one.
_WITNESS_WAITS_S = 10
_RANK_0_SPEAKS_S = 1  # a launcher ends all ranks when the first one has ended: not before rank 0 has spoken for them


def pretrain(
    train_valid_test_dataset_provider: Callable[[list[int | None]], Sequence[Any]],
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., None] | None = None,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Train, evaluate and save as the command line says. The process ends here when something is the user's to mend.

    Args:
        train_valid_test_dataset_provider: sizes -> (train, valid, test) data sets.
        model_provider: (pre_process, post_process) -> module.
        forward_step_func: (data iterator, model) -> (output, loss function); see `pipeline_parallel.executor`.
        process_non_loss_data_func: (collected, iteration, writer), called after each evaluation with what
            `loss_func(output, non_loss_data=True)` returned for one batch.
        extra_args_provider: adds flags of the script to the parser.
        args_defaults: other defaults than those of the flags, by Megatron's name.
    """
    try:
        args = read_arguments(extra_args_provider, args_defaults)

        # torch: not before the arguments are known to be good
        from megatron_lite.training.initialize import finish
        from megatron_lite.training.training import run, start

        start(args)
        run(
            args,
            train_valid_test_dataset_provider,
            model_provider,
            model_type,
            forward_step_func,
            process_non_loss_data_func,
        )
        finish()
    except PeerLost as error:
        if "timed out" not in error.what.lower():  # who was waited for so long will say nothing now
            time.sleep(_WITNESS_WAITS_S)
        leave(error)
    except MegatronLiteError as error:
        leave(error)
    except KeyboardInterrupt:
        say("\ninterrupted (--exit-signal-handler saves before it leaves on SIGTERM)", sys.stderr)
        sys.exit(130)


def read_arguments(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: dict[str, Any] | None = None,
    argv: list[str] | None = None,
) -> Namespace:
    """The command line, completed from a checkpoint if it says so, and checked against the launcher's world size."""
    args = parse_args(argv, extra_args_provider, args_defaults)
    launch = read_launch(alone=args.fake_process_group)
    if args.use_checkpoint_args:
        from megatron_lite.training.checkpointing import load_args_from_checkpoint  # reads with torch

        load_args_from_checkpoint(args)
    validate_args(args, launch.world_size)
    return args


def leave(error: MegatronLiteError) -> None:
    """Print what the user can mend, without a traceback, and end this process with the error's status."""
    rank, size = rank_and_world_size()
    # What is bad on every rank, as flags are, rank 0 says. The rest may be true of one rank alone, also of one that is
    # none.
    if speaks_for_rank_0() or rank >= size or not error.on_every_rank:
        prefix = f"[rank {rank}] " if rank else ""
        say(f"\n{prefix}{type(error).__name__}: {error}", sys.stderr)
    elif not isinstance(error, ConfigError):
        time.sleep(_RANK_0_SPEAKS_S)
    sys.exit(error.exit_status)
