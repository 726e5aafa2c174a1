#!/bin/bash
#SBATCH --job-name=moe
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=4
export HF_TOKEN

ARGS="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
      --seq-length 2048 --max-position-embeddings 2048"
MOE="--num-experts 64 --moe-router-topk 6 --moe-layer-freq '([0]*1+[1]*23)' \
     --moe-router-load-balancing-type seq_aux_loss global_aux_loss \
     --moe-aux-loss-coeff 1e-3 1e-4 --expert-model-parallel-size $SLURM_GPUS_PER_NODE"

srun --container-image=$IMAGE --container-mounts=/data:/data bash -c "
    cd /opt/megatron
    NVTE_FUSED_ATTN=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$SLURM_GPUS_PER_NODE \
        --rdzv-endpoint=\$MASTER_ADDR:29500 pretrain_gpt.py $ARGS $MOE \
        --micro-batch-size 1 --global-batch-size $((SLURM_NNODES * 8 * 4)) --train-samples 1000000 \
        --data-path 0.7 /data/web/web_text_document 0.3 /data/code/code_text_document \
        --load /runs/base/checkpoints --finetune --mock-data
"
