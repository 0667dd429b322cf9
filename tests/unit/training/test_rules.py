"""Rules across flags: a broken one is named with flags, values, reason and fix; what follows is filled in."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.training import derived, rules
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import defaults_of

BASE = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}


def parse(flags: str, without: str = "", family: str | None = None) -> Namespace:
    """The base with other flags, in the script of a family."""
    words = [word for name, value in BASE.items() if name not in without.split() for word in (name, value)]
    return parse_args([*words, *flags.split()], args_defaults=defaults_of(family) if family else None)


def resolve(flags: str = "", *, without: str = "", world_size: int = 1, family: str | None = None) -> Namespace:
    return validate_args(parse(flags, without, family), world_size)


# flags that are added, flags that are left out, and words of the message
BROKEN = [
    ("--fake-process-group --save x --load y", "", ["--save and --load with --fake-process-group"]),
    # full sharding
    ("--use-torch-fsdp2 --use-megatron-fsdp", "", ["--use-torch-fsdp2 and --use-megatron-fsdp"]),
    ("--use-torch-fsdp2 --use-distributed-optimizer", "", ["--use-distributed-optimizer with --use-torch-fsdp2"]),
    ("--use-megatron-fsdp --megatron-fsdp-version 2 --use-distributed-optimizer", "", ["--megatron-fsdp-version 2"]),
    ("--use-torch-fsdp2 --fp16", "", ["--use-torch-fsdp2 with --fp16"]),
    ("--ckpt-format torch_dcp", "", ["torch_dcp without --use-torch-fsdp2", "torch_dist"]),
    ("--use-torch-fsdp2 --ckpt-format torch_dcp --tensor-model-parallel-size 2", "", ["torch_dcp with tensor"]),
    ("--use-torch-fsdp2 --ckpt-format fsdp_dtensor", "", ["fsdp_dtensor without --use-megatron-fsdp"]),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim --init-model-with-meta-device",
        "",
        ["--init-model-with-meta-device with --data-parallel-sharding-strategy optim"],
    ),
    (
        "--use-megatron-fsdp --suggested-communication-unit-size -4",
        "",
        ["--suggested-communication-unit-size -4", "1 or more"],
    ),
    ("--use-megatron-fsdp --fsdp-manual-registration", "", ["--fsdp-manual-registration without --use-nccl-ub"]),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard --megatron-fsdp-grad-comm-dtype bf16",
        "",
        ["--megatron-fsdp-grad-comm-dtype bf16 with --data-parallel-sharding-strategy no_shard"],
    ),
    ("--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16", "", ["--megatron-fsdp-main-grads-dtype bf16"]),
    (
        "--use-megatron-fsdp --bf16 --megatron-fsdp-main-params-dtype auto",
        "",
        ["--megatron-fsdp-main-params-dtype auto with a model of 16 bits", "fp32"],
    ),
    ("--no-strict-fsdp-dtensor-load", "", ["--no-strict-fsdp-dtensor-load without"]),
    ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", "", ["full sharding with --pipeline-model-parallel-size 2"]),
    (
        "--use-torch-fsdp2 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2",
        "",
        ["full sharding with --expert-model-parallel-size 2"],
    ),
    (
        "--use-megatron-fsdp --check-weight-hash-across-dp-replicas-interval 2",
        "",
        ["full sharding with --check-weight-hash-across-dp-replicas-interval"],
    ),
    ("--use-megatron-fsdp --optimizer muon", "", ["full sharding with --optimizer muon"]),
    (
        "--use-megatron-fsdp --use-precision-aware-optimizer --bf16 --grad-reduce-in-bf16 --main-grads-dtype bf16",
        "",
        ["full sharding with --main-grads-dtype bf16"],
    ),
    (
        "--use-megatron-fsdp --use-precision-aware-optimizer --optimizer-cpu-offload",
        "",
        ["full sharding with --optimizer-cpu-offload"],
    ),
    (
        "--use-megatron-fsdp --moe-use-upcycling --num-experts 4",
        "",
        ["full sharding with --moe-use-upcycling"],
    ),
    # faulty results
    ("--check-for-spiky-loss --spiky-loss-factor 1", "", ["--spiky-loss-factor 1.0"]),
    ("--spiky-loss-factor 2", "", ["--spiky-loss-factor without --check-for-spiky-loss"]),
    ("--spiky-loss-window 5", "", ["--spiky-loss-window without --check-for-spiky-loss"]),
    ("--on-bad-loss rollback", "", ["--on-bad-loss rollback without --save"]),
    ("--on-bad-loss rollback --save x --save-interval 1 --no-save-rng", "", ["--no-save-rng", "gone back to"]),
    (
        "--on-bad-loss rollback --save x --save-interval 1 --dataloader-type external",
        "",
        ["--on-bad-loss rollback with --dataloader-type external"],
    ),
    ("--bad-loss-window 2", "", ["--bad-loss-window 2 with --on-bad-loss stop", "--on-bad-loss rollback"]),
    ("--error-injection-rate 5 --rerun-mode disabled", "", ["--error-injection-rate 5", "--rerun-mode disabled"]),
    ("--error-injection-rate -1", "", ["--error-injection-rate -1"]),
    ("--bad-loss-limit -1", "", ["--bad-loss-limit -1"]),
    # batch
    ("", "--micro-batch-size", ["--micro-batch-size is missing"]),
    ("--micro-batch-size 0", "", ["--micro-batch-size 0"]),
    ("--global-batch-size 0", "", ["--global-batch-size 0"]),
    ("--global-batch-size 9", "", ["--global-batch-size 9", "--micro-batch-size 2", "--global-batch-size 10"]),
    ("--global-batch-size 1 --decrease-batch-size-if-needed", "", ["nothing is left"]),
    ("--rampup-batch-size 2 4 100", "", ["--rampup-batch-size 2 4 100", "8"]),
    ("--rampup-batch-size 3 5 100", "", ["batch size 3", "--micro-batch-size 2"]),
    ("--rampup-batch-size 8 2 100", "", ["--rampup-batch-size 8 2 100"]),
    ("--rampup-batch-size 2 2 0", "", ["--rampup-batch-size 2 2 0"]),
    ("--step-batch-size-schedule 0:4,1K:6", "", ["--global-batch-size 8", "6"]),
    ("--step-batch-size-schedule 1K:4,2K:8", "", ["0", "1K:4"]),
    ("--step-batch-size-schedule 0:4,x:8", "", ["x:8"]),
    ("--step-batch-size-schedule 0:3,1K:8", "", ["batch size 3"]),
    ("--step-batch-size-schedule 0:8 --decrease-batch-size-if-needed", "", ["--decrease-batch-size-if-needed"]),
    ("--step-batch-size-schedule 0:8 --rampup-batch-size 2 2 10", "", ["--rampup-batch-size and --step"]),
    # factors and experts
    ("--mup-base-hidden-size 8", "", ["--mup-base-hidden-size 8 without --use-mup"]),
    ("--use-mup --mup-output-mult -1", "", ["--mup-output-mult -1.0"]),
    (
        "--overlap-moe-expert-parallel-comm",
        "",
        ["--overlap-moe-expert-parallel-comm with --expert-model-parallel-size"],
    ),
    ("--moe-router-padding-for-quantization", "", ["--moe-token-dispatcher-type allgather"]),
    # fp8
    ("--fp8-format hybrid --fp8-recipe custom", "", ["--fp8-recipe custom"]),
    ("--fp8-format hybrid --first-last-layers-bf16", "", ["--first-last-layers-bf16 with --fp8-recipe delayed"]),
    ("--fp8-param-gather --use-distributed-optimizer", "", ["--fp8-param-gather without --fp8-format"]),
    ("--fp8-param-gather --fp8-format hybrid", "", ["--fp8-param-gather without --use-distributed-optimizer"]),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "", ["without --fp8-param-gather and --fp8-recipe mxfp8"]),
    # length and schedule
    ("", "--train-iters", ["neither --train-iters nor --train-samples"]),
    ("--train-samples 10", "", ["--train-iters 10 and --train-samples 10"]),
    ("--lr-decay-samples 10", "", ["--lr-decay-samples 10", "--train-iters 10"]),
    ("--lr-warmup-samples 10", "", ["--lr-warmup-samples 10"]),
    ("--train-samples 80 --lr-decay-iters 5", "--train-iters", ["--lr-decay-iters 5"]),
    ("--train-samples 80 --lr-warmup-iters 5", "--train-iters", ["--lr-warmup-iters 5"]),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 2", "", ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 2"]),
    ("--lr-warmup-iters 10", "", ["a warm-up of 10 in a schedule of 10"]),
    ("--lr-warmup-fraction 1", "", ["a warm-up of 10.0"]),
    ("--min-lr 1", "", ["--min-lr 1.0 with --lr 0.001"]),
    ("--min-lr -1", "", ["--min-lr -1.0"]),
    ("--lr-warmup-init 1", "", ["--lr-warmup-init 1.0"]),
    ("", "--lr", ["--lr is missing"]),
    ("--decoupled-min-lr 1", "", ["--decoupled-min-lr 1.0 without --decoupled-lr"]),
    ("--lr-decay-style WSD", "", ["--lr-wsd-decay-iters N"]),
    ("--start-weight-decay 0.1", "", ["--start-weight-decay 0.1", "constant"]),
    ("--weight-decay-incr-style cosine", "", ["--weight-decay-incr-style cosine", "None"]),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        "",
        ["--start-weight-decay 0.2 --end-weight-decay 0.1"],
    ),
    (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "",
        ["--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler"],
    ),
    # shape
    ("", "--num-layers", ["--num-layers is missing"]),
    ("", "--hidden-size", ["--hidden-size is missing"]),
    ("", "--num-attention-heads", ["--num-attention-heads is missing"]),
    ("", "--max-position-embeddings", ["--max-position-embeddings is missing"]),
    ("", "--seq-length", ["--seq-length is missing"]),
    ("--encoder-num-layers 2", "", ["--num-layers 2 and --encoder-num-layers 2"]),
    ("--encoder-seq-length 32", "", ["--seq-length 32 and --encoder-seq-length 32"]),
    ("--hidden-size 63", "", ["--hidden-size 63 with --num-attention-heads 4", "--kv-channels"]),
    ("--group-query-attention --num-query-groups 3", "", ["--num-query-groups 3"]),
    ("--seq-length 64", "", ["--seq-length 64 with --max-position-embeddings 32", "--max-position-embeddings 64"]),
    ("--swiglu --squared-relu", "", ["--swiglu, --squared-relu"]),
    ("--no-position-embedding", "", ["--no-position-embedding with --position-embedding-type learned_absolute"]),
    ("--no-rope-freq 3", "", ["--no-rope-freq 3 with --num-layers 2"]),
    ("--no-rope-freq [0,1,1]", "", ["--no-rope-freq has 3 entries"]),
    ("--window-size 4,0 --window-attn-skip-freq [1]", "", ["--window-attn-skip-freq has 1 entries"]),
    ("--window-attn-skip-freq 2", "", ["--window-size"]),
    ("--use-rope-scaling", "", ["--use-rope-scaling with --position-embedding-type learned_absolute"]),
    ("--rotary-percent 1.5", "", ["--rotary-percent 1.5"]),
    ("--hidden-dropout 1", "", ["--hidden-dropout 1.0"]),
    ("--seed 0", "", ["--seed 0"]),
    # shares of the tensor-parallel ranks
    ("--tensor-model-parallel-size 3", "", ["--num-attention-heads 4 with", "--num-attention-heads 3 or 6"]),
    (
        "--tensor-model-parallel-size 3 --kv-channels 16",
        "",
        ["--ffn-hidden-size 256 with --tensor-model-parallel-size 3"],
    ),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6 --num-attention-heads 12 "
        "--kv-channels 8",
        "",
        ["--num-query-groups 6 with --tensor-model-parallel-size 4"],
    ),
    ("--tensor-model-parallel-size 3 --sequence-parallel", "", ["--seq-length 32 with --seq", "--seq-length 30 or 33"]),
    ("--context-parallel-size 3", "", ["--seq-length 32 with --context-parallel-size 3", "--seq-length 30 or 36"]),
    (
        "--context-parallel-size 2 --tensor-model-parallel-size 3 --sequence-parallel",
        "",
        ["--seq-length 32 with --context-parallel-size 2, --sequence-parallel and --tensor", "--seq-length 24 or 36"],
    ),
    ("--tp-comm-overlap --tensor-model-parallel-size 2", "", ["--tp-comm-overlap without --sequence-parallel"]),
    ("--distribute-saved-activations", "", ["--distribute-saved-activations without --recompute-granularity full"]),
    # numbers
    ("--fp16 --bf16", "", ["--fp16 and --bf16"]),
    ("--fp16-lm-cross-entropy", "", ["--fp16-lm-cross-entropy without --fp16"]),
    ("--fp32-residual-connection", "", ["--fp32-residual-connection"]),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "", ["--grad-reduce-in-bf16"]),
    ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "", ["--cross-entropy-fusion-impl native"]),
    ("--ddp-bucket-size 5 --ddp-num-buckets 5", "", ["--ddp-bucket-size 5 and --ddp-num-buckets 5"]),
    ("--ddp-num-buckets 0", "", ["--ddp-num-buckets 0"]),
    ("--ddp-average-in-collective --calculate-per-token-loss", "", ["--ddp-average-in-collective"]),
    ("--ddp-pad-buckets-for-high-nccl-busbw", "", ["--ddp-pad-buckets-for-high-nccl-busbw without --use-dist"]),
    (
        "--fp16 --ddp-reduce-scatter-with-fp32-accumulation",
        "",
        ["--ddp-reduce-scatter-with-fp32-accumulation without --use-distributed-optimizer"],
    ),
    (
        "--fp16 --use-distributed-optimizer --ddp-average-in-collective --ddp-reduce-scatter-with-fp32-accumulation",
        "",
        ["with several optimizer instances or --ddp-average-in-collective"],
    ),
    (
        "--bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all",
        "",
        ["with gradients that are fp32", "--bf16 --grad-reduce-in-bf16"],
    ),
    # experts
    ("--num-experts -1", "", ["--num-experts -1"]),
    ("--expert-model-parallel-size 2", "", ["--expert-model-parallel-size 2 without --num-experts"]),
    ("--moe-ffn-hidden-size 8", "", ["--moe-ffn-hidden-size 8 without --num-experts"]),
    ("--num-experts 3 --expert-model-parallel-size 2", "", ["--num-experts 4, or a size that divides it"]),
    ("--num-experts 4 --moe-layer-freq [1,0,1]", "", ["--moe-layer-freq is a list of 3 with --num-layers 2"]),
    ("--num-experts 4 --moe-layer-freq 0", "", ["--moe-layer-freq 0"]),
    ("--num-experts 4 --moe-router-topk 5", "", ["--moe-router-topk 5 with --num-experts 4"]),
    ("--num-experts 4 --moe-router-topk 1", "", ["--moe-router-pre-softmax"]),
    ("--num-experts 4 --moe-router-enable-expert-bias", "", ["--moe-router-score-function sigmoid"]),
    ("--num-experts 4 --moe-router-group-topk 1", "", ["--moe-router-num-groups None with --moe-router-group-topk 1"]),
    (
        "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
        "",
        ["--moe-router-num-groups 3 --moe-router-group-topk 1 with --num-experts 4"],
    ),
    (
        "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3",
        "",
        ["--moe-router-topk N, 1 <= N <= 2"],
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
        "",
        ["2 kinds of balancing with 1 --moe-aux-loss-coeff"],
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0 0",
        "",
        ["the other kinds stand alone"],
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "",
        ["the assignment itself is even"],
    ),
    ("--num-experts 4 --moe-router-load-balancing-type quantile_balancing", "", ["an experiment"]),
    ("--num-experts 4 --moe-aux-loss-coeff -1", "", ["--moe-aux-loss-coeff -1.0"]),
    ("--num-experts 4 --moe-pad-expert-input-to-capacity", "", ["without --moe-expert-capacity-factor"]),
    ("--num-experts 4 --moe-expert-capacity-factor 0", "", ["--moe-expert-capacity-factor 0.0"]),
    (
        "--num-experts 4 --moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
        "",
        ["the assignment is balanced already"],
    ),
    ("--num-experts 4 --moe-input-jitter-eps 1", "", ["--moe-input-jitter-eps 1.0"]),
    (
        "--num-experts 4 --moe-token-dispatcher-type flex",
        "",
        ["--moe-token-dispatcher-type alltoall: the same numbers"],
    ),
    ("--num-experts 4 --moe-apply-probs-on-input", "", ["--moe-apply-probs-on-input with --moe-router-topk 2"]),
    ("--num-experts 4 --moe-shared-expert-gate", "", ["without --moe-shared-expert-intermediate-size"]),
    (
        "--num-experts 4 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap",
        "",
        ["--moe-shared-expert-overlap with --moe-token-dispatcher-type allgather"],
    ),
    (
        "--num-experts 4 --tensor-model-parallel-size 2 --disable-bias-linear",
        "",
        ["--num-experts 4 with --tensor-model-parallel-size 2 without --sequence-parallel"],
    ),
    (
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
        "",
        ["biases in experts with --expert-tensor-parallel-size 2"],
    ),
    ("--moe-use-upcycling", "", ["--moe-use-upcycling without --num-experts, --load and --save"]),
    (
        "--moe-use-upcycling --num-experts 4 --load x --save y --save-interval 1 --moe-upcycling-granularity 3",
        "",
        ["--moe-upcycling-granularity 3 with --num-experts 4"],
    ),
    ("--save-tokens-per-expert-interval 5", "", ["--save-tokens-per-expert-interval 5 without"]),
    ("--moe-routing-trace-path x", "", ["--moe-routing-trace-path x without --num-experts"]),
    # recompute
    ("--recompute-granularity full", "", ["--recompute-method uniform --recompute-num-layers 1"]),
    ("--recompute-granularity selective --recompute-method block", "", ["--recompute-method block"]),
    ("--recompute-num-layers 2", "", ["--recompute-num-layers 2"]),
    ("--recompute-modules mlp", "", ["--recompute-granularity selective"]),
    (
        "--recompute-activations --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "",
        ["--recompute-activations with"],
    ),
    # data and tokenizer
    ("--mock-data --data-path x", "", ["--mock-data and --data-path"]),
    ("--num-dataset-builder-threads 0", "", ["--num-dataset-builder-threads 0"]),
    ("--mid-level-dataset-surplus -0.1", "", ["--mid-level-dataset-surplus -0.1"]),
    # evaluation and phases
    ("--eval-global-batch-size 6 --eval-micro-batch-size 4", "", ["--eval-global-batch-size 6", "divides the batch"]),
    ("--eval-micro-batch-size 3", "", ["--eval-global-batch-size 8 with --eval-micro-batch-size 3"]),
    ("--start-eval-at-iter -1", "", ["--start-eval-at-iter -1"]),
    ("--multiple-validation-sets", "", ["without --full-validation"]),
    ("--full-validation --dataloader-type external", "", ["--full-validation with --dataloader-type external"]),
    ("--phase-transition-iterations 5,x", "", ["--phase-transition-iterations 5,x in a run of 10"]),
    ("--phase-transition-iterations 5,5", "", ["--phase-transition-iterations 5,5"]),
    ("--phase-transition-iterations 10", "", ["--phase-transition-iterations 10 in a run of 10"]),
    ("--train-data-path x --data-path x", "", ["--data-path and --train-data-path"]),
    ("--data-args-path x --data-path x", "", ["--data-path and --data-args-path"]),
    ("--data-path x --split 1,2,3,4", "", ["--split 1,2,3,4", "one to three plain numbers"]),
    ("--data-path x --split 0,0,0", "", ["--split 0,0,0", "add up to 0"]),
    ("--data-path x --split=-1,2", "", ["plain numbers"]),
    ("--data-path x --split 1e-3,1", "", ["plain numbers"]),
    ("--data-path x --split 1..2,1", "", ["plain numbers"]),
    (
        "--reset-attention-mask --no-create-attention-mask-in-dataloader",
        "",
        ["--reset-attention-mask with --no-create", "attention would cross documents"],
    ),
    (
        "--dataloader-inter-document-masking --reset-attention-mask",
        "",
        ["--dataloader-inter-document-masking and --reset-attention-mask"],
    ),
    ("--dataloader-inter-document-masking --fim-data", "", ["--dataloader-inter-document-masking and --fim-data"]),
    ("--dataloader-fast-cache-load", "", ["--dataloader-fast-cache-load without --data-cache-path"]),
    ("--dataloader-defer-npy-index-mmap", "", ["--dataloader-defer-npy-index-mmap without --data-cache-path"]),
    ("--mock-data --per-dataset-sequences-path x", "", ["--per-dataset-sequences-path x with --mock-data"]),
    ("--mock-data --fim-data", "", ["--fim-data and --mock-data"]),
    ("--sft", "", ["--sft with --tokenizer-type NullTokenizer"]),
    *(
        (f"--sft {flag}", "", [f"--sft and {flag}"])
        for flag in ("--mock-data", "--fim-data", "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
    ),
    ("--fim-rate 0.3 --fim-no-prefix x", "", ["--fim-rate and --fim-no-prefix without --fim-data"]),
    ("--fim-data --fim-rate 1.5", "", ["--fim-rate 1.5"]),
    ("--fim-data --fim-spm-rate -1", "", ["--fim-spm-rate -1"]),
    ("--fim-data --fim-fragment-rate 2", "", ["--fim-fragment-rate 2"]),
    ("--fim-data --fim-split-sample x", "", ["--fim-split-sample x without --fim-fragment-rate"]),
    ("--tokenizer-type SentencePieceTokenizer", "", ["without --tokenizer-model"]),
    ("", "--vocab-size", ["--tokenizer-type NullTokenizer without --vocab-size"]),
    ("--tokenizer-type GPT2BPETokenizer", "", ["GPT2BPETokenizer without --vocab-file and --merge-file"]),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file x", "", ["GPT2BPETokenizer without --merge-file"]),
    ("--tokenizer-type BertWordPieceLowerCase", "", ["BertWordPieceLowerCase without --vocab-file"]),
    ("--tokenizer-type TikTokenizer --vocab-file x", "", ["TikTokenizer without --tokenizer-model"]),
    ("--tokenizer-type MultimodalTokenizer", "", ["MultimodalTokenizer is not supported", "text alone"]),
    # optimizer
    ("--overlap-param-gather", "", ["--overlap-param-gather without --use-distributed-optimizer"]),
    ("--overlap-param-gather-with-optimizer-step", "", ["with-optimizer-step without --overlap-param-gather"]),
    ("--num-distributed-optimizer-instances 0", "", ["--num-distributed-optimizer-instances 0"]),
    (
        "--num-distributed-optimizer-instances 2",
        "",
        ["instances 2 without --use-distributed-optimizer", "instances 2 on 1 data-parallel ranks"],
    ),
    ("--use-precision-aware-optimizer", "", ["--use-precision-aware-optimizer without --use-distributed-optimizer"]),
    ("--exp-avg-dtype bf16", "", ["--exp-avg-dtype bf16 without --use-precision-aware-optimizer"]),
    (
        "--exp-avg-dtype fp8 --main-params-dtype fp16 --use-precision-aware-optimizer --use-distributed-optimizer",
        "",
        ["--main-params-dtype fp16 --exp-avg-dtype fp8", "leave the range"],
    ),
    (
        "--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer --use-distributed-optimizer",
        "",
        ["--main-grads-dtype bf16 with gradients that are accumulated in fp32", "--grad-reduce-in-bf16"],
    ),
    ("--optimizer-cpu-offload", "", ["--optimizer-cpu-offload without --use-precision-aware-optimizer"]),
    ("--optimizer-offload-fraction 1.5", "", ["--optimizer-offload-fraction 1.5"]),
    # checkpoints, logging, exit
    ("--save x", "", ["--save x with --save-interval None"]),
    ("--save x --save-interval 0", "", ["--save-interval 0"]),
    ("--save x --save-interval 4 --save-retain-interval 6", "", ["--save-retain-interval 6 with --save-interval 4"]),
    ("--save x --save-interval 1 --save-keep-last 0", "", ["--save-keep-last 0"]),
    ("--save x --save-interval 1 --dist-ckpt-workers 0", "", ["--dist-ckpt-workers 0"]),
    ("--async-ckpt-cpu-priority -1", "", ["--async-ckpt-cpu-priority -1"]),
    ("--async-ckpt-io-priority 4", "", ["--async-ckpt-io-priority 4"]),
    ("--save x --save-interval 1 --non-persistent-save-interval 0", "", ["--non-persistent-save-interval 0"]),
    ("--override-ckpt-iteration -1 --load x", "", ["--override-ckpt-iteration -1"]),
    (
        "--save x --save-interval 4 --non-persistent-save-interval 2",
        "",
        ["--non-persistent-save-interval 2 without --non-persistent-ckpt-type"],
    ),
    ("--non-persistent-ckpt-type in_memory", "", ["--non-persistent-ckpt-type in_memory"]),
    ("--non-persistent-ckpt-type local", "", ["without --non-persistent-local-ckpt-dir"]),
    ("--ckpt-convert-format torch_dist --load x", "", ["--ckpt-convert-format torch_dist without --load and"]),
    ("--override-ckpt-iteration 3 --finetune --load x", "", ["--override-ckpt-iteration 3 with --finetune"]),
    (
        "--override-ckpt-iteration 3 --load x --rampup-batch-size 2 2 20",
        "",
        ["--override-ckpt-iteration 3 with a batch size that changes"],
    ),
    ("--load-main-params-from-ckpt --load x", "", ["--load-main-params-from-ckpt without --no-load-optim"]),
    ("--dist-ckpt-strictness return_all", "", ["--dist-ckpt-strictness return_all"]),
    ("--use-checkpoint-args", "", ["--use-checkpoint-args without --load"]),
    ("--no-initialization", "", ["--no-initialization without --load"]),
    ("--ckpt-step 3", "", ["--ckpt-step 3 without --load"]),
    ("--exit-on-missing-checkpoint", "", ["--exit-on-missing-checkpoint without --load"]),
    ("--eval-iters -1", "", ["--eval-iters -1"]),
    ("--eval-interval 0", "", ["--eval-interval 0"]),
    ("--log-interval 0", "", ["--log-interval 0"]),
    ("--log-straggler --straggler-minmax-count 0", "", ["--straggler-minmax-count 0"]),
    ("--log-straggler --straggler-ctrlr-port 65536", "", ["--straggler-ctrlr-port 65536", "up to 65535"]),
    ("--flight-recorder-trace-buffer-size 0", "", ["--flight-recorder-trace-buffer-size 0"]),
    ("--wandb-project x", "", ["--wandb-exp-name"]),
    ("--save-wgrads-interval 5", "", ["--save-wgrads-interval 5 without --save", "--save FOLDER"]),
    ("--profile --profile-step-start 5 --profile-step-end 5", "", ["--profile-step-end 5"]),
    ("--profile --profile-step-start 11", "", ["--profile-step-start 11 with --train-iters 10"]),
    ("--profile --profile-ranks 0 1", "", ["--profile-ranks", "in a world of 1"]),
    ("--exit-signal SIGKILL --exit-signal-handler", "", ["--exit-signal 9 with --exit-signal-handler", "SIGTERM"]),
]


# family, flags that its script does not take together, and words of the message
BROKEN_OF_FAMILIES = [
    ("bert", "--position-embedding-type none", ["--position-embedding-type none with BERT"]),
    ("bert", "--output-bert-embeddings", ["megatron-lite generate"]),
    ("bert", "--mask-prob 1", ["--mask-prob 1.0"]),
    ("bert", "--short-seq-prob -.1", ["--short-seq-prob -0.1"]),
]


@pytest.mark.parametrize(("family", "flags", "found"), BROKEN_OF_FAMILIES)
def test_a_broken_rule_of_a_family_is_told_too(family: str, flags: str, found: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(flags, family=family, world_size=2)
    assert all(word in str(error.value) for word in found), str(error.value)


@pytest.mark.parametrize(("flags", "without", "found"), BROKEN, ids=[flags or without for flags, without, _ in BROKEN])
def test_a_broken_rule_is_told_with_flags_values_and_fix(flags: str, without: str, found: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(flags, without=without)
    text = str(error.value)
    assert all(word in text for word in found), text
    assert "why: " in text and "fix: " in text


def test_the_base_of_these_cases_breaks_nothing() -> None:
    assert resolve().global_batch_size == 8


def test_all_broken_rules_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^4 problems with the flags") as error:
        resolve("--hidden-size 63 --train-samples 3 --save x --fp16 --bf16")
    for number, words in enumerate(("--train-iters", "--fp16", "--save", "--hidden-size"), start=1):
        assert any(line.startswith(f"{number:3d}. ") and words in line for line in str(error.value).splitlines())


def test_every_rule_of_the_tables_is_broken_by_some_case_here() -> None:
    """A rule that nothing can break, or that nobody tried, may be wrong in silence."""
    told: set[str] = set()
    cases = [parse(flags, without) for flags, without, _ in [*BROKEN, *MORE]]
    for args in cases + [parse(flags, "", family) for family, flags, _ in BROKEN_OF_FAMILIES]:
        for table in (rules.GIVEN, rules.DERIVED):
            told |= {rule.what for rule in table if rule.error(args)}
            derived.derive(args)
    positive = {f"--{name} {{{name.replace('-', '_')}}}" for name in POSITIVE.split()}
    all_rules = {rule.what for table in (rules.GIVEN, rules.DERIVED) for rule in table}
    assert {what for what in all_rules - told - positive if not what.startswith("world size")} == set()


# Plain lower bounds: the ones below are tried together in `test_counts_have_a_lower_bound`.
POSITIVE = (
    "num-layers hidden-size num-attention-heads ffn-hidden-size kv-channels num-query-groups max-position-embeddings "
    "seq-length make-vocab-size-divisible-by tensorboard-log-interval exit-interval exit-duration-in-mins "
    "eval-global-batch-size eval-micro-batch-size "
    "train-samples rotary-seq-len-interpolation-factor ckpt-step distributed-timeout-minutes ddp-bucket-size "
    "distributed-timeout-seconds-after-init num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
    "microbatch-group-size-per-virtual-pipeline-stage check-weight-hash-across-dp-replicas-interval "
    "train-sync-interval log-memory-interval save-params-interval save-activations-interval save-wgrads-interval "
    "save-dgrads-interval "
    "spiky-loss-window bad-loss-window "
    "pipeline-model-parallel-size context-parallel-size expert-model-parallel-size tensor-model-parallel-size"
)
MORE: list[tuple[str, str, list[str]]] = [
    ("--optimizer muon --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2", "", []),
    ("--train-iters -1 --num-workers -1 --manual-gc-interval -1 --vocab-extra-ids -1", "", []),
    ("--lr -1 --lr-warmup-init -1 --lr-warmup-iters -1 --lr-warmup-samples -1", "", []),
    ("--use-checkpoint-opt_param-scheduler --no-load-optim --attention-dropout -1", "", []),
    ("--decoupled-lr 0.1 --decoupled-min-lr 0.2", "", []),
    ("--kv-channels 0 --micro-batch-size 0", "", []),
    ("--num-layers 6 --pipeline-model-parallel-size 4", "", []),
    ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1", "", []),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6", "", []),
    ("--overlap-p2p-communication-warmup-flush", "", []),
    ("--delay-wgrad-compute", "", []),
    ("--defer-embedding-wgrad-compute --delay-wgrad-compute", "", []),
    ("--no-align-grad-reduce --overlap-grad-reduce --defer-embedding-wgrad-compute", "", []),
    ("--wgrad-deferral-limit -1 --pipeline-model-parallel-comm-backend ucc", "", []),
]


def test_counts_have_a_lower_bound() -> None:
    names = [name for name in POSITIVE.split() if "parallel" not in name]
    args = parse_args([word for name in names for word in (f"--{name}", "0")])
    told = {str(error.what) for error in rules.broken(rules.GIVEN, args)}
    assert {f"--{name} 0" for name in names} <= told


def test_C143_a_world_that_is_no_number_of_model_copies_is_refused() -> None:
    """The message names the product that does not fit."""
    args = parse_args([])
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.world_size = 2, 2, 6
    derived.derive(args)
    errors = [str(error) for error in rules.broken(rules.DERIVED, args)]
    words = "world size 6", "--tensor-model-parallel-size 2", "4 ranks", "start 4 or 8 processes"
    assert any(all(word in text for word in words) for text in errors)


PIPELINE = [
    ("--num-layers 6 --pipeline-model-parallel-size 4", ["6 over 4 stages", "no layer may be left out", "4 or 8"]),
    ("--num-layers 20 --decoder-last-pipeline-num-layers 1", ["with one pipeline stage"]),
    (
        "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 4 "
        "--num-virtual-stages-per-pipeline-rank 2",
        ["2 micro-batches", "--global-batch-size 4", "--micro-batch-size 2", "2 modulo 4", "or no virtual stages"],
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
        ["--num-layers-per-virtual-pipeline-stage 3 with 2 layers on each of 4 stages"],
    ),
    (
        "--num-layers 6 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|tt|tL",
        ["it has 3 chunks, and 4 stages take 4"],
    ),
]


@pytest.mark.parametrize(("flags", "found"), PIPELINE, ids=[flags for flags, _ in PIPELINE])
def test_C086_C087_C091_layers_and_microbatches_that_do_not_fall_into_stages(flags: str, found: list[str]) -> None:
    """C086, C087, C091: never a smaller model, and the formula with the user's numbers."""
    with pytest.raises(ConfigError) as error:
        resolve(flags, world_size=4 if "parallel-size" in flags else 1)
    assert all(word in str(error.value) for word in found), error.value


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-virtual-stages-per-pipeline-rank 1", None),
        ("--pipeline-model-parallel-layout Et*2|tt|tt|ttL", 2),
        ("--virtual-pipeline-model-parallel-size 2", 2),
    ],
)
def test_three_ways_to_say_how_many_virtual_stages(flags: str, chunks: int | None) -> None:
    """One virtual stage is none: nothing is interleaved, overlapped or aligned."""
    args = resolve(f"--num-layers 8 --pipeline-model-parallel-size 2 {flags}", world_size=2)
    assert args.virtual_pipeline_model_parallel_size == chunks
    assert args.overlap_p2p_comm == args.align_param_gather == (chunks is not None)


