# ./run.sh game [FLAGS]   grpo.py on a guessing game of several turns
train grpo.py "--target_reward 0.4 0.9 --target_eval 0.5 0.95" "--model tiny:guess" \
  "--steps 40 --data tiny:guess --eval_data tiny:guess@test --max_tokens 128 --max_turns 4 \
  --reply examples/guess.py:reply --reward examples/guess.py:won" "$@"
