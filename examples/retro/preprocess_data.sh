#!/bin/bash
# Neighbours for Retro 2B: chunk database, index and neighbours of a corpus, in a project directory. Run it on one machine,
# or with NUM_NODES and NODE_RANK on several that share the directory; a stopped run goes on where it was.
#
#   ./preprocess_data.sh PROJECT VOCAB MERGES DATA [STAGES]
#
# PROJECT is the directory to make, VOCAB and MERGES are GPT-2's files, DATA the prefix of a .bin/.idx pair, STAGES one or
# more of db,index,query (build: all of them). The index needs faiss: pip install 'megatron_lite[retro]'.

set -euo pipefail

PROJECT=${1:?project directory}
VOCAB_FILE=${2:?vocab.json}
MERGE_FILE=${3:?merges.txt}
DATA_PATH=${4:?prefix of the .bin/.idx pair}
STAGES=${5:-build}

cd "$(dirname "$0")/../.."

LAUNCHER=${LAUNCHER:-torchrun}

"$LAUNCHER" \
    --nproc_per_node "${PROCESSES_PER_NODE:-1}" \
    --nnodes "${NUM_NODES:-1}" \
    --node_rank "${NODE_RANK:-0}" \
    --master_addr "${MASTER_ADDR:-localhost}" \
    --master_port "${MASTER_PORT:-6000}" \
    -m megatron_lite retro preprocess \
    --retro-project-dir "$PROJECT" \
    --retro-tasks "$STAGES" \
    --retro-gpt-tokenizer-type GPT2BPETokenizer \
    --retro-gpt-vocab-file "$VOCAB_FILE" \
    --retro-gpt-merge-file "$MERGE_FILE" \
    --retro-gpt-data-path "$DATA_PATH" \
    --retro-gpt-split "98,2,0" \
    --retro-gpt-seed 1234 \
    --retro-gpt-seq-length 2048 \
    --retro-gpt-chunk-length 64 \
    --retro-gpt-global-batch-size 256 \
    --retro-gpt-train-samples 25600000 \
    --retro-gpt-eval-interval 2000 \
    --retro-gpt-eval-iters 50 \
    --retro-index-str "OPQ32_64,IVF65536_HNSW8,PQ32" \
    --retro-index-ntrain 10000000 \
    --retro-query-ef-search 32 \
    --retro-query-nprobe 4096
