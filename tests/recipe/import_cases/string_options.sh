#! /usr/bin/env bash
NAME=${1:-tiny}
N_GPU=4
RUN=/runs/"$NAME"
OPTIONS=" \
    --num-layers 2 \
    --hidden-size 64 \
    --num-attention-heads 4 \
"
OPTIONS="$OPTIONS --seq-length 128 --max-position-embeddings 128"
OPTIONS+=" --micro-batch-size 2"
OPTIONS="${OPTIONS} --save ${RUN} --load /runs/other --save-interval 100 --normalization=LayerNorm"
function cleanup {
    echo "$RUN ends"
}
trap cleanup EXIT
cmd="python3 -m torch.distributed.launch --nproc_per_node=$N_GPU train/pretrain_gpt.py $OPTIONS"
echo "$cmd"
eval $cmd
