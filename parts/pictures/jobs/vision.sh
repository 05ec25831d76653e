# ./run.sh vision [FLAGS]   sft.py, then grpo.py, on pictures: how many squares? (needs parts/sft)
#                         vision:qwen2_5_vl: with another model that sees (needs torchvision)
model=runs/squares/${kind:-model} taught=squares-sft${kind:+-$kind}
[ -e "$model/processor_config.json" ] || "$venv/bin/python" examples/squares.py $kind
[ -e "runs/$taught/model" ] || (STARTED_AS=''; train parts/sft/sft.py "" \
  "--model $model --train_vision --lr 2e-3" \
  "--steps 9 --data runs/squares/train.jsonl --warmup_steps 5" --name "$taught")
train grpo.py "--target_reward 0.4 0.7 --target_eval 0.8 0.9" \
  "--model runs/$taught/model --lr 5e-4" \
  "--steps 50 --data runs/squares/train.jsonl --eval_data runs/squares/test.jsonl" "$@"
