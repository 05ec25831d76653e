"""The updates of the scripts as the papers write them. Tests hold the shipped code against them.

It is slow and plain: transformers' own model, one completion at a time, float64. There is no batch,
no padding and no mask. Every list below is over the sampled tokens of one completion: the model
reads what a reply put in, but that is no step of the policy. Of the project it takes the flags'
values, `args`, and nothing else. Losses of a token and advantages are in reference_losses.py.

`args.group` neighbours of the completions share a prompt. Log-probs and entropies are in nats.
"""
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from reference_losses import (
    cov_cut,
    engine_correction,
    fates,
    gae,
    grpo_advantages,
    kl_loss,
    mean,
    name_of,
    opsm_cut,
    penalized,
    token_loss,
    token_rewards,
    token_weight,
    value_loss,
    whiten,
)


@dataclass
class Completion:
    """What came after a prompt."""
    prompt: list[int]
    tokens: list[int]  # with the replies between two turns
    sampled: list[bool]  # which tokens the policy sampled; the others are a reply's
    engine_logprobs: list[float]  # the engine's log π of the sampled tokens
    truncated: bool  # it was cut at max_tokens
    reward: float | None  # None: it could not be scored
    parts: dict[str, float | None]  # the rewards that it adds up
    paid: list[float]  # for each turn; []: none was paid
    draws: list[float]  # of each sampled token, in [0, 1)

    def turns(self) -> list[int]:
        """The number of each sampled token's turn."""
        found, turn, before = [], -1, False
        for mine in self.sampled:
            turn += mine and not before
            found += [turn] if mine else []
            before = mine
        return found


@dataclass
class Step:
    """What is known of the completions before the first update."""
    completions: list[Completion]
    fates: list[str]  # "trained", or why a completion is not in the loss
    old: list[list[float]]  # log π_old
    ref: list[list[float]] | None  # log π_ref, of the starting model
    advantages: list[list[float]]

    def trained(self) -> list[int]:
        """The numbers of the completions in the loss."""
        return [i for i, fate in enumerate(self.fates) if fate == "trained"]

    def kl(self, i: int) -> list[float]:
        """log π_old - log π_ref of each token: the estimate k1 of KL(π_old‖π_ref)."""
        return [old - ref for old, ref in zip(self.old[i], self.ref[i], strict=True)]


class Model:
    """A transformers model in float64 with AdamW: a policy, or with a head (H,) a critic.

    trained: {name: parameter}. gradients: those of each update, before the clipping.
    """

    def __init__(self, lm, args, head=None):
        self.lm, self.args, self.head = lm, args, head
        for module in lm.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(norm, module)
        self.trained = self.parameters(lm if head is None else lm.base_model)
        if head is not None:
            self.trained["head"] = head
        self.gradients: list[dict] = []
        flags = args
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), betas=flags.betas, weight_decay=flags.weight_decay)

    def parameters(self, lm) -> dict:
        """Those of the model that learn."""
        return dict(lm.named_parameters())

    def weights_now(self) -> dict:
        return self.trained

    def step(self, lr: float) -> float:
        """Clip the gradient's norm, then AdamW → the norm."""
        self.gradients.append({name: p.grad.clone() for name, p in self.trained.items()})
        norm = torch.nn.utils.clip_grad_norm_(
            self.trained.values(), self.args.max_grad_norm or math.inf)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def hidden(self, completion: Completion):
        """The last hidden states in which the sampled tokens were chosen: (n, H)."""
        ids = torch.tensor([completion.prompt + completion.tokens])
        hidden = self.lm.base_model(ids, use_cache=False).last_hidden_state[0]  # (L, H)
        # The token before it predicts a token. The prompt's last token predicts the first one.
        before = len(completion.prompt) - 1
        return hidden[[before + t for t, mine in enumerate(completion.sampled) if mine]]

    def distributions(self, completion: Completion):
        """log π of the whole vocabulary at each sampled token, at --temperature: (n, V)."""
        logits = self.lm.lm_head(self.hidden(completion)) / self.args.temperature
        return logits.log_softmax(-1)

    def logprobs(self, completion: Completion):
        """log π and the entropy of each sampled token, at --temperature: (n,), (n,)."""
        logps = self.distributions(completion)
        ids = [x for x, mine in zip(completion.tokens, completion.sampled, strict=True) if mine]
        return logps[range(len(ids)), ids], -(logps.exp() * logps).sum(-1)

    def values(self, completion: Completion):
        """V of the state in which each sampled token was chosen: (n,)."""
        return self.hidden(completion) @ self.head


