#!/bin/bash
# DeepSeek-V2-Lite on 8 GPUs or a multiple: the 64 experts of a layer on 8 ranks. Run it on every machine:
#
#   NUM_NODES=1 NODE_RANK=0 MASTER_ADDR=node0 ./train_deepseek_v2_lite_distributed.sh CHECKPOINTS TOKENIZER DATA
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
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --kv-channels 128
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --no-position-embedding
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1.0e-06
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --init-method-std 0.006
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

LATENT_ARGS=(
    --multi-latent-attention
    --qk-layernorm
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rotary-scaling-factor 40
    --mscale 0.707
    --mscale-all-dim 0.707
)

MOE_ARGS=(
    --num-experts 64
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-router-topk 6
    --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 1.0
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1.0e-3
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-path "$DATA_PATH"
    --split "99990,8,2"
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 4.2e-4
    --min-lr 4.2e-5
    --lr-decay-style cosine
    --lr-decay-iters 500000
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
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
        --wandb-project "${WANDB_PROJECT:-DeepSeek}"
        --wandb-exp-name "${WANDB_NAME:-DeepSeek_V2_Lite}"
    )
fi

${LAUNCHER:-torchrun} "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${LATENT_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
