"""Lines that join the formulas, each broken on purpose: (file, text, mistake, test that fails).

`python tests/mutations.py --wirings` takes the rows one by one, in a copy of the code. A test is
fast and below tests/test_. One without "::" is a setting of test_reference.py.
"""
DEFAULT = "grpo group=3 steps=2"
UPDATES = "grpo group=3 steps=3 minibatches=2 epochs=2"
EPOCHS = "grpo group=3 steps=2 dual_clip=1.1 epochs=3"
ONE_ROW = "grpo group=3 steps=1 minibatches=30"
TIGHT = "clip_low=0.03 clip_high=0.05 minibatches=2 epochs=2"
GRPO = f"grpo group=3 steps=1 advantage=grpo overlong_buffer=8 {TIGHT}"
REINFORCE = f"grpo group=3 steps=1 advantage=reinforce++ overlong_buffer=8 {TIGHT}"
BASELINE = f"grpo group=3 steps=1 advantage=reinforce++-baseline overlong_buffer=8 {TIGHT}"
FILTER = ("grpo group=3 steps=2 kl_reward_coef=0.2 advantage=rloo overlong_filter=True "
          "overlong_buffer=8")
TOKEN = f"grpo group=3 steps=1 loss=clip aggregation=token {TIGHT}"
SEQUENCE = f"grpo group=3 steps=1 loss=clip aggregation=sequence {TIGHT}"
GSPO = f"grpo group=3 steps=1 loss=gspo aggregation=token {TIGHT}"
KL = "grpo group=3 steps=1 kl_loss_coef=0.3 kl_estimator=k1 minibatches=2 epochs=2"
COLD = "grpo group=3 steps=2 kl_loss_coef=0.3 temperature=0.6 aggregation=sequence"
KL_REWARD = ("grpo group=3 steps=1 kl_reward_coef=0.2 advantage=dr_grpo temperature=0.8 "
             "minibatches=2 epochs=2")
KL_TOKENS = KL_REWARD.replace("dr_grpo", "reinforce++")
BOUNDS = "entropy_coef=0.2 correction_low=0.7 correction_high=1.2"
TRUNCATE = f"grpo group=3 steps=2 engine_correction=truncate kl_loss_coef=0.3 {BOUNDS}"
MASK = TRUNCATE.replace("truncate", "mask")
ENTROPY = "grpo group=3 steps=2 entropy_coef=0.3"
ADAMW = "grpo group=3 steps=3 max_grad_norm=0.01 weight_decay=0.1 betas=(0.8, 0.95)"
LORA = "grpo group=3 steps=1 lora_rank=2 kl_loss_coef=0.3 minibatches=2 epochs=2"
TARGETS = ("grpo group=3 steps=2 lora_rank=2 lora_alpha=1.0 lora_targets=('q_proj', 'down_proj') "
           "kl_reward_coef=0.2")
AUX = "grpo group=3 steps=1 experts router_aux_coef=0.3 minibatches=2 epochs=2"
FREEZE = "grpo group=3 steps=2 experts freeze_router=True checkpointing=True"
VISION = "vision.py::test_the_update_is_the_formula_on_any_ranks_and_budgets"
PICTURES = "vision.py::test_ids_are_those_of_the_processor"
PPO = "ppo group=1 steps=2"
PPO_ONE_ROW = "ppo group=1 steps=1 minibatches=30"
PPO_MANY = f"ppo group=1 steps=1 aggregation=sequence entropy_coef=0.2 temperature=0.7 {TIGHT}"
PPO_KL = "ppo group=1 steps=1 gamma=0.95 lam=1.0 kl_reward_coef=0.2 minibatches=2 epochs=2"
PPO_WARM = "ppo group=1 steps=2 overlong_buffer=8 temperature=1.4 kl_reward_coef=0.3"
VALUE_CLIP = "ppo group=1 steps=1 value_clip=0.02 epochs=3 clip_low=0.03 clip_high=0.05"
PPO_TRUNCATE = f"ppo group=1 steps=2 engine_correction=truncate {BOUNDS}"
PPO_MASK = PPO_TRUNCATE.replace("truncate", "mask")
PPO_PROMPT = PPO_MANY.replace("sequence", "prompt")
PPO_SEQUENCES = ("ppo group=2 steps=2 engine_correction=sequence_mask correction_low=0.7 "
                 "correction_high=1.2")
EPOCHS_2 = "minibatches=2 epochs=2"
SAPO = f"grpo group=3 steps=1 loss=variants/sapo.py:sapo aggregation=sequence {EPOCHS_2}"
GMPO = f"grpo group=3 steps=1 loss=variants/gmpo.py:gmpo aggregation=sequence {TIGHT}"
GMPO_TOKENS = f"grpo group=3 steps=1 loss=variants/gmpo.py:gmpo advantage=reinforce++ {TIGHT}"
DPPO = ("grpo group=3 steps=1 loss=variants/dppo.py:dppo clip_low=0.01 clip_high=0.02 "
        f"{EPOCHS_2}")
IPO = DPPO.replace("dppo", "ipo")
IPO_MASK = ("grpo group=3 steps=1 loss=variants/ipo.py:ipo engine_correction=mask "
            f"correction_low=0.7 correction_high=1.2 {EPOCHS_2}")
KL_RATIO = KL.replace("k1", "k3_ratio")
PROMPT = f"grpo group=3 steps=1 loss=clip aggregation=prompt {TIGHT}"
GDPO = ("grpo group=3 steps=1 advantage=variants/gdpo.py:gdpo reward=('exact', 'short:0.5') "
        f"overlong_filter=True {EPOCHS_2}")
LITE = ("grpo group=3 steps=2 advantage=variants/lite_ppo.py:lite_ppo overlong_buffer=8 "
        "advantage_eps=0.1")
MAXRL = "grpo group=3 steps=2 advantage=variants/maxrl.py:maxrl"
OPSM = f"grpo group=3 steps=1 loss=variants/opsm.py:opsm entropy_coef=0.2 {EPOCHS_2}"
SEQUENCES = ("grpo group=3 steps=1 engine_correction=sequence_mask kl_loss_coef=0.3 "
             f"correction_low=0.7 correction_high=1.2 {EPOCHS_2}")
SFT, SFT_MANY = "sft group=1 steps=2", "sft group=1 steps=2 minibatches=7 epochs=2 temperature=0.7"
DISTILL = "distill group=3 steps=2 teacher=x"
DISTILL_COEF = ("distill group=3 steps=1 teacher=x distill_coef=0.3 temperature=0.7 "
                f"{EPOCHS_2}")
