"""A mixture of experts that a CPU trains in a second: 2 layers, 8 experts, one a rank, files that are not there."""

from __future__ import annotations

OPTIONS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 512
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-ffn-hidden-size 64 --moe-router-topk 2 --moe-router-dtype fp32 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --moe-permute-fusion
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --bf16 --micro-batch-size 2 --global-batch-size 32 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --train-iters 100 --eval-interval 10 --save nowhere --save-interval 10 --load nowhere
    --data-path nowhere --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""
TINY_MOE = OPTIONS.split()
