# ./run.sh doors [FLAGS]  grpo.py with credit for turns: the first one decides (it needs parts/sft)
[ -e runs/doors/train.jsonl ] || "$venv/bin/python" examples/doors.py
[ -e runs/doors-base/model ] || (STARTED_AS=''; train parts/sft/sft.py "" "--lr 2e-3" \
  "--data runs/doors/chats.jsonl --batch 64 --steps 80 --max_tokens 64" --name doors-base)
train grpo.py "--target_reward 0.4 0.9 --target_eval 0.5 0.9" \
  "--model runs/doors-base/model --lr 3e-4" \
  "--steps 100 --data runs/doors/train.jsonl --eval_data runs/doors/test.jsonl --batch 4 \
  --max_tokens 64 --max_turns 2 --reply examples/doors.py:Doors --reward turns \
  --advantage parts/turns/turn_credit.py:turn_credit" "$@"
