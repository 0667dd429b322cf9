"""The model of a checkpoint, built as the arguments inside say, for verbs that use it on one process."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_lite.enums import ModelType
from megatron_lite.errors import ConfigError
from megatron_lite.training import global_vars
from megatron_lite.training.checkpointing import load_checkpoint
from megatron_lite.training.entry import read_arguments
from megatron_lite.training.initialize import initialize_megatron
from megatron_lite.training.model_parts import parts_of
from megatron_lite.training.model_setup import get_model


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation, with the tokenizer and the arguments of its training."""

    model: nn.Module
    tokenizer: Any
    args: Namespace


def load_model(
    load: str, flags: Sequence[str] = (), seed: int = 1234, defaults: dict[str, Any] | None = None
) -> LoadedModel:
    """The model of a checkpoint.

    Args:
        load: what `--save` was when it was trained.
        flags: further flags of training, such as `--ckpt-step 100`, `--bf16` or `--tokenizer-model PATH`.
        defaults: of the arguments, by name.
    Raises: ConfigError, CheckpointError, DataError.
    """
    with redirect_stdout(io.StringIO()):  # the start-up lines of a training run
        words = ["--load", load, "--use-checkpoint-args", "--no-load-rng", "--no-load-optim", "--seed", str(seed)]
        words += ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]  # asked of every run, used by none here
        args = read_arguments(args_defaults=defaults, argv=[*words, *flags])
        if args.world_size != 1:
            raise ConfigError(
                f"megatron-lite generate was started as {args.world_size} processes",
                why="it runs in one",
                fix="start it without torchrun",
            )
        global_vars.set_args(args)
        tokenizer = global_vars.build_tokenizer(args)
        global_vars.set_tokenizer(tokenizer)
        groups = initialize_megatron(args)

        def provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
            return parts_of(args).build(args, pre_process, post_process)

        (model,) = get_model(provider, ModelType.encoder_or_decoder, args, groups, wrap_with_ddp=False)
        load_checkpoint([model], None, None)
        model.eval()
    return LoadedModel(model, tokenizer, args)
