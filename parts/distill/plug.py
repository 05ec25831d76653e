"""Distillation on the policy's own completions: a script (README.md)."""

METRICS = {
    "loss/divergence": "with --divergence: weighted mean of the divergence from the teacher, "
                       "before its weight",
    "policy/teacher_kl": "weighted mean of log π_old - log π_teacher of the sampled tokens, an "
                         "estimate of KL(π‖π_teacher)"}
