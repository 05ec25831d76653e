# ./run.sh distill [FLAGS]   parts/distill/distill.py from a tiny teacher
train parts/distill/distill.py "--target_reward 0.2 0.9 --target_eval 0.1 0.9" \
  "--teacher tiny:skilled" "--steps 30 --reward exact --eval_data tiny@test" "$@"
