#!/bin/bash
# Llama 3 8B on 8 GPUs or a multiple: 2 tensor-parallel ranks, 2 context-parallel ones. Run it on every machine:
#
#   NUM_NODES=1 NODE_RANK=0 MASTER_ADDR=node0 ./train_llama3_8b_distributed.sh CHECKPOINTS TOKENIZER DATA
#
# CHECKPOINTS is a folder, TOKENIZER a folder with the model's tokenizer.json, DATA the prefix of a .bin/.idx pair. More
# arguments are passed on to pretrain_gpt.py. W&B is written where WANDB_API_KEY is set.

set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

CHECKPOINT_PATH=${1:?folder of the checkpoints}
TOKENIZER_MODEL=${2:?folder of the tokenizer}
DATA_PATH=${3:?prefix of the .bin/.idx pair}
shift 3

cd "$(dirname "$0")/../.."

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --no-position-embedding
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1.0e-05
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --init-method-std 0.0134
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-path "$DATA_PATH"
    --split "99990,8,2"
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --use-distributed-optimizer
    --overlap-param-gather
    --overlap-grad-reduce
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)
if [ -n "${WANDB_API_KEY:-}" ]; then
    LOGGING_ARGS+=(
        --wandb-project "${WANDB_PROJECT:-Llama3}"
        --wandb-exp-name "${WANDB_NAME:-Llama3_8B}"
    )
fi

${LAUNCHER:-torchrun} "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
