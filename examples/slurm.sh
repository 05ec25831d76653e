#!/bin/bash
#SBATCH --job-name grpo
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 12:00:00
#SBATCH --signal TERM@1200
#SBATCH --open-mode append
# grpo.py on two machines of 8 GPUs each: sbatch examples/slurm.sh. Each machine has a whole copy of
# the weights (--shard_size 8). It was run under Slurm 22.05 with the tiny model and without GPUs.
#
# SIGTERM arrives 20 minutes before the time ends: the run saves after its step and stops. Slurm
# then calls the job failed, and the same script resumes the run: `scontrol requeue JOB`, or before
# it ends, `sbatch --dependency afterany:JOB examples/slurm.sh` (afterok would wait for ever).
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_PER_TASK" \
    .venv/bin/torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d \
    --shutdown-timeout 1200 --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$head:29500" \
    grpo.py --name grpo-7b --model Qwen/Qwen2.5-7B-Instruct \
    --data openai/gsm8k:main@train --reward gsm8k --batch 512 --group 16 \
    --max_prompt_tokens 1024 --max_tokens 4096 --minibatches 4 --checkpointing --shard_size 8 \
    --save_every 10