DISTILL_ONE = f"distill group=1 steps=1 teacher=x dual_clip=1.1 aggregation=sequence {TIGHT}"
EXACT = ("distill group=3 steps=1 teacher=x divergence=jsd distill_coef=0.5 head_chunk=5 "
         f"{EPOCHS_2}")
REWARDED = ("distill group=3 steps=1 teacher=x divergence=none temperature=1.5 reward=('exact',) "
            f"reward_coef=2.0 {TIGHT}")
HINT = "distill group=3 steps=2 divergence=none teacher_prompt={question} {answer}"
HINT_EXACT = HINT.replace("none", "jsd")
HINT_LORA = ("distill group=3 steps=1 divergence=none lora_rank=2 aggregation=prompt "
             f"teacher_prompt={{question}} {{answer}} {EPOCHS_2}")
CORRECTED = ("distill group=3 steps=2 teacher=x engine_correction=truncate reward=('exact',) "
             "reward_coef=2.0 correction_low=0.7 correction_high=1.2")
DIVERGENCE = "distill.py::test_a_divergence_is_its_definition_and_its_gradient_autograds"
CHUNKS = "distill.py::test_chunks_give_the_same[jsd]"
LEARNED = "sft.py::test_what_is_learned_is_what_the_template_says[qwen2.5]"
NO_END = "sft.py::test_a_template_that_ends_no_turn_is_learned_with_the_header_that_follows"
TWO_MESSAGES = "sft.py::test_prompt_and_answer_are_a_chat_of_two_messages"

REFILL = "loop.py::test_dynamic_sampling_trains_on_groups_whose_rewards_differ"
WATCHED = "loop.py::test_a_loop_gives_each_part_what_it_needs[sft]"
RATES = "loop.py::test_ppo_passes_rates_and_the_adapted_coefficient"
PACKED = "packing.py::test_a_packed_input_is_its_rows[qwen2]"
APART = "packing.py::test_a_completion_sees_no_other"
KERNEL = "packing.py::test_the_gpu_kernel_gets_the_same_attention[None]"
KERNEL_WINDOW = "packing.py::test_the_gpu_kernel_gets_the_same_attention[5]"
WINDOW = "packing.py::test_windows_and_soft_caps_are_packed"
START = "lora.py::test_adapters_start_alike_on_any_layout"
SAMPLED = "turns.py::test_the_mask_is_true_for_exactly_the_ids_of_the_engine"
BRIDGE = "turns.py::test_the_bridge_is_what_the_template_puts_between_turns"
ASKED = "turns.py::test_a_turns_prompt_begins_with_all_ids_before_it"
CUT = "turns.py::test_a_turn_that_is_cut_ends_its_episode"
FAILS = "turns.py::test_a_reply_that_fails_or_does_not_fit_costs_its_episode"

