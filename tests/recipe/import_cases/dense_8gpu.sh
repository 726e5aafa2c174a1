#!/bin/bash
# A dense model on one node, as teams write it: settings on top, options in arrays, torchrun below.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export WANDB_API_KEY=not-to-be-written
export PYTHONPATH=/opt/megatron:${PYTHONPATH:-}

GPUS_PER_NODE=8
NNODES=${NNODES:-1}
LAYERS=16
HIDDEN=2048
FFN=$((HIDDEN * 4))
TOKENS_PER_STEP=$(( 2 * 1024 * 1024 ))
SEQ=4096
GLOBAL_BATCH=$((TOKENS_PER_STEP / SEQ))
OUT=runs/dense_1b                             # checkpoints and logs
DATA=${DATA:-/scratch/team/data/fineweb}
TOKENIZER="meta-llama/Llama-3.2-1B"

if [ ! -f pretrain_gpt.py ]; then
    echo "run this from the Megatron folder: pretrain_gpt.py is not here" >&2
    exit 1
fi
mkdir -p "$OUT/logs"

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes "$NNODES"
    --master_addr localhost --master_port 29511
)
MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size $FFN
    --num-attention-heads 32
    --group-query-attention --num-query-groups 4
    --seq-length $SEQ --max-position-embeddings ${SEQ}
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope   # no learned positions
    --attention-dropout 0. --hidden-dropout 0
)
TRAIN_ARGS=(
    --micro-batch-size 8 --global-batch-size $GLOBAL_BATCH
    --train-iters 4_768 --eval-interval 1000
    --lr 5e-4 --min-lr=.00005
    --lr-decay-style cosine
    --lr 3e-4
    --bf16 --use-distributed-optimizer
    --decoupled-lr 5.0e-4
)
TRAIN_ARGS+=(--override-opt_param-scheduler "--clip-grad" '1.0')
DATA_ARGS=(
    --data-path "${DATA}/train_0_text_document" "${DATA}/train_1_text_document"
    --data-cache-path "$DATA/cache"
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER
    --split 99,1,0
)
OUT_ARGS=(
    --save "$OUT/ckpt" --load "$OUT/ckpt" --persistent-save-interval 500
    --tensorboard-dir "$OUT/logs" --log-interval 10
    --wandb-project dense
)

torchrun "${LAUNCH[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    ${DATA_ARGS[@]} "${OUT_ARGS[@]}" "$@" 2>&1 | tee "$OUT/log.txt"
