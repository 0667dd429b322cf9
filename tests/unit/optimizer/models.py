"""A small model with everything that parameter groups tell apart, for tests of DDP and optimizers."""

import torch
from torch import Tensor, nn

from megatron_lite.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_lite.model_parallel_config import ModelParallelConfig
from megatron_lite.optimizer import OptimizerConfig, get_megatron_optimizer


class SmallModel(nn.Module):
    """Embedding, two hidden layers with biases and norms, tied nothing. Sizes are odd on purpose."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.second = nn.Linear(11, 5)

    def forward(self, rows: Tensor) -> Tensor:
        """`[b, s]` -> `[b, 5]`."""
        x = self.embedding(rows).mean(1)
        return self.second(self.norm(torch.tanh(self.first(x))))

    def loss(self, rows: Tensor) -> Tensor:
        """Mean over the batch."""
        return self(rows).float().square().sum(1).mean()


def rows_of(step: int, samples: int) -> Tensor:
    """The global batch of a step, `[samples, 6]`."""
    return torch.randint(0, 13, (samples, 6), generator=torch.Generator().manual_seed(100 + step))


def wrap(model, dtype=torch.float32, ddp=None, optimizer=None, config=None, **keywords):
    """(DDP, its optimizer) with lr 0.01 and weight decay 0.1."""
    bf16, fp16 = dtype == torch.bfloat16, dtype == torch.float16
    wrapped = DistributedDataParallel(
        config or ModelParallelConfig(bf16=bf16, fp16=fp16),
        DistributedDataParallelConfig(**(ddp or {})),
        model.to(dtype),
        pg_collection=keywords.get("pg_collection"),
    )
    shared = {name: (ddp or {}).get(name, False) for name in ("use_distributed_optimizer", "overlap_param_gather")}
    settings = {"lr": 0.01, "weight_decay": 0.1, "bf16": bf16, "fp16": fp16, **shared, **(optimizer or {})}
    return wrapped, get_megatron_optimizer(OptimizerConfig(**settings), [wrapped], **keywords)


def train_step(ddp, optimizer, microbatches):
    """One step over a list of micro-batches, averaged. Returns what `optimizer.step` does."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    for i, rows in enumerate(microbatches):
        loss = optimizer.scale_loss(ddp.module.loss(rows) / len(microbatches))
        if i + 1 < len(microbatches):
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    ddp.finish_grad_sync()
    return optimizer.step()