WIRINGS = [
    # ---- grpo.py: which log-probs, at which temperature
    ("grpo.py", "lambda m: reference.logprobs(m, args.temperature)[0]",
     "lambda m: reference.logprobs(m, 1.0)[0]", COLD),
    ("grpo.py", "lambda m: policy.logprobs(m, args.temperature)[0]",
     "lambda m: policy.logprobs(m, 1.0)[0]", KL_REWARD),
    ("grpo.py", "policy.logprobs(micro, args.temperature, entropy_mode)",
     "policy.logprobs(micro, 1.0, entropy_mode)", COLD),
    ("grpo.py", "micro.of_tokens(old_logprobs) if args.needs_old_logprobs else logp.detach()",
     "logp.detach()", UPDATES),
    # ---- grpo.py: advantages, and what is in the loss
    ("grpo.py", "eps=args.advantage_eps, scored", "eps=1e-6, scored",
     "grpo group=3 steps=2 advantage=grpo advantage_eps=0.3"),
    ("grpo.py", "            batch.lengths, args.max_tokens, args.overlong_buffer)",
     "            batch.tokens, args.max_tokens, args.overlong_buffer)", GRPO),
    ("grpo.py", "scored=batch.scored)  # (N,)", "scored=loss_tokens > 0)  # (N,)", FILTER),
    ("grpo.py", "1 if args.advantage == \"reinforce++\" else 2", "2", REINFORCE),
    ("grpo.py", "batch.truncated & args.overlong_filter", "batch.truncated & False", FILTER),
    ("grpo.py", "return batch.tokens * keep, {", "return batch.lengths * keep, {", DEFAULT),
    ("grpo.py", "return losses.whiten(advantages, in_loss)",
     "return losses.whiten(advantages, in_loss | True)", BASELINE),
    ("grpo.py", "losses.whiten(losses.rewards_to_go(rewards, batch.tokens), in_loss)",
     "losses.rewards_to_go(rewards, batch.tokens)", REINFORCE),
    # ---- grpo.py: the KL in the reward and in the loss, the entropy
    ("grpo.py", "batch.of_tokens(kl)", "batch.of_tokens(kl * in_loss)", FILTER),
    ("grpo.py", "kl_estimate(old_logprobs, ref_logprobs, kind",
     "kl_estimate(ref_logprobs, old_logprobs, kind", KL_REWARD),
    ("grpo.py", "batch.of_tokens(kl)", "batch.of_tokens(kl) / batch.tokens", KL_REWARD),
    ("grpo.py", "kl_coef=args.kl_reward_coef)", "kl_coef=-args.kl_reward_coef)", KL_TOKENS),
    ("grpo.py", "loss + args.kl_loss_coef * kl", "loss - args.kl_loss_coef * kl", KL),
    ("grpo.py", "loss + args.kl_loss_coef * kl", "loss + args.kl_loss_coef * kl * "
     "(1 if args.engine_correction == \"none\" else factors)", TRUNCATE),
    ("grpo.py", "kind=args.kl_estimator", "kind=\"k3\"", KL),
    ("grpo.py", "loss - args.entropy_coef * entropy", "loss + args.entropy_coef * entropy",
     TRUNCATE),
    ("grpo.py", "\"grad\" if args.entropy_coef else \"value\"", "\"value\"", TRUNCATE),
    ("grpo.py", "args.kl_loss_coef or args.entropy_coef)", "args.kl_loss_coef)", ENTROPY),
    ("grpo.py", " > 0) | acts", " > 0)", TRUNCATE),
    # ---- grpo.py: the update
    ("running/loss_flags.py", "\"clip_low\": self.clip_low, \"clip_high\": self.clip_high,",
     "\"clip_low\": self.clip_high, \"clip_high\": self.clip_low,", GRPO),
    ("running/loss_flags.py", "\"dual_clip\": self.dual_clip}", "\"dual_clip\": None}", EPOCHS),
    ("grpo.py", " or args.loss not in losses.LOSSES", "", IPO),
    ("grpo.py", "policy_loss = loss_flags.loss_of(args.loss)",
     "policy_loss = losses.clip_loss", GMPO),
    ("grpo.py", "engine_logprobs=engine,", "engine_logprobs=old,", OPSM),
    ("grpo.py", "loss, details = loss * factors, details | found", "details |= found", TRUNCATE),
    ("grpo.py", "old=old)", "old=logp.detach())", KL_RATIO),
    ("grpo.py", "prompts=prompts[rows]", "prompts=None", PROMPT),
    ("grpo.py", "(part.weight, batch.part(part.name))", "(1.0, batch.part(part.name))", GDPO),
    ("grpo.py", "trained=loss_tokens > 0)", "trained=batch.scored)", GDPO),
    ("grpo.py", "scored=batch.scored, eps=args.advantage_eps, parts",
     "scored=batch.scored, eps=1e-6, parts", LITE),
    ("grpo.py", "loss_tokens[rows], args.aggregation", "loss_tokens.max() * (loss_tokens[rows] > 0)"
     ", args.aggregation", TOKEN),
    ("grpo.py", "batch.minibatches(args.minibatches, args.epochs)",
     "batch.minibatches(args.epochs, args.minibatches)", EPOCHS),
    ("grpo.py", "batch.minibatches(args.minibatches, args.epochs)",
     "batch.minibatches(args.minibatches, 1)", EPOCHS),
    ("grpo.py", "if not rows:", "if False:", ONE_ROW),
    ("grpo.py", "GAP: (old - engine).abs()", "GAP: (logp - engine).abs()", UPDATES),
    # ---- grpo.py: --dynamic_sampling
    ("grpo.py", "kept, refused = refill(run, args, samples)",
     "_, refused = refill(run, args, samples)", REFILL),
    ("grpo.py", "start = looked_at + g * args.group", "start = g * args.group", REFILL),
    ("grpo.py", "metrics[\"batch/dropped\"] += sum(refused.values())", "pass", REFILL),
    ("grpo.py", "torch.nonzero(differs).flatten().tolist()", "range(len(differs))", REFILL),
    ("grpo.py", "metrics = sample_metrics(samples, run", "metrics = sample_metrics(kept, run",
     REFILL),
    ("sft.py", "        run.log.watch(metrics)  # gradients that are not finite\n", "", WATCHED),
    # ---- ppo.py: log-probs, rewards, advantages
    ("ppo.py", "lambda m: reference.logprobs(m, args.temperature)[0]",
     "lambda m: reference.logprobs(m, 1.0)[0]", PPO_WARM),
    ("ppo.py", "lambda m: policy.logprobs(m, args.temperature)[0]",
     "lambda m: policy.logprobs(m, 1.0)[0]", PPO_MANY),
    ("ppo.py", "loss_tokens = batch.tokens * batch.scored", "loss_tokens = batch.tokens", PPO),
    ("ppo.py", "if args.overlong_buffer:", "if False:", PPO_WARM),
    ("ppo.py", "batch.tokens, kl_coef=kl_coef)", "batch.tokens, kl_coef=args.kl_reward_coef)",
     "ppo group=1 steps=3 kl_reward_coef=0.3 kl_target=0.01 kl_horizon=20"),
    ("ppo.py", "gamma=args.gamma, lam=args.lam", "gamma=args.lam, lam=args.gamma",
     "ppo group=2 steps=2 gamma=0.9 lam=0.8"),
    ("ppo.py", "advantages = losses.whiten(advantages, in_loss)", "pass", PPO),
    ("ppo.py", "advantages = losses.whiten(advantages, in_loss)",
     "advantages = losses.whiten(advantages, in_loss | True)", PPO),
    ("ppo.py", "advantages = losses.whiten(advantages, in_loss)",
     "advantages = losses.whiten(advantages, in_loss); returns = advantages + values", PPO),
    ("ppo.py", "kind=\"k1\")[in_loss]", "kind=\"k3\")[in_loss]", PPO_KL),
    ("ppo.py", "kind=\"k1\")[in_loss]", "kind=\"k1\")", PPO_KL),
    ("ppo.py", "critic_quality(values[in_loss], returns[in_loss])",
     "critic_quality(values, returns)", PPO),
    # ---- ppo.py: the updates
    ("ppo.py", "V, micro.of_tokens(values), R,",
     "V, R, micro.of_tokens(values),", "ppo group=1 steps=2 lam=0.0 value_clip=None"),
    ("ppo.py", "clip=args.value_clip", "clip=None", VALUE_CLIP),
    ("ppo.py", "clip=args.value_clip", "clip=0.2", VALUE_CLIP),
    ("ppo.py", "**args.bounds)", "clip_low=0.2, clip_high=0.2, dual_clip=None)",
     "ppo group=1 steps=1 dual_clip=1.1 epochs=3"),
    ("ppo.py", "critic.step(critic_lr)", "critic.step(lr)", PPO),
    ("ppo.py", "loss_tokens[rows], args.aggregation", "loss_tokens[rows], \"token\"", PPO_MANY),
    ("ppo.py", "rows = [r for r in rows if loss_tokens[r]]", "pass", PPO_ONE_ROW),
    ("ppo.py", "prompts=prompts[rows]", "prompts=prompts[rows] * 0", PPO_PROMPT),
    ("ppo.py", "loss, details = loss * factors, details | found", "details |= found",
     PPO_TRUNCATE),
    ("ppo.py", "loss - args.entropy_coef * entropy", "loss + args.entropy_coef * entropy",
     PPO_MANY),
    ("ppo.py", "loss - args.entropy_coef * entropy", "loss - args.entropy_coef * entropy * "
     "(1 if args.engine_correction == \"none\" else factors)", PPO_TRUNCATE),
    ("ppo.py", "\"grad\" if args.entropy_coef else \"value\"", "\"value\"", PPO_MANY),
    ("ppo.py", "        if lr == 0:\n            continue\n", "",
     "ppo group=1 steps=2 critic_warmup_steps=1"),
    ("ppo.py", "step >= args.critic_args.critic_warmup_steps",
     "step > args.critic_args.critic_warmup_steps", RATES),
    ("ppo.py", "n=len(samples)", "n=args.batch", RATES),
    # ---- variants/
    ("variants/sapo.py", "TAU_OTHER).masked_fill(A > 0, TAU_POSITIVE)", "TAU_POSITIVE)", SAPO),
    ("variants/gmpo.py", "log_r.clamp(max=clip_high), log_r.clamp(min=-clip_low)",
     "log_r.clamp(min=-clip_low), log_r.clamp(max=clip_high)", GMPO),
    ("variants/gmpo.py", "losses.row_mean(clipped,", "losses.row_mean(log_r,",
     GMPO_TOKENS),
    ("variants/dppo.py", "(A < 0) & (moved < -clip_low)", "(A < 0) & (moved < -clip_high)", DPPO),
    ("variants/dppo.py", "moved, r = logp.exp() - old.exp()", "moved, r = logp - old", DPPO),
    ("variants/ipo.py", "drop = (moved > clip_high) | (moved < -clip_low)",
     "drop = ((moved > clip_high) & (A > 0)) | ((moved < -clip_low) & (A < 0))", IPO),
    ("variants/ipo.py", "torch.where(drop, 0, -r * A) + COEF * (logp - old).square()",
     "torch.where(drop, 0, -r * A + COEF * (logp - old).square())", IPO),
    ("variants/opsm.py", "engine_logprobs - logp.detach()", "logp.detach() - engine_logprobs",
     OPSM),
    ("variants/opsm.py", "keep = (A >= 0) | (moved", "keep = (moved", OPSM),
    ("variants/opsm.py", "return loss * keep,", "return loss,", OPSM),
    ("variants/opsm.py", "logp.detach(), row", "logp.detach() * 0.9, row", OPSM),
    ("variants/lite_ppo.py", "batch_std(rewards, scored)", "batch_std(rewards, scored | True)",
     LITE),
    ("variants/maxrl.py", "n.clamp(min=1)", "n.clamp(min=3)", MAXRL),
    ("variants/gdpo.py", "total += weight * losses", "total += losses", GDPO),
    ("variants/gdpo.py", "losses.whiten(total, trained)", "total", GDPO),
    # ---- losses.py: the factors and weights since 2025
    ("losses.py", "capped_ratio(logp, old) * (d - 1)",
     "capped_ratio(logp, old).detach() * (d - 1)", KL_RATIO),
    ("losses.py", "log_ratio = row_sum(log_ratio,", "log_ratio = row_mean(log_ratio,", SEQUENCES),
    ("losses.py", "\"prompt\": sums[prompts] * (sums > 0).sum()",
     "\"prompt\": sums[prompts] * len(sums)", PROMPT),
    # ---- losses.py, model.py: what both scripts call
    ("running/loss_flags.py", "\"low\": self.correction_low,", "\"low\": 0.5,", MASK),
    ("running/loss_flags.py", "\"high\": self.correction_high}", "\"high\": 2.0}", PPO_MASK),
    ("grpo.py", "old, engine, micro.row", "engine, old, micro.row", TRUNCATE),
    ("grpo.py", "loss, details = loss * factors, details | found",
     "loss, details = loss * factors.clamp(max=1), details | found", IPO_MASK),
    ("ppo.py", "old, engine, micro.row", "engine, old, micro.row", PPO_SEQUENCES),
    ("losses.py", "/ row_sum(torch.ones_like(x), row, rows)", "/ len(x) * rows", GSPO),
    ("trainer/model.py", "weight_decay=args.weight_decay", "weight_decay=0.0", ADAMW),
    ("trainer/model.py", "betas=args.betas", "betas=(0.9, 0.999)", ADAMW),
    ("trainer/model.py", "kind(lm, args.head_chunk).eval()", "kind(lm, args.head_chunk).train()",
     "details.py::test_a_dropout_of_the_config_is_off"),
    ("trainer/weights.py", "if index in names:", "if False:",
     "weights.py::test_a_sentence_names_the_file_and_the_tensor"),
    ("trainer/weights.py", "if torch.equal(one, other):", "if one is not None:",
     "weights.py::test_a_sentence_names_the_file_and_the_tensor"),
    # ---- pictures/
    ("trainer/batch.py", "if last != (row.prompt_ids, row.pictures):",
     "if last is None or last[0] != row.prompt_ids:",
     "vision.py::test_neighbours_with_other_pictures_are_other_prompts"),
    ("pictures/seeing.py", "[start + place for", "[place for", VISION),
    ("pictures/seeing.py", "part.requires_grad_(args.train_vision)", "pass", VISION),
    ("pictures/seeing.py", "for row in owners.values():", "for row in micro.rows:", VISION),
    ("pictures/rows.py", 'short.count(eyes.token) != len(sources)', "False",
     "vision.py::test_a_bad_row_is_one_sentence_with_its_number"),
    ("trainer/model.py", "for part in (seeing.text_of(lm), *seeing.tower_of(lm))",
     "for part in [lm]", "vision.py::test_text_and_vision_layers_are_sharded_and_exported"),
    ("preflight/inputs.py", "theirs.kind != eyes.kind", "theirs.token != eyes.token",
     "vision.py::test_a_teacher_must_see_as_the_model_does"),
    ("running/worst_case.py", "times = max(1, tokens // len(seen.prompt_ids))", "times = 1",
     "vision.py::test_the_worst_case_has_as_many_pictures_as_fit"),
    # ---- batch.py
    ("trainer/batch.py", "if last != (row.prompt_ids, row.pictures):", "if i == 0:", DEFAULT),
    ("trainer/batch.py", "if last != (row.prompt_ids, row.pictures):", "if True:", PACKED),
    ("trainer/batch.py", "has_grad == (learns", "has_grad != (learns", DEFAULT),
    ("trainer/batch.py", "if part or has_grad:", "if has_grad:", DEFAULT),
    ("trainer/batch.py", "np.zeros(1, bool))", "np.ones(1, bool))", ONE_ROW),
    ("trainer/batch.py", "torch.from_numpy(c.sampled) for c in done",
     "torch.from_numpy(c.sampled | True) for c in done",
     "turns.py::test_only_sampled_tokens_are_targets"),
    ("grpo.py", "(old - engine).abs()", "(old - engine)", DEFAULT),
    ("trainer/batch.py", "(weights * values).sum()", "values.sum()", SEQUENCE),
    ("trainer/batch.py",
     "self.weight + weights.sum()", "self.weight + len(weights)", SEQUENCE),
    ("trainer/batch.py", "[batch.starts[row] for row in rows]", "[0 for row in rows]", UPDATES),
    ("trainer/batch.py", "to_device(x[self.rows], self.device)",
     "to_device(x[:len(self.rows)], self.device)", SEQUENCE),
    ("trainer/batch.py", "sum(1 + (c.sampled[1:]", "sum((c.sampled[1:]", FAILS),
    # ---- packing.py
    ("trainer/packing.py", "Segment(size, n, start, p)", "Segment(size, n, size - p, p)", APART),
    ("trainer/packing.py", "Segment(size, n, start, p)", "Segment(size, n, start, p - 1)", PACKED),
    ("trainer/packing.py",
     "prefix_start + torch.arange(prefix)", "prefix_start + 1 + torch.arange(prefix)",
     PACKED),
    ("trainer/packing.py", "torch.arange(s.prefix, s.prefix + s.length)",
     "torch.arange(s.start, s.start + s.length)", DEFAULT),
    ("trainer/packing.py", "done + real.flatten().nonzero().flatten()",
     "done + torch.arange(int(real.sum()))", PACKED),
    ("trainer/packing.py", ".tril(prefix)", ".tril(prefix - 1)", PACKED),
    ("trainer/packing.py", "is_causal=mask is None", "is_causal=False", PACKED),
    ("trainer/packing.py", "mask.triu(prefix - window + 1)", "mask.triu(prefix - window)", WINDOW),
    ("trainer/packing.py", "window - 1\n", "window\n", KERNEL_WINDOW),
    ("trainer/packing.py", "torch.arange(s.prefix_start, s.prefix_start + s.prefix)",
     "torch.arange(s.start - s.prefix, s.start)", KERNEL),
    ("trainer/packing.py", "cap * torch.tanh(", "torch.tanh(", WINDOW),
    # ---- lora.py
    ("trainer/lora.py", "self.lora_alpha / self.lora_rank", "2.0", TARGETS),
    ("trainer/lora.py", "bool({name, \"all-linear\"} & {*self.lora_targets})", "True", TARGETS),
    ("trainer/lora.py", "layer.scale = 0", "pass", LORA),
    ("trainer/lora.py", "layer.scale = scale", "pass", LORA),
    ("trainer/lora.py", "F.linear(x, self.lora_A) * self.scale", "F.linear(x, self.lora_A)", LORA),
    ("trainer/lora.py", "lm.requires_grad_(False)", "pass", LORA),
    ("trainer/lora.py", "f\"{seed} {name}\"", "f\"{seed}\"", START),
    ("trainer/lora.py", "if name.endswith(\"A\"):", "if True:", START),
    ("trainer/lora.py", "full.shape[1] ** 0.5", "full.shape[0] ** 0.5", START),
    # ---- rewards.py and its workers
    ("rewards.py", "self.args.reward_timeout * len(batch[0])", "self.args.reward_timeout",
     "rewards.py::test_a_group_has_the_time_of_all_its_completions"),
    ("rewards.py", "self.socket.settimeout(args.reward_timeout)", "pass",
     "rewards.py::test_a_worker_that_stopped_reading_costs_a_completion"),
    ("rewards.py", "os.killpg(self.process.pid, signal.SIGKILL)", "self.process.kill()",
     "rewards.py::test_what_a_reward_forks_dies_with_its_worker"),
    ("rewards.py", "--{kind} {spec}: it must be", "--reward {spec}: it must be",
     "rewards.py::test_a_mistake_names_its_own_flag"),
    ("scoring/worker.py", "PAUSE * 2 ** (retry - 1)", "PAUSE * retry",
     "judges.py::test_what_raises_or_is_late_is_tried_again_after_pauses_that_double"),
    ("scoring/worker.py", "ctypes.CDLL(None).prctl(1, signal.SIGKILL)", "pass",
     "rewards.py::test_workers_die_with_the_trainer"),
    ("scoring/replies.py", "json.dumps(text, ensure_ascii=False)", "json.dumps(text)",
     "toolcalls.py::test_hostile_calls_cost_themselves_only"),
    # ---- turns.py
    ("chats/turns.py", "np.zeros(len(ids)), False)", "np.zeros(len(ids)), True)", SAMPLED),
    ("chats/turns.py", "c.logprobs, True)", "c.logprobs, False)", SAMPLED),
    ("chats/turns.py", "found[found.index(last) + 1:]", "found", BRIDGE),
    ("chats/turns.py", "ends and ends == self.ends and text.lstrip().startswith(ends[0])",
     "last in found",
     "turns.py::test_an_end_inside_the_reply_is_not_the_turns_end"),
    ("chats/turns.py", "prompt_ids + it.completion.ids.tolist()", "prompt_ids", ASKED),
    ("chats/turns.py", "seed(it.number, turn),", "seed(it.number, 0),", ASKED),
    ("chats/turns.py", "self.max_tokens - len(it.completion.ids)", "self.max_tokens", ASKED),
    ("chats/turns.py", "it.completion.truncated = c.truncated", "pass", CUT),
    ("chats/turns.py", "if not it.completion.truncated]", "]", CUT),
    ("chats/turns.py", ">= self.max_tokens", "> self.max_tokens",
     "turns.py::test_one_token_must_have_room_after_a_reply"),
    ("chats/turns.py",
     "it.completion.failed = score.total is None", "pass", FAILS),
    ("chats/turns.py", "c.turns += messages", "pass", FAILS),
    ("chats/turns.py", "bool(messages) and len(c.ids)", "len(c.ids)",
     "turns.py::test_one_token_must_have_room_after_a_reply"),
    ("chats/turns.py", "(last and not self.stateful)", "last",
     "environments.py::test_an_environment_sees_the_last_allowed_turn"),
    ("chats/turns.py", "turn == self.max_turns", "turn > self.max_turns",
     "turns.py::test_no_episode_has_more_turns_than_allowed"),
    # ---- sft.py
    ("sft.py", "loss, w = -logp", "loss, w = logp", SFT),
    ("sft.py", "batch.tokens[rows], \"token\"", "batch.lengths[rows], \"token\"", SFT),
    ("sft.py", "batch.minibatches(args.minibatches, args.epochs)",
     "batch.minibatches(args.minibatches, 1)", SFT_MANY),
    ("sft.py", "policy.logprobs(micro, args.temperature, \"value\")",
     "policy.logprobs(micro, 1.0, \"value\")", SFT_MANY),
    ("sft.py", "if not rows:", "if False:", SFT_MANY),
    # ---- distill.py
    ("distill.py", "teacher_logprobs.double() - old_logprobs.double()",
     "old_logprobs.double() - teacher_logprobs.double()", DISTILL),
    ("distill.py", "lambda m: reference.logprobs(m, args.temperature)[0]",
     "lambda m: reference.logprobs(m, 1.0)[0]", DISTILL_COEF),
    ("distill.py", "lambda m: policy.logprobs(m, args.temperature)[0]",
     "lambda m: policy.logprobs(m, 1.0)[0]", DISTILL_COEF),
    ("distill.py", "advantages += args.distill_coef * gains", "advantages += gains", DISTILL_COEF),
    ("distill.py", "loss + args.distill_coef * divergence[0]", "loss + divergence[0]", EXACT),
    ("distill.py", " > 0) | exact", " > 0)", EXACT),
    ("distill.py", "if args.divergence == \"none\":", "if True:", EXACT),
    ("distill.py", "args.reward_coef * of_group", "of_group", REWARDED),
    ("distill.py", "micro.row, **args.bounds)",
     "micro.row, clip_low=0.2, clip_high=0.2, dual_clip=None)",
     REWARDED),
    ("distill.py", "micro.row, **args.bounds)",
     "micro.row, **args.bounds | {\"dual_clip\": None})", DISTILL_ONE),
    ("distill.py", "seen.score(world", "batch.score(world", HINT),
    ("distill.py", "Micro(batch, theirs.rows", "Micro(seen, theirs.rows", HINT),
    ("distill.py", "beside(reference, theirs", "beside(reference, micro", HINT_EXACT),
    ("distill.py", "prompts=torch.tensor(rows) // args.group", "prompts=torch.tensor(rows)",
     HINT_LORA),
    ("distill.py", "loss, details = loss * factors, details | found", "details |= found",
     CORRECTED),
    # ---- teacher.py
    ("trainer/logprobs.py", "p * (logp - logq - of_p", "p * (logq - logp - of_p",
     f"{DIVERGENCE}[reverse_kl]"),
    ("trainer/logprobs.py", "\"reverse_kl\": logq, \"forward_kl\": logp",
     "\"reverse_kl\": logp, \"forward_kl\": logq", f"{DIVERGENCE}[forward_kl]"),
    ("trainer/logprobs.py", "gradient = p - q", "gradient = q - p", f"{DIVERGENCE}[forward_kl]"),
    ("trainer/logprobs.py", "(found + of_p) / 2", "found + of_p", f"{DIVERGENCE}[jsd]"),
    ("trainer/logprobs.py", "teacher._replace(hidden=other)", "teacher", CHUNKS),
    ("trainer/logprobs.py", "divergence(logits / temperature, theirs", "divergence(logits, theirs",
     REWARDED.replace("none", "reverse_kl")),
    ("chats/teacher.py",
     "temperature / model.scale", "1.0", REWARDED.replace("none", "reverse_kl")),
    # ---- chats.py
    ("chats/targets.py", "marks = [weight] * len(new)", "marks = [True] * len(new)",
     LEARNED),
    ("chats/targets.py", "len(text)) + len(end) for", "len(text)) for", LEARNED),
    ("chats/targets.py", "longer[:min(places, default=None)]", "longer",
     LEARNED.replace("qwen2.5", "phi 3")),
    ("chats/targets.py", "add_generation_prompt=not said", "add_generation_prompt=False", LEARNED),
    ("chats/targets.py", "marks[0], is_open = counts, False", "is_open = False", NO_END),
    ("chats/targets.py",
     "found.append(end if end in eos_ids else eos_ids[0])", "found.append(eos_ids[0])",
     NO_END),
    ("chats/targets.py", "text += message[\"content\"] + end", "text += message[\"content\"]",
     TWO_MESSAGES),
    ("chats/targets.py", "len(row.target[0]) <= args.max_tokens", "True",
     "sft.py::test_longer_chats_are_left_out_and_counted"),
    ("data.py", "if args.system is not None:", "if False:",
     "sft.py::test_a_system_message_stands_before_the_chat"),
    ("chats/targets.py", "len(row.target[0]) <= args.max_tokens",
     "len(row.target[0]) < args.max_tokens", "sft.py::test_longer_chats_are_left_out_and_counted"),
    ("data.py", "if value[field.name] is not None}", "}",
     "rows.py::test_what_is_learned_does_not_depend_on_how_rows_are_stored[parquet]"),
    ("data.py", "{\"tools\": own} if own else {}", "{}",
     "rows.py::test_schemas_of_a_row_are_in_its_prompt"),
    ("chats/targets.py", "and \"weight\" not in message", "",
     "rows.py::test_a_turn_of_weight_0_is_not_learned[tokenizer0-weight-0]"),
    ("data.py", "cache_dir=cache if here", "cache_dir=None if here",
     "data.py::test_a_folder_is_never_served_from_a_cache_and_needs_none"),
    ("chats/teacher.py", "flag=\"--teacher_prompt\"", "flag=\"--prompt_template\"",
     "data.py::test_a_template_that_names_no_column_is_refused_by_its_flag"),
    ("chats/targets.py", "if whole[:len(ids)] == ids:", "if True:",
     "sft.py::test_a_turn_has_ids_of_its_own_where_a_tokenizer_would_join"),
    # ---- carry.py
    ("chats/carry.py", "self.ready()[:self.args.batch]", "self.ready()[-self.args.batch:]",
     "carry.py::test_a_step_has_the_prompts_that_started_first_of_those_that_have_ended"),
    ("chats/carry.py", "prompt.position, i, *begun)", "prompt.position, i)",
     "carry.py::test_a_step_has_the_prompts_that_started_first_of_those_that_have_ended"),
    ("chats/carry.py", "min(self.flags.carry_tokens, a.max_tokens - len(c.ids))",
     "self.flags.carry_tokens",
     "carry.py::test_a_completion_never_has_more_than_max_tokens_and_is_then_truncated"),
    ("chats/carry.py", "np.full(len(more.ids), self.step, np.int32)",
     "np.full(len(more.ids), 0, np.int32)",
     "carry.py::test_a_step_has_the_prompts_that_started_first_of_those_that_have_ended"),
    ("chats/carry.py", "c.truncated = more.truncated", "pass",
     "carry.py::test_a_step_has_the_prompts_that_started_first_of_those_that_have_ended"),
    ("chats/carry.py", "\"started\": group.started,", "\"started\": 0,",
     "carry.py::test_what_is_in_flight_comes_back_from_a_checkpoint"),
    ("chats/carry.py", ">= self.flags.carry_age", "> self.flags.carry_age",
     "carry.py::test_nothing_is_dropped_and_a_step_waits_for_what_is_too_old"),
    ("running/run.py", "state[\"flight\"] = self.carry.state()", "pass",
     "run.py::test_what_is_in_flight_is_saved_and_comes_back"),
    ("running/run.py", "self.carry.restore(state[\"flight\"], self.inputs.rows)", "pass",
     "run.py::test_what_is_in_flight_is_saved_and_comes_back"),
    ("chats/carry.py", "self.taken += [", "self.taken = [",
     "carry.py::test_metrics_are_those_of_the_tokens_that_a_step_took"),
    ("chats/carry.py", "sum(map(sum, self.rounds))", "sum(c.tokens for c in sum(self.taken, []))",
     "carry.py::test_metrics_are_those_of_the_tokens_that_a_step_took"),
    ("running/evaluate.py", "sum(totals) / len(totals)", "sum(totals) / len(samples)",
     "run.py::test_one_overall_pass_rate_and_one_of_each_source"),
    ("running/evaluate.py", "len(rewards - {None})", "len(rewards)",
     "run.py::test_the_groups_that_would_teach_nothing_are_those_without_an_advantage"),
    ("running/evaluate.py", "run.policy.logprobs(micro, args.temperature",
     "run.policy.logprobs(micro, 1.0",
     "sft.py::test_the_loss_of_held_out_rows_has_the_temperature_of_the_loss_that_is_learned"),
    ("running/loss_flags.py", "updates = args.minibatches *", "updates = args.update_tokens *",
     "variants.py::test_reinforce_makes_one_update_of_a_rollout"),
    ("pictures/eyes.py", "ImageOps.exif_transpose(image)", "image",
     "vision.py::test_a_picture_is_upright_as_transformers_opens_it"),
    ("running/same_policy.py", "return not world.any_rank(not now.any())", "return True",
     "seams.py::test_an_engine_is_compared_in_a_step_that_has_tokens_of_its_own"),
    ("running/same_policy.py", "torch.from_numpy(c.steps == step)",
     "torch.ones(c.tokens, dtype=torch.bool)",
     "carry.py::test_the_engine_is_compared_where_it_has_the_policy_of_now"),
    ("preflight/plan.py", "most = max(self.in_flight * a.group", "most = max(full * a.group",
     "carry.py::test_the_plan_knows_what_is_in_flight"),
    # ---- preflight
    ("preflight/inputs.py", '"eval_data", 0,', '"eval_data", args.seed,',
     "plan.py::test_held_out_rows_do_not_depend_on_the_seed"),
    ("running/args.py", 'keep: Count = 2', 'keep: int = 2',
     "plan.py::test_a_rule_and_a_change_that_ends_it"),
    ("preflight/memory.py", "self.update(phase, critic) + teacher",
     "self.score(self.shape, phase, critic) + teacher", "memory_tracker.py::test_a_few_layers"),
    ("running/worst_case.py",
     "world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist()",
     "list(peaks.values())", "memory.py::test_the_worst_case_leaves_everything_as_it_was"),
    # ---- experts.py
    ("trainer/experts.py", "weights / weights.sum(-1, keepdim=True)", "weights", AUX),
    ("trainer/experts.py", "router_aux_coef * counts.shape[1]", "router_aux_coef", AUX),
    ("trainer/experts.py", "p.index_select(0, source) @", "p @", AUX),
    ("trainer/experts.py", "block.gate.weight.requires_grad_(False)", "pass", FREEZE),
    ("trainer/experts.py", "counts = self.world.sum(self.counts.cpu().double())",
     "counts = self.counts.cpu().double()",
     "same_update.py::test_experts_learn_the_same_on_two_ranks"),
    ("trainer/experts.py", "samples[owner].completion.routes[:prompt]",
     "samples[row].completion.routes[:prompt]",
     "same_update.py::test_experts_learn_the_same_on_two_ranks"),
    ("trainer/experts.py", "prompt:prompt + completion - 1", "prompt + 1:prompt + completion",
     "experts.py::test_recorded_routes_change_no_bit_and_other_routes_change_their_tokens"),
    ("trainer/experts.py", "-torch.xlogy(f, f).sum(1)", "torch.xlogy(f, f).sum(1)",
     "experts.py::test_the_load_of_a_layer"),
    ("rollout.py", "routes=output.routed_experts", "routes=None",
     "experts.py::test_the_engine_is_asked_for_its_experts"),
    ("rollout.py", "enable_return_routed_experts=routes", "enable_return_routed_experts=False",
     "experts.py::test_the_engine_is_asked_for_its_experts"),
    ("running/run.py", "routes=args.expert_args.replay_routing", "routes=False",
     "experts.py::test_a_run_asks_its_engine_for_them"),
    # ---- worst_case.py
    ("running/worst_case.py", "a.temperature, a.divergence)", "a.temperature, \"none\")",
     "distill.py::test_the_worst_case_has_the_divergence_too"),
    # ---- keeping
    ("running/evaluate.py", "args.eval_temperature, \"eval\"", "run.args.temperature, \"eval\"",
     "run.py::test_an_evaluation_has_its_own_temperature_and_samples"),
    ("running/evaluate.py", "(prompts, args.eval_samples", "(prompts, run.args.group",
     "run.py::test_an_evaluation_has_its_own_temperature_and_samples"),
    ("tools/export.py", "there[-1] if step is None", "there[0] if step is None",
     "run.py::test_an_export_of_what_is_not_there_is_one_sentence"),
    ("running/run.py", "self.args.run_args.keep)", "self.args.run_args.save_every)",
     "run.py::test_a_checkpoint_keeps_as_many_as_keep_says"),
    ("keeping/checkpoint.py", "lora_alpha lora_rank lora_targets", "lora_rank lora_targets",
     "resume.py::test_another_value_of_a_flag_is_refused_or_said_or_free[grpo]"),
    ("keeping/log.py", "== start and not is_evaluation(row)", "== start",
     "log.py::test_lines_after_the_resumed_step_are_dropped_and_a_torn_one_too"),
    ("keeping/files.py", "            os.fsync(file.fileno())\n", "",
     "log.py::test_what_is_renamed_into_place_was_on_the_disk_before"),
    ("dist.py", "return self.world.any_rank(self.asked)", "return self.asked",
     "run.py::test_sigterm_on_any_rank_is_agreed_on"),
    # ---- what a component hands to the next one (test_seams.py)
    ("rollout.py", "hash_seed(self.seed, purpose, owners", "hash_seed(self.seed, owners",
     "seams.py::test_a_completion_has_the_seed_of_its_run_purpose_prompt_and_number"),
    ("rollout.py", "max_tokens=r.room or self.max_tokens", "max_tokens=self.max_tokens",
     "seams.py::test_a_request_has_its_own_room_and_every_end_token"),
    ("rollout.py", "skip_special_tokens=False", "skip_special_tokens=True",
     "ends.py::test_a_stop_string_may_be_a_special_token"),
    ("data.py", "whole[:next((i + n for i in range(len(whole)) if whole[i:i + n] == ids), None)]",
     "whole", "ends.py::test_a_prompt_never_ends_in_what_a_tokenizer_appends"),
    ("data.py", "(closing + again)[:1]", "closing[:1]",
     "ends.py::test_the_next_speaker_ends_a_turn_that_the_template_does_not_end"),
    ("data.py", "if t not in closing][:1]", "if t not in closing]",
     "ends.py::test_what_begins_ends_or_pads_is_no_text_wherever_it_stands"),
    ("running/run.py", "eos_ids=inputs.ends", "eos_ids=[]",
     "seams.py::test_the_engine_gets_the_sizes_of_the_plan_and_the_seed_of_the_run"),
    ("rollout.py", "stop_token_ids=self.eos_ids", "stop_token_ids=self.eos_ids[:1]",
     "seams.py::test_a_request_has_its_own_room_and_every_end_token"),
    ("rollout.py", "self.sleep_level = min(args.sleep_level, 1)",
     "self.sleep_level = args.sleep_level",
     "seams.py::test_an_engine_that_keeps_its_base_keeps_it_asleep"),
    ("rollout.py", "self.args.tp, place)]", "self.args.tp, 0)]",
     "seams.py::test_the_ranks_of_one_engine_share_its_completions"),
    ("rollout.py", "merge=not self.adapter), adapter", "merge=True), adapter",
     "seams.py::test_an_engine_with_the_adapter_gets_the_base_without_it"),
    ("rewards.py", "size = group if run.scorer.groups else 1", "size = 1",
     "seams.py::test_a_reward_of_groups_gets_a_group_in_a_call"),
    ("rewards.py", "completion.tokens,\n", "len(completion.ids),\n",
     "seams.py::test_a_reward_sees_the_number_of_sampled_tokens"),
    ("rewards.py", "if sample.completion.failed:", "if False:",
     "seams.py::test_a_completion_whose_reply_failed_has_no_score"),
    ("rewards.py", "scorer.unscored += calls", "scorer.unscored += len(scores)",
     "seams.py::test_calls_without_a_score_are_counted_and_not_completions"),
    ("scoring/worker.py", "seconds = timeout * len(items)", "seconds = timeout",
     "seams.py::test_the_time_of_a_call_grows_with_its_completions"),
    ("data.py", "[self.seed % 2**64, epoch]", "[self.seed % 2**64, 0]",
     "seams.py::test_each_epoch_has_an_order_of_its_own"),
    ("data.py", "len(row.prompt_ids) <= limit", "len(row.prompt_ids) < limit",
     "seams.py::test_a_prompt_of_exactly_max_prompt_tokens_is_kept"),
    ("dist.py", "init_process_group(backend, timeout=limit, ", "init_process_group(backend, ",
     "seams.py::test_the_ranks_wait_as_long_as_the_flag_says"),
    ("dist.py", "Mistakes(self.gather(mistakes)[:1])", "Mistakes(mistakes[:1])",
     "seams.py::test_a_mistake_of_another_rank_is_raised_here_too"),
    ("running/run.py", "max_tokens=args.max_tokens, seed=args.seed,",
     "max_tokens=args.max_tokens, seed=0,",
     "seams.py::test_the_engine_gets_the_sizes_of_the_plan_and_the_seed_of_the_run"),
    ("running/run.py", "kv_cache=inputs.kv_cache", "kv_cache=0.0",
     "seams.py::test_the_engine_gets_the_sizes_of_the_plan_and_the_seed_of_the_run"),
    ("running/run.py", "self.args.steps if self.inputs.eval_rows",
     "self.args.steps + 1 if self.inputs.eval_rows",
     "seams.py::test_the_end_is_evaluated_once_and_saved"),
    ("running/run.py", 'self.kl_coef = state["kl_coef"]', "pass",
     "seams.py::test_a_checkpoint_has_the_state_and_a_resumed_run_takes_it"),
    ("running/run.py", '"bad_steps": self.log.bad_steps,', '"bad_steps": 0,',
     "seams.py::test_a_checkpoint_has_the_state_and_a_resumed_run_takes_it"),
    ("running/evaluate.py", "score_samples(run, samples, args.eval_samples)",
     "score_samples(run, samples, run.args.group)",
     "seams.py::test_an_evaluation_scores_the_completions_of_a_row_together"),
    ("keeping/log.py", "self.bad_steps + 1 if bad else 0", "self.bad_steps + bool(bad)",
     "seams.py::test_only_bad_steps_in_a_row_end_a_run"),
    ("preflight/memory.py", '"optimizer": 2 * trained / self.ranks}',
     '"optimizer": 2 * trained}', "seams.py::test_ranks_share_parameters_and_moments"),
    ("preflight/plan.py", "ceil_div(most * a.engine_args.tp, self.ranks)",
     "ceil_div(most, self.ranks)",
     "seams.py::test_an_engine_of_several_ranks_gets_the_requests_of_all_of_them"),
    ("trainer/model.py", "master, args.checkpointing, offload)", "master, False, offload)",
     "seams.py::test_the_layers_are_recomputed_if_the_flag_says_so"),
    ("chats/turns.py", "eos_ids, vocab, args.data_args.system)", "eos_ids, vocab, None)",
     "seams.py::test_a_reply_is_put_behind_the_system_message_of_the_run"),
]
