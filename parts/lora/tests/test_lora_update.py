"""Adapters learn the same on any number of ranks, with any budgets. The reference is scale 0."""
import test_same_update
from learning import difference, whole
from test_same_update import LIMIT, case, in_two_copies, run_on, same

models = test_same_update.models
CASES = [case(7, lora_rank=2, kl_loss_coef=0.1, minibatches=3, steps=2, update_tokens=64),
         case(7, lora_rank=2, kl_loss_coef=0.1, minibatches=3, steps=2, score_tokens=96,
              checkpointing=True, cpu_offload=True)]


def test_same_update_and_metrics_on_any_ranks(models):
    runs = run_on((1, 3), models, CASES)
    same(CASES, runs)
    in_two_copies(CASES[0], CASES, runs[1], models)
    first, second = (whole([o.gradients[0] for o in outcomes]) for outcomes in runs[1])
    assert difference(first, second) <= LIMIT  # whatever the budgets
