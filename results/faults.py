"""faults.py: mistakes that raise nothing, as patches of today's files, and sound changes.

* RULES breaks each rule of docs/learn/details.md, by its number.
* PUBLISHED has mistakes that public threads describe, and that break none of these rules.
* SOUND has changes that nothing may report: the same mathematics, or another choice that is right.

results/seen_by.py asks which detector sees which. At the end of this file are the rows and rewards
with which some of them act. It imports little, because workers of rewards import it.
"""
import random
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A patch: `old`, which `file` has exactly once, becomes `new`."""
    name: str
    file: str
    old: str
    new: str
    flags: str = ""  # with which it acts, added to those of the job
    link: str = ""  # of PUBLISHED: the thread
    kind: str = ""  # of PUBLISHED
    script: str = "grpo.py"
    ranks: int = 1
    resumed: bool = False  # it acts after a resume, so the run is stopped in the middle

    @property
    def own(self) -> bool:
        """Whether who forks a script writes such lines: learn, a loss, an advantage, a reward."""
        return self.file in ("grpo.py", "ppo.py", "losses.py", "worker.py")


PPO = dict(script="ppo.py")
SOME = "--reward results/faults.py:some"  # a completion in eight has no reward
AGAIN = ("--model tiny:kk --data results/faults.py:few --reward kk01 --batch 16 --max_tokens 128 "
         "--max_prompt_tokens 128 --lr 2e-4 --eval_data results/faults.py:few")
GAME = ("--model tiny:guess --data tiny:guess --eval_data tiny:guess@test --batch 16 --max_turns 4 "
        "--max_tokens 128 --reply examples/guess.py:reply --reward examples/guess.py:won")

RULES = {number: Fault(str(number), *patch, **more) for number, (*patch, more) in {
    # ---- one batch, any number of ranks
    1: ("grpo.py", "w = micro.per_token(weights)",
        "w = torch.full_like(logp, len(micro.rows) / len(rows) / max(1, len(logp)))",
        dict(flags="--update_tokens 1024")),
    2: ("dist.py", "return slice(start, start + small + (rank < extra))",
        "return slice(rank * small, (rank + 1) * small)",
        dict(flags="--batch 63 --group 7", ranks=2)),
    3: ("dist.py", "return items[share(len(items), self.size, self.rank)]",
        'each = assert_divisible(len(items), self.size, "items", "ranks")\n'
        "        return items[self.rank * each:(self.rank + 1) * each]",
        dict(flags="--batch 63 --group 7", ranks=2)),
    4: ("batch.py", "micros = pad_to_multiple(micros or [[]], rounds * ranks, [])",
        "micros = micros or [[]]", dict(flags="--batch 1 --group 2", ranks=3)),
    5: ("batch.py", "if not micros or new > room or p + c > keys:", "if owner != last:",
        dict(flags="--update_tokens 80")),
    6: ("grpo.py", 'rows, args.update_tokens, "update"', 'rows, args.logprob_tokens, "update"',
        dict(flags="--update_tokens 1024")),
    7: ("batch.py", "rows[share(len(rows), count, k)]",
        "rows[k * (len(rows) // count):(k + 1) * (len(rows) // count)]",
        dict(flags="--minibatches 3")),
    8: ("model.py", "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(mesh.size()))", dict(ranks=2)),
    9: ("dist.py", "return bool(self.max(torch.tensor(int(flag))))", "return flag",
        dict(ranks=2)),
    10: ("dist.py", "if len(set(phases)) > 1:", "if False:", dict(ranks=2)),
    11: ("grpo.py", "if not weights.any():", "if False:", dict(flags=SOME)),
    # ---- tokens
    12: ("batch.py", "self.sampled = np.append(self.sampled, np.full(len(ids), sampled))",
         "self.sampled = np.append(self.sampled, np.array(ids) != 0)", {}),
    13: ("batch.py", "[start + p - 1, *range(size, size + n)]",
         "[*range(size, size + n), size + n - 1]", {}),
    14: ("batch.py", "[start + p - 1, *range(size, size + n)]",
         "[size - 1, *range(size, size + n)]", {}),
    15: ("batch.py", "torch.arange(s.prefix, s.prefix + s.length)", "torch.arange(s.length)", {}),
    16: ("batch.py", ", dtype=torch.bool, device=device).tril(prefix)",
         ", dtype=torch.bool, device=device)", {}),
    17: ("tools/float64.py",
         "if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:",
         "if False:", {}),
    18: ("rollout.py", 'return {"ids": ids, "logprobs": logprobs, "truncated"',
         'return {"ids": ids[:-1], "logprobs": logprobs[:-1], "truncated"', {}),
    19: ("chat_template.py", "ids = ids if isinstance(ids, list) else [ids]",
         "ids = ids[:1] if isinstance(ids, list) else [ids]", {}),
    20: ("data.py", "add_bos=tokenizer.chat_template is None and not rendered", "add_bos=True", {}),
    21: ("model.py", "logits = logits / temperature", "pass", dict(flags="--temperature 0.7")),
    22: ("model.py", "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))",
         "pass", dict(flags="--dtype bfloat16")),
    23: ("batch.py", "[torch.from_numpy(s.logprobs[s.sampled]) for s in samples]",
         "[torch.from_numpy(s.logprobs[:s.tokens]) for s in samples]",
         dict(flags=f"{GAME} --engine_correction truncate")),
    # ---- from rewards to advantages
    24: ("batch.py", "[r is not None for r in rewards]", "[True for r in rewards]",
         dict(flags=SOME)),
    25: ("losses.py", "R, S = rewards.double().view(-1, group), scored.view(-1, group)",
         "R, S = rewards.double().view(-1, group), torch.ones_like(scored).view(-1, group)",
         dict(flags=SOME)),
    26: ("losses.py", "return torch.where(S, R, 0), S, equal(highest, lowest)",
         "return torch.where(S, R, 0), S, torch.where(S, R, 0).std(1, keepdim=True) == 0",
         dict(flags="--reward results/faults.py:tenths --advantage grpo "
                    "--advantage_eps 0")),
    27: ("losses.py", "torch.where(S & ~all_equal, A, 0)",
         "torch.where(S & (~all_equal | (n == 1)), A, 0)",
         dict(flags=f"{SOME} --advantage rloo --group 2")),
    28: ("losses.py", "A = R - (total - R) / others", "A = R - total / n.clamp(min=1)",
         dict(flags="--advantage rloo")),
    29: ("losses.py", "keepdim=True) / others).sqrt()", "keepdim=True) / n.clamp(min=1)).sqrt()",
         dict(flags="--advantage grpo")),
    30: ("grpo.py", "scored=batch.scored)  # (N,)", "scored=loss_tokens > 0)  # (N,)",
         dict(flags="--overlong_filter --max_tokens 7")),
    31: ("losses.py", "white = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()",
         "y = torch.where(among, values.double(), 0)\n"
         "        white = (x - y.mean()) / (y.var() + 1e-8).sqrt()",
         dict(flags=f"{SOME} --advantage reinforce++")),
    32: ("losses.py", "last = lengths.cumsum(0) - 1  # (N,); meaningless",
         "last = lengths.cumsum(0).clamp(max=len(rewards) - 1)  # (N,); meaningless",
         dict(flags="--advantage reinforce++")),
    33: ("losses.py", "gamma * next_value[:left] - values[t]", "gamma * values[t] - values[t]",
         PPO),
    34: ("losses.py", "next_value = next_advantage = rewards.new_zeros(len(lengths))",
         "next_value, next_advantage = values.roll(-1)[last], rewards.new_zeros(len(lengths))",
         PPO),
    35: ("ppo.py", "advantages = losses.whiten(advantages, in_loss)",
         "advantages = losses.whiten(advantages, in_loss); returns = advantages + values", PPO),
    # ---- losses
    36: ("grpo.py", "else logp.detach()", "else micro.engine_logprobs", {}),
    37: ("losses.py", "r.clamp(max=1 + clip_high))", "r.clamp(max=clip_high))", {}),
    38: ("losses.py", "r.clamp(1 - clip_low, dual_clip)", "r.clamp(1 - clip_low, 1 + clip_high)",
         dict(flags="--epochs 4")),
    39: ("losses.py", "log_s = row_mean(logp - old, row, n_rows).detach()",
         "log_s = row_sum(logp - old, row, n_rows).detach()",
         dict(flags="--loss gspo --epochs 2 --aggregation sequence")),
    40: ("losses.py", "log_r.detach().clamp(max=80).exp()", "log_r.detach().exp()",
         dict(flags="--epochs 4")),
    41: ("losses.py", "0.5 * torch.maximum(error, clipped_error)", "0.5 * clipped_error", PPO),
    42: ("losses.py", '"k2": d.square() / 2', '"k2": d',
         dict(flags="--kl_loss_coef 0.1 --kl_estimator k2")),
    43: ("losses.py", '"k3": (-d).exp() - 1 + d}', '"k3": d.exp() - 1 - d}',
         dict(flags="--kl_loss_coef 0.1")),
    44: ("losses.py", "log_ratio = old.detach() - engine", "log_ratio = engine - old.detach()",
         dict(flags="--engine_correction truncate")),
    45: ("losses.py", "n = (lengths > 0).sum().double()",
         "n = torch.tensor(len(lengths), dtype=torch.float64)",
         dict(flags=f"{SOME} --aggregation sequence")),
    46: ("losses.py", '"constant": max_tokens * n,', '"constant": lengths.max() * n,',
         dict(flags="--aggregation constant")),
    # ---- the optimizer
    47: ("model.py", "if math.isfinite(norm):", "if True:", {}),
    48: ("model.py", 'self.optimizer.param_groups[0]["lr"] = lr', "pass", {}),
    # ---- the engine
    49: ("rollout.py", "if not self.llm.reset_prefix_cache():", "if False:", dict(flags=AGAIN)),
    50: ("model.py", "in self.module.lm.state_dict().items():",
         "in self.module.lm.named_parameters():", {}),
    51: ("rollout.py", 'logprobs_mode="processed_logprobs"', 'logprobs_mode="raw_logprobs"',
         dict(flags="--temperature 0.7")),
    52: ("rollout.py", "return int.from_bytes(hashlib.blake2b(repr(parts).encode(), "
         "digest_size=8).digest()) >> 1", "return sum(p for p in parts if isinstance(p, int))", {}),
    # ---- rewards, data, the run
    53: ("rewards.py", "left = deadline - time.monotonic()", "left = seconds", {}),
    54: ("examples/mathematics.py", "if not isinstance(node, NODES) or called",
         "if False and called", {}),
    55: ("data.py", "self.position += len(prompts)", "self.position += n", {}),
    56: ("checkpoint.py",
         'found |= {f"{who}.{name}.{k}": value for k, value in state.items()}', "pass",
         dict(resumed=True)),
    57: ("evaluate.py", "return 1.0 - comb(n - correct, k) / comb(n, k)",
         "return 1.0 - (1.0 - correct / n) ** k",
         dict(flags="--eval_samples 8 --eval_temperature 1")),
}.items()}

# In GitHub's names; what a thread says is in our own words, and so is the patch.
HUB = "https://github.com/{}/issues/{}"
ENGINE, TEXTS, DATA, TURNS, SCHEDULE, OPTION, LOSS, REWARD = (
    "engine and weights", "templates and ends", "data order and resume", "several turns",
    "schedules and precision", "options without effect", "losses and denominators", "rewards")


def published(name, repository, number, kind, *patch, **more) -> Fault:
    """A Fault with its thread."""
    return Fault(name, *patch, kind=kind, link=HUB.format(repository, number), **more)


PUBLISHED = [
    published("divided twice", "modelscope/ms-swift", 10117, LOSS, "grpo.py",
              "w = micro.per_token(weights)",
              "parts = len(batch.micro_batches(world, rows, args.update_tokens, \"count\"))\n"
              "                w = micro.per_token(weights) / parts",
              flags="--update_tokens 1024"),
    published("larger minibatch than batch", "verl-project/verl", 5625, LOSS, "losses.py",
              '"sequence": lengths * n,', '"sequence": lengths * n.clamp(min=16384),',
              flags="--aggregation sequence"),
    published("ratio dropped", "linkedin/Liger-Kernel", 1082, LOSS, "losses.py",
              "return _clipped(logp - old, logp - old, A, **bounds)",
              "return _clipped(logp - old, logp - logp.detach(), A, **bounds)",
              flags="--epochs 4"),
    published("advantages cut otherwise", "tenstorrent/tt-metal", 46548, LOSS, "grpo.py",
              "A = micro.take(advantages).to(logp.dtype)",
              "A = micro.take(advantages.roll(1)).to(logp.dtype)"),
    published("bias correction ignored", "unslothai/unsloth-zoo", 890, OPTION, "losses.py",
              "return capped_ratio(ref, old) + capped_ratio(logp, old) * (d - 1)",
              "return (-d).exp() - 1 + d",
              flags="--kl_loss_coef 0.1 --kl_estimator k3_ratio --epochs 2"),
    published("bounds ignored", "huggingface/trl", 6807, OPTION, "losses.py",
              "return _clipped(logp - old, log_s + (logp - logp.detach()), A, **bounds)",
              "return _clipped(logp - old, log_s + (logp - logp.detach()), A,\n"
              "                    clip_low=0.2, clip_high=0.2, dual_clip=None)",
              flags="--loss gspo --aggregation sequence --epochs 4 --clip_low 3e-4 "
                    "--clip_high 4e-4"),
    published("std despite the option", "verl-project/verl", 7893, OPTION, "losses.py",
              'if kind == "grpo":', 'if kind in ("grpo", "dr_grpo"):'),
    published("second pass without a step", "tenstorrent/tt-blacksmith", 731, OPTION, "batch.py",
              "for k in range(count)] * epochs", "for k in range(count)]", flags="--epochs 2"),
    published("prompts in no budget", "verl-project/verl", 7553, OPTION, "batch.py",
              "new = c - 1 if owner == last else p + c - 1", "new = c - 1",
              flags="--update_tokens 256"),
    published("weights stay behind", "huggingface/trl", 5312, ENGINE, "rollout.py",
              "        with self.changing():\n            self.reload(policy.weights(self.dtype))",
              "        with self.changing():\n            if self.world.step <= 0:\n"
              "                self.reload(policy.weights(self.dtype))"),
    published("top-p in the engine alone", "huggingface/trl", 6789, ENGINE, "rollout.py",
              "top_p=1.0", "top_p=0.9"),
    published("adapter under other names", "vllm-project/vllm", 34186, ENGINE,
              "parts/lora/lora.py", 'yield f"base_model.model.{name}.weight"',
              'yield f"base_model.model.base.{name}.weight"',
              flags="--lora_rank 8 --lora_sync adapter"),
    published("dropout in updates alone", "unslothai/unsloth-zoo", 832, ENGINE, "model.py",
              "return self.states(inputs).flatten(0, 1).index_select(0, source)",
              "states = nn.functional.dropout(self.states(inputs), 0.1, torch.is_grad_enabled())\n"
              "        return states.flatten(0, 1).index_select(0, source)"),
    published("spaces lost", "huggingface/transformers", 45488, TEXTS, "chat_template.py",
              'ids = tokenizer(text, add_special_tokens=False)["input_ids"]',
              'ids = tokenizer(text.replace(" ", ""), add_special_tokens=False)["input_ids"]'),
    published("no header of the answer", "huggingface/transformers", 26539, TEXTS,
              "chat_template.py",
              "text = render(messages, tokenizer, options, add_generation_prompt=not goes_on,",
              "text = render(messages, tokenizer, options, add_generation_prompt=False,"),
    published("end token in the reward's text", "lsdefine/simple_GRPO", 19, TEXTS,
              "chat_template.py",
              "        if ids and ids[-1] in eos_ids:  # the end token may be an ordinary token\n"
              "            ids.pop()\n"
              "        return tokenizer.decode([i for i in ids if i not in silent],",
              "        return tokenizer.decode(ids,"),
    published("control tokens hidden from rewards", "huggingface/trl", 2897, TEXTS,
              "chat_template.py", "if i not in silent], skip_special_tokens=False,",
              "if i not in silent], skip_special_tokens=True,"),
    published("one row for all", "huggingface/trl", 6351, REWARD, "worker.py",
              "return pickle.loads(pickle.dumps(value))", "return {**value}"),  # lists are shared
    published("one value for many", "huggingface/trl", 6533, REWARD, "worker.py",
              "isinstance(result, Iterable) else [result]",
              "isinstance(result, Iterable) else [result] * len(items)",
              flags="--reward results/faults.py:mean_of_all"),
    published("nan for the whole batch", "modelscope/ms-swift", 8123, REWARD, "batch.py",
              "torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64)",
              "torch.tensor([math.nan if None in rewards else r for r in rewards]).double()",
              flags=SOME),
    published("first order after a resume", "huggingface/accelerate", 4071, DATA, "data.py",
              'self.position = state["position"]',
              'self.position = state["position"] % len(self.rows)', resumed=True,
              flags=AGAIN),  # an epoch is a step
    published("shuffled copy thrown away", "allenai/open-instruct", 560, DATA, "data.py",
              ".permutation(len(self.rows))\n",
              ".permutation(len(self.rows))\n        order = np.arange(len(self.rows))\n"),
    published("evaluation of other weights", "torchgeo/torchgeo-bench", 162, DATA, "log.py",
              'if is_evaluation(row) and row["step"] == step), None)',
              "if is_evaluation(row)), None)"),
    published("KL coefficient not resumed", "verl-project/verl", 2653, DATA, "run.py",
              "self.kl_coef = checkpoint.kl_coef(self.args, state)", "pass", resumed=True,
              flags="--kl_reward_coef 0.05 --kl_target 0.02 --kl_horizon 1000", **PPO),
    published("rate rises again", "Nerogar/OneTrainer", 1604, SCHEDULE, "grpo.py",
              "lr = learning_rate(step, args.steps,",
              "lr = learning_rate(step - run.start, args.steps - run.start,",
              resumed=True, flags="--lr_schedule linear"),
    published("schedule of updates", "verl-project/verl", 3674, SCHEDULE, "grpo.py",
              "lr = learning_rate(step, args.steps,",
              "lr = learning_rate(step, args.steps * args.minibatches,",
              flags="--lr_schedule linear --minibatches 4"),
    published("weights kept in bfloat16", "areal-project/AReaL", 1369, SCHEDULE, "model.py",
              "master = torch.promote_types(compute, torch.float32) if trained else compute",
              "master = compute", flags="--dtype bfloat16"),
    published("mask one token off", "huggingface/trl", 5144, TURNS, "parts/turns/turns.py",
              "        sample.turns += messages", "        sample.turns += messages\n"
              "        sample.sampled = np.append(sample.sampled[1:], False)", flags=GAME),
    published("first observation dropped", "huggingface/trl", 6067, TURNS, "parts/turns/turns.py",
              "        sample.append(ids, np.zeros(len(ids)), sampled=False)",
              "        ids = ids if len(sample.turns) > 1 else []\n"
              "        sample.append(ids, np.zeros(len(ids)), sampled=False)", flags=GAME),
    published("earlier turns left out of prompts", "verl-project/verl", 5576, TURNS,
              "rollout.py", "s.prompt.row.prompt_ids + s.ids.tolist()",
              "s.prompt.row.prompt_ids + s.ids[~s.sampled].tolist()", flags=GAME),
]

SOUND = [Fault(name, *patch) for name, *patch in (
    ("sums in float64", "grpo.py", "policy.backward((w * loss).sum())",
     "policy.backward((w.double() * loss.double()).sum())"),
    ("micro-batches backwards", "grpo.py",
     'in batch.micro_batches(world, rows, args.update_tokens, "update"):',
     'in batch.micro_batches(world, rows, args.update_tokens, "update")[::-1]:'),
    ("another name", "grpo.py",
     "total = batch.sum_tokens(advantages.abs())  # (M,) → (N,): summed over each completion's "
     "tokens\n    learns = ((total > 0)",
     "sizes = batch.sum_tokens(advantages.abs())\n    learns = ((sizes > 0)"),
    ("smaller micro-batches", "flags.py", "update_tokens: int = 16384",
     "update_tokens: int = 2048"),
    ("a lower rate", "flags.py", "lr, critic_lr = (3e-4, 1e-3)", "lr, critic_lr = (2.7e-4, 9e-4)"),
    ("the clip as the paper writes it", "losses.py", "return -bounded * A, ratio_metrics(",
     "loss = -torch.minimum(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)\n"
     "    loss = loss if dual_clip is None else -bounded * A\n"
     "    return loss, ratio_metrics("),
    ("torch's log_softmax", "model.py",
     "logp = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logz.squeeze(-1)  # (n,)",
     "logp = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1) + 0.0"),
    ("other blocks", "batch.py", "EVEN = 0.7", "EVEN = 0.3"),
    ("the mean's other form", "losses.py", "A = R - total / n.clamp(min=1)\n",
     "A = (n * R - total) / n.clamp(min=1)\n"),
    ("other seeds", "rollout.py", "hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()",
     "hashlib.sha256(repr(parts).encode()).digest()[:8]"))]

FAULTS = {one.name: one for one in (*SOUND, *RULES.values(), *PUBLISHED)}


# ---- rows and rewards with which some act

def some(completion, answer, **row):
    """`exact`, but of a completion in eight it is not known."""
    return None if zlib.crc32(completion.encode()) % 8 == 0 else float(completion == answer)


def tenths(completion, answer, **row):
    """0.7 for a right answer and 0.1 for another: numbers without an exact mean."""
    return 0.7 if completion == answer else 0.1


def mean_of_all(completions, answer, **row):
    """One number for all completions of a prompt: the caller must refuse it."""
    return sum(text == answer[0] for text in completions) / len(completions)


def few(seed):
    """Rows of knights and knaves: so few that each comes again in each step."""
    from examples import tiny
    return random.Random(seed).sample(tiny.rows(1000, seed, "kk"), 16)
