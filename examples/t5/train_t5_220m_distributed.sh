#!/bin/bash
# T5 220M (12 + 12 layers of 768) on 8 GPUs, data parallel. Run it on every machine:
#
#   ./train_t5_220m_distributed.sh CHECKPOINTS TENSORBOARD VOCAB DATA
#
# CHECKPOINTS and TENSORBOARD are folders, VOCAB a cased BERT vocab.txt, DATA the prefix of a .bin/.idx pair that was made
# with --split-sentences. More arguments are passed on to pretrain_t5.py.

set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

CHECKPOINT_PATH=${1:?folder of the checkpoints}
TENSORBOARD_LOGS_PATH=${2:?folder of the TensorBoard events}
VOCAB_FILE=${3:?vocab.txt of a cased WordPiece vocabulary}
DATA_PATH=${4:?prefix of the .bin/.idx pair}
shift 4

cd "$(dirname "$0")/../.."

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

T5_ARGS=(
    --encoder-num-layers 12
    --decoder-num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --init-method-std 0.015
    --attention-backend auto
    --transformer-impl transformer_engine
)

TRAINING_ARGS=(
    --micro-batch-size 64
    --global-batch-size 512
    --train-iters 1000000
    --lr 0.0001
    --min-lr 0.00001
    --lr-decay-style linear
    --lr-decay-iters 1000000
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --tokenizer-type BertWordPieceCase
    --vocab-extra-ids 100
    --split "99982,9,9"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 500
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --distributed-backend nccl
)

${LAUNCHER:-torchrun} "${DISTRIBUTED_ARGS[@]}" pretrain_t5.py \
    "${T5_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
