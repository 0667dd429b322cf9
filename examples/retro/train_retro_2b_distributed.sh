#!/bin/bash
# Retro 2B on the project of preprocess_data.sh: 24 layers of width 2048, every third of which retrieves from layer 9 on.
# Run it on every machine:
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./train_retro_2b_distributed.sh CHECKPOINTS TENSORBOARD PROJECT
#
# More arguments are passed on to pretrain_retro.py. RETRIEVE=0 trains the GPT on the same samples, to compare with.

set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINT_PATH=${1:?folder of the checkpoints}
TENSORBOARD_PATH=${2:?folder of the TensorBoard files}
PROJECT=${3:?project directory of preprocess_data.sh}
shift 3

cd "$(dirname "$0")/../.."

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

RETRO_ARGS=(--retro-project-dir "$PROJECT")
if [ "${RETRIEVE:-1}" = 1 ]; then
    RETRO_ARGS+=(--retro-add-retriever --retro-num-neighbors 2 --retro-num-retrieved-chunks 2 --retro-encoder-layers 2)
fi

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 32
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --init-method-std 0.007
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-decay-samples 25000000
    --lr-warmup-samples 260000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --use-distributed-optimizer
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --save-interval 10000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_PATH"
)

LAUNCHER=${LAUNCHER:-torchrun}

"$LAUNCHER" "${DISTRIBUTED_ARGS[@]}" pretrain_retro.py \
    "${RETRO_ARGS[@]}" \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
