#!/bin/bash
# EasyR1's examples/qwen2_5_vl_7b_geo3k_grpo.sh as a command of grpo.py, for eight GPUs of 80 GB.
# EasyR1 samples with top_p 0.99 and evaluates at a temperature of 0.5, and `math` also pays an
# answer without a box. Not run on such GPUs; a test runs it on rows of the same layout, with a tiny
# model of each family.
torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-VL-7B-Instruct --train_vision \
    --data hiyouga/geometry3k@train --eval_data hiyouga/geometry3k@test --eval_every 5 \
    --prompt_template "{question} You FIRST think about the reasoning process as an internal \
monologue and then provide the final answer. The reasoning process MUST BE enclosed within \
<think> </think> tags. The final answer MUST BE put in \boxed{}." \
    --min_image_tokens 334 --max_image_tokens 5349 --max_prompt_tokens 2048 --max_tokens 2048 \
    --reward math:0.9 format_boxed:0.1 --advantage grpo --kl_loss_coef 0.01 --batch 512 --group 5 \
    --minibatches 4 --lr 1e-6 --weight_decay 0.01 --steps 60 --save_every 5 --name geometry3k \
    --checkpointing --offload params optimizer reference --tp 2 --gpu_memory_utilization 0.6
