#!/bin/bash
# 2 nodes of 8 GPUs: sbatch examples/slurm.sh
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # torchrun starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue                  # after a node failed, the same job again: it resumes
#SBATCH --open-mode=append         # and keeps the log of the first try

# Submit it in the clone, with the environment active: the job inherits both.
set -euo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit it

# The store. Keys stay in a file that only you can read; a role of the nodes needs none.
export AWS_ENDPOINT_URL=https://s3.example.com
export AWS_DEFAULT_REGION=us-east-1
export AWS_SHARED_CREDENTIALS_FILE=$HOME/.aws/credentials AWS_PROFILE=train

# A disk of each node, for .idx files and index arrays: fetched once, mapped by 8 processes.
export BINIDX_INDEX_DIR=/local/scratch/$USER/binidx

# What all nodes reach: the run in the store, checkpoints on a shared file system.
run=s3://corpus/run.json
save=$HOME/checkpoints

# Stores, disks and caches, on each node: a node that fails ends the job before it takes GPUs for nothing.
srun binidx doctor "$run" --nodes 2

# Builds the missing indices, on one node, before 16 processes start.
srun --nodes=1 --ntasks=1 binidx prepare index "$run"

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --kill-on-bad-exit: if one node fails, the other does not hang until the timeout of its process group.
srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" \
    examples/plain_torch.py "$run" --vocab-size 50257 --eod 50256 \
    --steps 100000 --save "$save" --save-interval 500 --resume
