"""A user's own script: its own loaders that end, and what is not a loss after an evaluation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import pretrain_gpt
from megatron_lite import training
from megatron_lite.enums import ModelType


def loader(batches, args):
    """`batches` micro-batches, and no more."""
    rows = torch.randint(
        0, 255, (args.micro_batch_size, args.seq_length + 1), generator=torch.Generator().manual_seed(1)
    )
    for _ in range(batches):
        yield {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "loss_mask": torch.ones(rows[:, 1:].shape),
            "position_ids": torch.arange(args.seq_length).repeat(len(rows), 1),
        }


def datasets(sizes):
    """Loaders, with --dataloader-type external; else the usual ones."""
    args = training.get_args()
    if args.dataloader_type != "external":
        return pretrain_gpt.train_valid_test_datasets_provider(sizes)
    return loader(args.train_batches, args), loader(args.valid_batches, args), None


def forward_step(data_iterator, model):
    """The loss function also gives the largest loss of each sample."""
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)

    def either(output, non_loss_data=False):
        return output.amax(dim=-1) if non_loss_data else loss_func(output)

    return losses, either


def tell(collected, iteration, writer):
    """Called after an evaluation."""
    worst = torch.cat(collected)
    writer.add_scalar("worst loss", float(worst.max()), iteration)
    assert training.get_tensorboard_writer() is writer
    print(f"collected {len(collected)} of shape {tuple(collected[0].shape)} at {iteration}", flush=True)


def add_flags(parser):
    """Flags of this script."""
    parser.add_argument("--train-batches", type=int, default=100)
    parser.add_argument("--valid-batches", type=int, default=100)
    return parser


if __name__ == "__main__":
    training.pretrain(
        datasets,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        process_non_loss_data_func=tell,
        extra_args_provider=add_flags,
    )
