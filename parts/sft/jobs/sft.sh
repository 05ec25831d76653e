# ./run.sh sft [FLAGS]    parts/sft/sft.py on the right answers
train parts/sft/sft.py "--target_eval 0.1 0.95" "--lr 1e-3" \
  "--steps 40 --reward exact --eval_data tiny@test" "$@"