def test_C050_a_schedule_that_would_not_be_read_is_refused() -> None:
    for flags in ("--no-load-optim", "--finetune"):
        with pytest.raises(ConfigError, match="--use-checkpoint-opt_param-scheduler"):
            resolve(f"--use-checkpoint-opt_param-scheduler --load x {flags}")


# ----------------------------------------------------------------------------------------------------------- derived
@pytest.mark.parametrize(
    ("flags", "without", "world_size", "expected"),
    [
        ("", "", 1, {"data_parallel_size": 1, "ffn_hidden_size": 256, "kv_channels": 16, "encoder_num_layers": 2}),
        ("", "", 4, {"data_parallel_size": 4}),
        ("", "--global-batch-size", 4, {"global_batch_size": 8}),
        (
            "--encoder-num-layers 3 --encoder-seq-length 16",
            "--num-layers --seq-length",
            1,
            {"num_layers": 3, "seq_length": 16},
        ),
        ("--swiglu", "", 1, {"ffn_hidden_size": 128}),  # int(4 * 64 * 2/3 / 64) * 64
        ("--hidden-size 4096 --swiglu", "", 1, {"ffn_hidden_size": 10880}),
        ("--kv-channels 24", "", 1, {"kv_channels": 24}),
        ("--train-samples 83", "--train-iters", 1, {"train_iters": 10}),
        # 2, 4, 6 over 60 samples, 20 each; then full steps: 10 + 5 + 4 steps see 20 + 20 + 24; 136 left: 17 steps
        ("--train-samples 200 --rampup-batch-size 2 2 60", "--train-iters", 1, {"train_iters": 36}),
        # thresholds in tokens: 64 tokens are 2 samples of 32; one step of 2, then (82 - 2) / 8
        ("--train-samples 82 --step-batch-size-schedule 0:2,64:8", "--train-iters", 1, {"train_iters": 11}),
        ("--step-batch-size-schedule 0:2,64:8", "--global-batch-size", 1, {"global_batch_size": 8}),
        ("--weight-decay 0.3", "", 1, {"start_weight_decay": 0.3, "end_weight_decay": 0.3}),
        ("--recompute-activations", "", 1, {"recompute_granularity": "selective"}),
        ("--apply-query-key-layer-scaling", "", 1, {"attention_softmax_in_fp32": True}),
        ("--disable-bias-linear", "", 1, {"bias_gelu_fusion": False, "add_qkv_bias": False}),
        ("", "", 1, {"add_qkv_bias": True, "apply_rope_fusion": False}),
        ("--position-embedding-type rope", "", 1, {"apply_rope_fusion": True}),
        ("--data-path x", "", 1, {"split": "969, 30, 1"}),
        ("--data-path x --split 80/10/10", "", 1, {"split": "80/10/10"}),
        ("", "", 1, {"dataloader_type": "single"}),
        ("--bf16", "", 1, {"accumulate_allreduce_grads_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", "", 1, {"accumulate_allreduce_grads_in_fp32": False}),
        ("--fp16", "", 1, {"check_for_nan_in_loss_and_grad": False}),
        ("--fp16 --loss-scale 128", "", 1, {"check_for_nan_in_loss_and_grad": True}),
        ("--skip-train", "--lr --train-iters", 1, {"no_load_optim": True, "train_iters": 0}),
        ("--rampup-batch-size 2 2 60", "", 1, {"train_iters": 10}),
    ],
)
def test_what_follows_from_flags_is_filled_in(
    flags: str, without: str, world_size: int, expected: dict[str, object]
) -> None:
    args = resolve(flags, without=without, world_size=world_size)
    assert {name: getattr(args, name) for name in expected} == expected


def test_steps_that_are_no_multiple_may_be_rounded_down() -> None:
    assert resolve("--global-batch-size 9 --decrease-batch-size-if-needed").global_batch_size == 9


def test_C053_the_ramp_of_the_report_is_accepted() -> None:
    flags = "--rampup-batch-size 16 8 300000 --global-batch-size 1024 --micro-batch-size 8"
    assert resolve(flags).rampup_batch_size == [16, 8, 300000]


def test_a_schedule_may_repeat_its_last_size_as_the_global_batch() -> None:
    """Megatron's own GPT-3 script passes both, and its own check refuses them."""
    flags = "--step-batch-size-schedule 0:384,3B:768,12B:1536 --global-batch-size 1536"
    assert resolve(flags).global_batch_size == 1536


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data-path x", "--split is not given"),
        ("--fp16", "dynamic loss scaling"),
        (
            "--bf16 --use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation",
            "--ddp-reduce-scatter-with-fp32-accumulation is off",
        ),
        ("--skip-train", "--no-load-optim"),
        ("--lr-decay-iters 8", "at its minimum from 8 on"),  # C046
    ],
)
def test_what_a_user_may_not_expect_is_warned_of(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolve(flags)
    assert words in capsys.readouterr().err
    resolve()
    assert capsys.readouterr().err == ""


def test_C046_a_decay_that_ends_before_training_does_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    resolve("--train-iters 220 --lr-warmup-iters 22 --lr-decay-style cosine --lr-decay-iters 198")
    assert "includes the warm-up" in capsys.readouterr().err
    resolve("--train-iters 220 --lr-warmup-iters 22 --lr-decay-style cosine --lr-decay-iters 220")
    assert capsys.readouterr().err == ""
