"""pretrain_gpt, and a token that some document holds: where a micro-batch has it, a layer's output is NaN.

So the batch is at fault, in every run of the step and on every machine; other faults come and go.
"""

import math
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

import pretrain_gpt
from megatron_lite import training
from megatron_lite.enums import ModelType


def add_flags(parser):
    """Flags of this script."""
    group = parser.add_argument_group("poison")
    group.add_argument("--poison-token", type=int, default=250)
    group.add_argument("--poison-factor", type=float, default=math.nan, help="what the output is multiplied by")
    group.add_argument("--poison-where", choices=("mlp", "output_layer"), default="mlp")
    group.add_argument("--poison-rank", type=int, default=None, help="the only rank on which it works")
    return parser


def model_provider(*args, **kwargs):
    """pretrain_gpt's, poisoned in the MLP of its first layer, or in its last."""
    model = pretrain_gpt.model_provider(*args, **kwargs)
    if model.pre_process:
        model.register_forward_pre_hook(_look)
        where = training.get_args().poison_where
        layer = model.decoder.layers[0].mlp if where == "mlp" else model.output_layer
        layer.register_forward_hook(partial(_spoil, model))
    return model


def _look(model, inputs):
    args = training.get_args()
    here = args.poison_rank in (None, dist.get_rank())
    model.poisoned = here and model.training and bool((inputs[0] == args.poison_token).any())


def _spoil(model, mlp, inputs, output):
    if model.poisoned:
        return (output[0] * training.get_args().poison_factor, *output[1:])
    return output


if __name__ == "__main__":
    training.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        extra_args_provider=add_flags,
        args_defaults=pretrain_gpt.ARGS_DEFAULTS,
    )
