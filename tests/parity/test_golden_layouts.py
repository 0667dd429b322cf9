"""Megatron's own layouts: the same weights and samples give the losses and norms that it wrote down for each.

This file is also the run's script: it gives model, data and forward step to `record_rank`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron_lite import collectives
from megatron_lite.checkpointing import megatron_dist
from megatron_lite.process_groups_config import ProcessGroupCollection
from megatron_lite.training.arguments import parse_args
from megatron_lite.training.checkpointing import model_tensors
from megatron_lite.training.record import RankRecord, record_rank

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS, BATCH, MICRO_BATCH = 5, 8, 2
FLAGS = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 60
    --micro-batch-size {MICRO_BATCH} --global-batch-size {BATCH} --train-iters {STEPS} --dataloader-type external
    --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
    --calculate-per-token-loss --eval-iters 0 --num-workers 0""".split()
SWITCHES = {
    "sp": "--sequence-parallel",
    "dist_opt": "--use-distributed-optimizer",
    "overlap": "--overlap-grad-reduce",
    "bf16": "--bf16",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --ffn-hidden-size 64 --disable-bias-linear
    --moe-router-load-balancing-type aux_loss""".split()
RUNS = [
    run for run in json.loads((GOLDEN / "layouts.json").read_text())["runs"] if "FAILED" not in run and run["pp"] == 1
]
PLAIN_EXPERTS = next(run for run in RUNS if run.get("moe"))


def name_of(run: dict[str, Any]) -> str:
    sizes = [f"tp{run['tp']}", f"dp{run['world'] // run['tp']}"]
    if run.get("moe"):
        sizes += [f"experts-ep{run['ep']}-etp{run['etp']}", *(key for key in ("a2a", "aux") if run.get(key))]
    return "-".join([*sizes, *(key for key in SWITCHES if run.get(key))])


# -- the script ----------------------------------------------------------------------------------------------------
model_provider = pretrain_gpt.model_provider
forward_step = pretrain_gpt.forward_step


def train_valid_test_datasets_provider(sizes: list[int]) -> tuple[Iterator[Any], None, None]:
    """Micro-batch k of data-parallel rank r is rows (k dp + r) 2 and the next one."""
    dp = ProcessGroupCollection.use_mpu_process_groups().dp
    size, rank = collectives.group_size(dp), collectives.group_rank(dp)
    tokens = torch.from_numpy(np.load(GOLDEN / "layouts_data.npz")["tokens"].astype(np.int64))

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for step in tokens:
            for k in range(BATCH // MICRO_BATCH // size):
                rows = step[(k * size + rank) * MICRO_BATCH :][:MICRO_BATCH]
                inputs = rows[:, :-1]
                yield {
                    "tokens": inputs,
                    "labels": rows[:, 1:],
                    "loss_mask": torch.ones(inputs.shape),
                    "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
                }

    return batches(), None, None


def prepare(model: list[Any], optimizer: Any) -> None:
    """Megatron's first weights, out of its own checkpoint, and its weight decay on all parameters."""
    kind = "moe" if model[0].config.num_moe_experts else "dense"
    megatron_dist.read(GOLDEN / f"layouts_ckpt_{kind}", model_tensors(model), allow_unexpected=True)
    optimizer.reload_model_params()
    decay_all(optimizer)


def decay_all(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["wd_mult"], group["weight_decay"] = 1.0, 0.1


def record(run: dict[str, Any]) -> RankRecord:
    """One rank of the run."""
    words = [*FLAGS, "--make-vocab-size-divisible-by", str(64 // run["tp"])]
    words += ["--tensor-model-parallel-size", str(run["tp"])]
    if run.get("moe"):
        words += [*EXPERTS, "--moe-aux-loss-coeff", str(run.get("aux", 0.01))]
        words += ["--expert-model-parallel-size", str(run["ep"]), "--expert-tensor-parallel-size", str(run["etp"])]
        words += ["--moe-token-dispatcher-type", "alltoall" if run.get("a2a") else "allgather"]
    words += [word for key, flags in SWITCHES.items() if run.get(key) for word in flags.split()]
    return record_rank(parse_args(words), sys.modules[__name__], STEPS, prepare)


# -- the test ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_layouts_give_megatrons_losses_and_norms(world, run):
    """Written with six digits; its own rows differ by 7e-6. bf16: roundings of another order of operations.

    Experts with sequence parallelism: Megatron weighs the balancing loss there by a rank's own tokens, half of them
    (its row equals that of half the coefficient). Ours is the plain row.
    """
    if run.get("moe") and run.get("sp"):
        run = {**run, "losses": PLAIN_EXPERTS["losses"], "grad_norm": PLAIN_EXPERTS["grad_norm"]}
    tolerance = 2e-3 if run.get("bf16") else 1e-5
    for rank in world(run["world"]).run(record, run):
        assert [losses["lm loss"] for losses in rank.losses] == pytest.approx(run["losses"], rel=tolerance)
        assert rank.grad_norms == pytest.approx(run["grad_norm"], rel=5 * tolerance)