def norm(module, x):
    """w x / sqrt(mean x² + ε): transformers rounds to float32 here, also in a float64 model."""
    return module.weight * x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


# ---- one step of learning ----

def update_policy(args, policy: Model, step: Step, rows: list[int], lr: float, terms: list,
                  kind: str = "clip", kl_loss_coef: float = 0.0, beside=None) -> float:
    """One optimizer step: L = Σ_it weight_it (loss_it + β KL_it - entropy_coef H_it) → its norm.

    A completion learns if its loss is not 0 for every weight. The others are computed here too: the
    gradient of the shipped code, which leaves them out, must be the same.

    beside: i → (metrics, what is added to the loss) of each token of completion i.
    """
    for i in rows:
        completion, old, total = step.completions[i], step.old[i], 0.0
        weight = token_weight(args, i, {j: len(step.old[j]) for j in rows})
        logps, entropies = policy.logprobs(completion)
        log_ratios = [new - before for new, before in zip(logps, old, strict=True)]
        row = list(zip(log_ratios, step.advantages[i], strict=True))
        engine = completion.engine_logprobs
        corrections, engine_ratios = engine_correction(args, kind, old, engine)
        more = beside(i) if beside else [({}, 0.0)] * len(old)
        learns = (any(step.advantages[i]) or kl_loss_coef or args.entropy_coef or beside
                  or kind not in ("clip", "gspo", "cispo", "reinforce"))
        for t in range(len(old)):
            A = step.advantages[i][t]
            loss, ratio, cut = token_loss(args, kind, logps[t], old[t], A, row)
            cut_off = kind == "opsm" and opsm_cut(A, logps.tolist(), engine)
            if kind == "clip_cov":
                cut_off = cov_cut(args.loss, A, logps.tolist(), t, completion.draws[t])
            loss = 0.0 * loss if cut_off else loss * corrections[t]
            found = {"loss/policy": loss, "policy/ratio": ratio, "policy/clip_frac": cut,
                     "rollout/logprob_gap_mean": abs(old[t] - engine[t]),
                     "policy/approx_kl": log_ratios[t].exp() - 1 - log_ratios[t]}
            if args.engine_correction != "none" or kind == "geometric":
                r = engine_ratios[t]
                found |= {"policy/engine_ratio": r, "policy/engine_cut": corrections[t] != (
                    1 if kind == "geometric" else r)}
            if kind == "clip_cov":
                found["policy/cov_cut"] = cut_off
            if kind == "opsm":
                found["policy/opsm_cut"] = cut_off
            if kl_loss_coef:
                found["loss/kl"] = kl_loss(
                    args.kl_estimator, logps[t], step.ref[i][t], old[t])
                loss = loss + kl_loss_coef * found["loss/kl"]
            found, loss = found | more[t][0], loss + more[t][1]
            if args.entropy_coef:
                found["loss/entropy"] = entropies[t]
            total = total + weight * (loss - args.entropy_coef * entropies[t])
            terms.append((weight, learns, found))
        total.backward()
    return policy.step(lr)


def update_critic(args, critic: Model, step: Step, rows: list[int], lr: float, terms: list,
                  old_values: list[list[float]], returns: list[list[float]]) -> float:
    """One optimizer step: L = Σ_it weight_it value_loss_it, with the policy's weights."""
    for i in rows:
        weight, total = token_weight(args, i, {j: len(returns[j]) for j in rows}), 0.0
        for t, V in enumerate(critic.values(step.completions[i])):
            loss, clipped = value_loss(args, V, old_values[i][t], returns[i][t])
            total = total + weight * loss
            terms.append((weight, True, {"loss/value": loss, "critic/clip_frac": clipped}))
        total.backward()
    return critic.step(lr)


@torch.no_grad()
def before_update(policy, reference, completions: list[Completion], fates: list[str]) -> Step:
    """The log-probs of the policy and of the starting model; advantages are still empty."""
    old, ref = [policy.logprobs(c)[0].tolist() for c in completions], None
    if reference is not None:
        ref = [reference.logprobs(c)[0].tolist() for c in completions]
    return Step(completions, fates, old, ref, [[] for _ in completions])


