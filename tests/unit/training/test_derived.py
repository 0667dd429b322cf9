"""Flags that belong to something switched off: accepted, because scripts keep them, and told."""

import pytest

from megatron_lite.config import flags_of
from megatron_lite.training.arguments import CONFIGS, parse_args, validate_args
from megatron_lite.training.derived import IDLE, destination_of

SHAPE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 7 --train-iters 9"
)
VALUE = {
    "--split": "9,1,0",
    "--rotary-percent": "0.5",
    "--rotary-base": "10",
    "--rotary-seq-len-interpolation-factor": "2",
    "--no-rope-freq": "2",
    "--num-query-groups": "1",
    "--lr-wsd-decay-style": "linear",
    "--lr-wsd-decay-iters": "2",
    "--exit-signal": "SIGINT",
    "--wandb-exp-name": "x",
    "--wandb-save-dir": "x",
    "--wandb-entity": "x",
    "--profile-step-start": "2",
    "--profile-step-end": "13",
    "--save-retain-interval": "3",
    "--validation-set-names": "x",
    "--mrope-section": "1 1 0",
    "--dist-ckpt-strictness": "log_all",
    "--qk-pos-emb-head-dim": "2",
    "--rope-type": "rope",
    "--muon-scale-mode": "unit_rms_norm",
    "--muon-fp32-matmul-prec": "high",
    "--muon-coefficient-type": "simple",
    "--muon-tp-mode": "blockwise",
    "--muon-scalar-optimizer": "lion",
    "--moe-router-topk": "2",
    "--moe-router-score-function": "sigmoid",
    "--moe-router-dtype": "fp32",
    "--moe-router-load-balancing-type": "none",
    "--moe-input-jitter-eps": "0.1",
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-token-drop-policy": "position",
}
_ROLLING = "--save x --save-interval 3 --non-persistent-ckpt-type TYPE --non-persistent-save-interval 1"
# How each row is switched on, and what it needs beside.
ON = {
    "--num-query-groups": "--group-query-attention",
    "--rotary-base": "--position-embedding-type rope",
    "--mrope-section": "--position-embedding-type mrope",
    "--mtp-loss-scaling-factor": "--mtp-num-layers 1",
    "--q-lora-rank": "--multi-latent-attention --position-embedding-type rope",
    "--rotary-scaling-factor": "--position-embedding-type yarn",
    "--rope-scaling-factor": "--position-embedding-type rope --use-rope-scaling",
    "--reset-position-ids": "--position-embedding-type learned_absolute",
    "--initial-loss-scale": "--fp16",
    "--adam-beta1": "--optimizer adam",
    "--sgd-momentum": "--optimizer sgd",
    "--lion-beta1": "--optimizer lion",
    "--muon-momentum": "--optimizer muon",
    "--optimizer-offload-fraction": (
        "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
    ),
    "--lr-wsd-decay-style": "--lr-decay-style WSD --lr-wsd-decay-iters 2",
    "--no-tp-comm-overlap-ag": "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
    "--split": "--data-path x",
    "--no-data-sharding": "--dataloader-type cyclic",
    "--ddp-bucket-size": "--overlap-grad-reduce",
    "--disable-symmetric-registration": "--use-nccl-ub",
    "--exit-signal": "--exit-signal-handler",
    "--exit-signal-handler-for-dataloader": "--num-workers 1",
    "--start-eval-at-iter": "--eval-interval 3",
    "--validation-set-names": "--multiple-validation-sets --full-validation",
    "--manual-gc-interval": "--manual-gc",
    "--save-interval": "--save x --save-interval 3",
    "--non-persistent-save-interval": "--save x --save-interval 3 --non-persistent-ckpt-type global",
    "--non-persistent-global-ckpt-dir": _ROLLING.replace("TYPE", "global"),
    "--non-persistent-local-ckpt-dir": _ROLLING.replace("TYPE", "local"),
    "--ckpt-convert-save": "--ckpt-convert-format torch_dist --load x",
    "--use-mp-args-from-checkpoint-args": "--use-checkpoint-args --load x",
    "--use-persistent-ckpt-worker": "--async-save --save x --save-interval 3",
    "--no-load-optim": "--load x",
    "--tensorboard-log-interval": "--tensorboard-dir x",
    "--wandb-exp-name": "--wandb-project x --wandb-exp-name x",
    "--profile-step-start": "--profile",
    "--moe-layer-freq": "--num-experts 4 --moe-router-score-function sigmoid --tensorboard-dir x",
    "--moe-aux-loss-coeff": "--num-experts 4",
    "--moe-router-bias-update-rate": (
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    "--moe-token-drop-policy": "--num-experts 4 --moe-expert-capacity-factor 1",
    "--moe-upcycling-granularity": "--num-experts 4 --moe-use-upcycling --load x --save y --save-interval 3",
    "--moe-routing-trace-max-training-iters": "--num-experts 4 --moe-routing-trace-path x",
    "--moe-per-layer-logging": "--num-experts 4 --tensorboard-dir x",
}
OFF = {
    "--adam-beta1": "--optimizer sgd",
    "--reset-position-ids": "--position-embedding-type rope",
    "--exit-signal-handler-for-dataloader": "--num-workers 0",
    "--non-persistent-save-interval": "--non-persistent-ckpt-type global",
}
FLAG = {
    spelling: flag for config in CONFIGS for flag in flags_of(config) for spelling in (*flag.spellings, *flag.negations)
}
EACH = [(row[0].split()[0], flag) for row in IDLE for flag in row[0].split()]


def told(capsys, flag, more):
    words = flag if FLAG[flag].is_switch else f"{flag} {VALUE.get(flag, '1')}"
    if flag == "--save-retain-interval":
        more += " --save-interval 3"
    if flag == "--lr-wsd-decay-samples":
        more = more.replace("--lr-wsd-decay-iters 2", "") + " --train-samples 9"
        words = words.replace("1", "2")
    if flag == "--load-main-params-from-ckpt":
        more += " --no-load-optim"
    shape = SHAPE.replace("--train-iters 9", "") if "--train-samples" in more else SHAPE
    shape = shape.replace("--mock-data", "") if "--data-path" in more else shape
    capsys.readouterr()
    world_size = 2 if "--tensor-model-parallel-size 2" in more else 1
    validate_args(parse_args(f"{shape} {more} {words}".split()), world_size)
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "no effect without" in line]
    return [line for line in lines if flag in line.split(": no effect without")[0].split()]


@pytest.mark.parametrize("row, flag", EACH, ids=[flag for _, flag in EACH])
def test_a_flag_of_something_switched_off_is_told(capsys, monkeypatch, row, flag):
    """--num-query-groups without --group-query-attention trained another model than its author thought. With the other
    flag nothing is said."""
    monkeypatch.setattr("megatron_lite.training.rules_given.find_spec", lambda name: name)  # wandb may not be installed
    assert destination_of(flag) == FLAG[flag].dest
    assert len(told(capsys, flag, OFF.get(row, ""))) == 1
    assert told(capsys, flag, ON[row]) == []
