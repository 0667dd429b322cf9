"""pretrain_gpt with a fault that can be chosen: a user's own script, with flags of its own."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

import pretrain_gpt
from megatron_lite import training
from megatron_lite.enums import ModelType
from megatron_lite.training import launch

calls = 0


def add_flags(parser):
    """Flags of this script."""
    group = parser.add_argument_group("fault")
    faults = (
        "nan-loss",
        "nan-grad",
        "no-tokens",
        "uneven-masks",
        "raise",
        "raise-in-backward",
        "exit",
        "kill",
        "sleep",
    )
    group.add_argument("--fault", choices=faults, default=None)
    group.add_argument("--fault-call", type=int, default=None, help="forward pass of training, from 1; default: all")
    group.add_argument("--fault-iteration", type=int, default=None, help="iteration, from 1; default: all")
    group.add_argument("--fault-rank", type=int, default=0)
    group.add_argument("--fault-once", type=Path, default=None, help="a file that says that it has happened")
    group.add_argument("--started-minutes-ago", type=float, default=None, help="pretend it at the first batch")
    return parser


def forward_step(data_iterator, model):
    """pretrain_gpt's, spoilt."""
    global calls
    args = training.get_args()
    if args.started_minutes_ago is not None:
        launch._PROGRAM_START = time.time() - 60 * args.started_minutes_ago
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    mask = loss_func.args[0]
    if losses.requires_grad:
        calls += 1
    here = args.fault_call in (None, calls) and dist.get_rank() == args.fault_rank and losses.requires_grad
    here = here and args.fault_iteration in (None, args.iteration + 1)
    if here and args.fault_once is not None:
        here = not args.fault_once.exists()
        args.fault_once.touch()
    if args.fault == "uneven-masks":  # also in evaluation: row r counts 1 + 7 r tokens
        for row in range(mask.shape[0]):
            mask[row, 1 + 7 * int(losses[row].detach().sum() * 1000) % 20 :] = 0
    elif here and args.fault == "nan-loss":
        losses = losses * float("nan")
    elif here and args.fault == "nan-grad":
        losses.register_hook(lambda grad: grad * float("nan"))
    elif here and args.fault == "no-tokens":
        mask.zero_()
    elif here and args.fault == "raise":
        raise ValueError("this rank has had enough")
    elif here and args.fault == "raise-in-backward":
        losses.register_hook(_raise)
    elif here and args.fault == "exit":
        os._exit(17)
    elif here and args.fault == "sleep":
        time.sleep(10_000)
    elif here and args.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return losses, loss_func


def _raise(grad):
    raise ValueError("this rank has had enough")


if __name__ == "__main__":
    training.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_flags,
    )
    tasks = Path("/proc/self/task")
    if tasks.exists():  # Linux
        left = sorted((task / "comm").read_text().strip() for task in tasks.iterdir())
        print(f"threads left: {' '.join(left)}\n", end="", file=sys.stderr, flush=True)