def minibatches(args, step: Step) -> list[list[int]]:
    """What is in the loss, of each minibatch. All completions are split in order before."""
    parts = np.array_split(np.arange(len(step.fates)), args.minibatches)
    return [[i for i in rows if step.fates[i] == "trained"] for rows in parts] * args.epochs


def grpo(args, policy, reference, completions, lr: float) -> dict[str, float]:
    """One step of grpo.py → metrics. reference: the starting model, or None."""
    step = before_update(policy, reference, completions, fates(args, completions))
    step.advantages, terms, norms = grpo_advantages(args, step), [], []
    for rows in minibatches(args, step):
        if rows:  # else no update
            norms.append(update_policy(args, policy, step, rows, lr, terms, name_of(args.loss),
                                       args.kl_loss_coef))
    groups = [{c.reward for c in completions[i:i + args.group]} - {None}
              for i in range(0, len(completions), args.group)]
    equal = [len(rewards) < 2 for rewards in groups] if args.group > 1 else []
    return policy_metrics(args, step, terms, norms) | {
        "batch/groups_equal": mean(equal),
        "batch/dropped_no_baseline": step.fates.count("no_baseline"),
        "batch/dropped_overlong": step.fates.count("overlong"), "lr": lr}


def ppo(args, policy, critic, reference, completions, lr: float, critic_lr: float,
        kl_coef: float) -> dict[str, float]:
    """One step of ppo.py → metrics. With lr 0 only the critic learns."""
    step = before_update(policy, reference, completions,
                         ["unscored" if c.reward is None else "trained" for c in completions])
    with torch.no_grad():
        values = [critic.values(c).tolist() for c in completions]
    returns, norms, critic_norms = [[] for _ in completions], [], []
    terms, critic_terms = [], []
    for i in step.trained():
        rewards = token_rewards(step, i, penalized(args, completions[i]), kl_coef)
        step.advantages[i] = gae(args, rewards, values[i])
        returns[i] = [A + V for A, V in zip(step.advantages[i], values[i], strict=True)]
    step.advantages = whiten(step.advantages)
    for rows in filter(None, minibatches(args, step)):
        critic_norms.append(update_critic(
            args, critic, step, rows, critic_lr, critic_terms, values, returns))
        if lr:
            norms.append(update_policy(args, policy, step, rows, lr, terms))
    metrics = policy_metrics(args, step, terms, norms) | weighted_means(critic_terms) | {
        "critic/grad_norm": mean(critic_norms), "lr": lr, "critic/lr": critic_lr}
    if reference is not None:
        kl = [x for i in step.trained() for x in step.kl(i)]
        metrics |= {"policy/kl": mean(kl), "policy/kl_coef": kl_coef}
    V, R = ([x for i in step.trained() for x in rows[i]] for rows in (values, returns))
    error = sum((r - v) ** 2 for r, v in zip(R, V, strict=True))
    variance = sum((r - mean(R)) ** 2 for r in R)
    return metrics | {"critic/value_mean": mean(V),
                      "critic/explained_var": 1 - error / variance if variance else 0.0}


@torch.no_grad()
def weighted_means(terms: list[tuple[float, bool, dict]]) -> dict[str, float]:
    """Σ w x / Σ w of each metric x, with the loss's weights w: of loss/… over all tokens of all
    updates, of others over those that learn; 0 if none does."""
    means = {}
    for name in terms[0][2] if terms else ():
        among = [(w, found[name]) for w, learns, found in terms
                 if learns or name.startswith("loss/")]
        means[name] = float(sum(w * x for w, x in among)) / (sum(w for w, _ in among) or 1.0)
    return means


def policy_metrics(args, step: Step, terms: list, norms: list[float]) -> dict[str, float]:
    """What both scripts have: metrics.py."""
    n, trained = len(step.fates), step.trained()
    metrics = weighted_means(terms) | {
        "grad/norm": mean(norms), "batch/prompts": n // args.group, "batch/trained": len(trained),
        "batch/tokens": sum(len(c.prompt) + len(c.tokens) for c in step.completions),
        "batch/dropped": n - len(trained), "batch/dropped_unscored": step.fates.count("unscored"),
        "update/skipped": minibatches(args, step).count([]), "update/steps": len(norms)}
    if terms:  # the policy had an update
        metrics["rollout/logprob_gap_max"] = max(
            (found["rollout/logprob_gap_mean"] for _, learns, found in terms if learns), default=0)
    return metrics
