"""Mistakes, one at a time in a copy of the code. The test that is named for each must fail.

    python tests/mutations.py             # the rows of docs/learn/details.md, and what each changes
    python tests/mutations.py 3 17        # some rows
    python tests/mutations.py --write     # put the measured effects into the page

The tests must pass in the copy before anything is broken.
"""
import argparse
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "learn" / "details.md"
EFFECT = 2  # the cell
PRELOADED = ("pytest", "hypothesis", "torch", "torch.distributed.fsdp", "torch.utils.checkpoint",
             "torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2",
             "transformers.models.qwen3.modeling_qwen3",
             "transformers.models.llama.modeling_llama", "tyro")
LIMIT = 400  # seconds of a test; one that hangs gets a limit of its own


class Row(NamedTuple):
    file: str
    old: str  # found once in the file
    new: str
    test: str  # below tests/test_
    probe: str  # an expression: see probes.py
    effect: str  # of its value as it is and with the mistake, or of the relative difference
    limit: int = LIMIT


OFF = "gradient: {} off"
ROWS = [
    # ---- one batch, any number of ranks
    Row("grpo.py", "micro.of_rows(weights)",
        "losses.token_weights(loss_tokens[micro.rows], args.aggregation, max_tokens="
        "args.max_tokens)[micro.row] * len(micro.rows) / len(rows)",
        "details.py::test_an_update_is_the_formula", "gradient(update_tokens=77)", OFF),
    Row("dist.py", "slice(start, start + small + (rank < extra))",
        "slice(rank * small, (rank + 1) * small)",
        "dist.py::test_share_gives_every_item_once_in_order_and_evenly",
        "sum(len(range(512)[share(512, 6, rank)]) for rank in range(6))",
        "{} → {} of 512 prompts on 6 ranks"),
    Row("dist.py", "items[share(len(items), self.size, self.rank)]",
        "items[share(len(items) - len(items) % self.size, self.size, self.rank)]",
        "dist.py::test_collectives[3]",
        "len(dist.World(0, 3, 0, 3, None, None, 1.0).mine([0] * 8))",
        "8 completions on 3 ranks: rank 0 has {} → {}"),
    Row("dist.py", "pad_to_multiple(micros or [[]], rounds * ranks, [])", "micros or [[]]",
        "dist.py::test_balance_of_nothing_and_of_less_than_one_row_a_rank",
        "[len(lane) for lane in balance([(i, 4, 4) for i in range(2)], 4, 99)]",
        "micro-batches of 4 ranks for 2 rows: {} → {}"),
    Row("dist.py", "if not micros or new > room or p + c > keys:", "if prompt != last:",
        "dist.py::test_cut_keeps_the_budget_and_every_row",
        "[max(tokens(m, sizes) for m in cut(sizes, 4096)) for n in (32, 64) for sizes in "
        "[[(p, 100, 200) for p in range(8) for _ in range(n)]]]",
        "tokens of the largest micro-batch, budget 4,096, with 32 and with 64 completions per "
        "prompt: {} → {}"),
    Row("grpo.py", 'args.update_tokens, "update"', 'args.score_tokens, "update"',
        "details.py::test_the_update_has_a_budget_of_its_own",
        "largest_update()",
        "tokens of the largest update micro-batch, `--update_tokens 50 --score_tokens 170`: "
        "{} → {}"),
    Row("trainer/batch.py", "rows[share(len(rows), count, k)]",
        "rows[k * (len(rows) // count):(k + 1) * (len(rows) // count)]",
        "dist.py::test_minibatches_are_fixed_by_request_order",
        "sum(map(len, Batch(fabricate('plain', 16, group=1)).minibatches(6, 1)))",
        "{} → {} of 16 completions trained in 6 minibatches"),
    Row("trainer/model.py", "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(mesh.size()))",
        "ppo.py::test_same_update_on_any_ranks_and_budgets[float64-7-0-1e-12]",
        "gradient_on_two_ranks()", f"{OFF} on 2 ranks"),
    Row("dist.py", "return bool(self.max(torch.tensor(int(flag))))", "return flag",
        "dist.py::test_collectives[3]", "ranks.results(3, agree)",
        "rank 2 of 3 stops; who knows it: {} → {}"),
    Row("dist.py", "if len(set(phases)) > 1:", "if False:",
        "dist.py::test_ranks_that_disagree_are_both_named", "ranks.results(2, disagree)",
        "ranks that get an error: {} → {}"),
    Row("grpo.py", "if not rows:", "if False:",
        "details.py::test_a_step_without_tokens_moves_nothing", "moved_without_tokens()",
        "a step with nothing to learn moves the weights by {} → {} of the step before it"),
    # ---- tokens
    Row("trainer/batch.py", "sampled = torch.cat([torch.from_numpy(c.sampled) for c in done])",
        "sampled = torch.cat([torch.from_numpy(c.ids) != 0 for c in done])",
        "details.py::test_a_token_with_the_id_of_padding_is_trained_on", "tokens_with_loss()",
        "{} → {} of 8 sampled tokens are in the loss"),
    Row("trainer/packing.py", "[start + p - 1, *range(size, size + n)]",
        "[*range(size, size + n), size + n - 1]",
        "packing.py::test_a_packed_input_is_its_rows[qwen2]", "gradient()", OFF),
    Row("trainer/packing.py", "start + p - 1, ", "size - 1, ",
        "packing.py::test_a_packed_input_is_its_rows[qwen2]", "gradient()", OFF),
    Row("trainer/packing.py",
        "torch.arange(s.prefix, s.prefix + s.length)", "torch.arange(s.length)",
        "packing.py::test_a_packed_input_is_its_rows[qwen2]", "gradient()", OFF),
    Row("trainer/packing.py",
        ".tril(prefix)", "", "packing.py::test_a_packed_input_is_its_rows[qwen2]",
        "gradient()", OFF),
    Row("tools/float64.py",
        "if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:",
        "if False:", "packing.py::test_a_packed_input_is_its_rows[qwen2]", "gradient()", OFF),
    Row("rollout.py", "ids, logprobs, output.finish_reason",
        "ids[:-1], logprobs[:-1], output.finish_reason",
        "details.py::test_the_end_token_is_trained_on", "sampled()",
        "{} → {} of 5 sampled tokens are in the loss"),
    Row("data.py", "ids = ids if isinstance(ids, list) else [ids]",
        "ids = ids[:1] if isinstance(ids, list) else [ids]",
        "details.py::test_every_end_token_of_the_generation_config_ends_a_completion",
        "end_tokens([2, 7])", "{} → {} of 2 end tokens end a completion"),
    Row("data.py", "plain = tokenizer.chat_template is None and not finished", "plain = True",
        "data.py::test_no_second_bos", "bos()", "begin tokens of a prompt: {} → {}"),
    Row("trainer/logprobs.py", "logits = logits / temperature", "pass",
        "memory.py::test_the_chunked_head_is_exact[none-100]", "gradient(temperature=0.7)",
        f"{OFF} at `--temperature 0.7`"),
    Row("trainer/model.py",
        "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))", "pass",
        "details.py::test_log_probs_are_at_least_float32", "bfloat16_head()[0]",
        "mean error of a log-prob, bfloat16 model, vocabulary of 1,000: {} → {} nats"),
    Row("trainer/batch.py", "[torch.from_numpy(c.logprobs) for c in done])[sampled]",
        "[torch.from_numpy(c.logprobs) for c in done])[:int(sampled.sum())]",
        "turns.py::test_only_sampled_tokens_are_targets",
        "gradient(engine_correction='truncate')",
        f"{OFF} with `--engine_correction truncate` and replies"),
    # ---- from rewards to advantages
    Row("trainer/batch.py", "[r is not None for r in rewards]", "[True for r in rewards]",
        "details.py::test_an_update_is_the_formula", "gradient()", OFF),
    Row("losses.py", "scored.view(-1, group)\n",
        "torch.ones_like(scored).view(-1, group)\n",
        "losses.py::test_an_advantage_is_the_formula", "gradient()", OFF),
    Row("losses.py", "highest <= lowest",
        "torch.where(S, R, 0).std(1, keepdim=True) == 0",
        "losses.py::test_an_advantage_is_the_formula",
        "equal_rewards()",
        "three rewards of 0.1: [kept by `--dynamic_sampling`?, largest advantage with eps 0]: "
        "{} → {}"),
    Row("losses.py", "torch.where(S & ~equal, A, 0)", "torch.where(S & (~equal | (n == 1)), A, 0)",
        "losses.py::test_an_advantage_is_the_formula",
        "float(losses.group_advantages(torch.tensor([3.0]), 1, kind='rloo', eps=0.0, "
        "scored=torch.ones(1) > 0))", "advantage of a lone reward of 3, RLOO: {} → {}"),
    Row("losses.py", "A = R - (total - R) / others", "A = R - total / n.clamp(min=1)",
        "losses.py::test_rloo_is_unbiased_and_a_mean_baseline_shrinks_the_gradient",
        "gradient(samples='plain', advantage='rloo')", f"{OFF} at `--group 4`"),
    Row("losses.py", "keepdim=True) / others).sqrt()", "keepdim=True) / n.clamp(min=1)).sqrt()",
        "losses.py::test_an_advantage_is_the_formula[dtype1-grpo]",
        "gradient(samples='plain', advantage='grpo')", f"{OFF} at `--group 4`"),
    Row("grpo.py", "scored=batch.scored)  # (N,)", "scored=loss_tokens > 0)  # (N,)",
        "details.py::test_a_truncated_completion_without_loss_counts_in_its_group",
        "gradient(overlong_filter=True, samples='plain')", f"{OFF} with `--overlong_filter`"),
    Row("losses.py", "white = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()",
        "y = torch.where(among, values.double(), 0); "
        "white = (x - y.mean()) / (y.var() + 1e-8).sqrt()",
        "losses.py::test_whitening_is_the_formula_and_zero_where_all_are_equal",
        "gradient(advantage='reinforce++')",
        f"{OFF} with `--advantage reinforce++`"),
    Row("losses.py", "last = lengths.cumsum(0) - 1  # (N,): a completion",
        "last = lengths.cumsum(0).clamp(max=len(rewards) - 1)  # (N,): a completion",
        "losses.py::test_k1_in_the_reward_is_exact",
        "losses.token_rewards(torch.ones(3), None, None, torch.tensor([2, 3, 4]), kl_coef=0.0)"
        ".nonzero().flatten().tolist()",
        "places of the scores of completions of 2, 3 and 4 tokens: {} → {}"),
    Row("losses.py", "gamma * next_value[:left] - values[t]", "gamma * values[t] - values[t]",
        "losses.py::test_gae_is_the_double_sum", "gae(6, 3)", "advantages: {} off"),
    Row("losses.py", "next_value = next_advantage = rewards.new_zeros(len(lengths))",
        "next_value, next_advantage = values.roll(-1)[last], rewards.new_zeros(len(lengths))",
        "losses.py::test_gae_is_the_double_sum", "gae(6, 3)",
        "advantages of completions of 6 and 3 tokens: {} off"),
    Row("ppo.py", "advantages = losses.whiten(advantages, in_loss)",
        "advantages = losses.whiten(advantages, in_loss); returns = advantages + values",
        "details.py::test_the_critics_targets_are_returns_from_before_the_whitening",
        "critic_targets()", "the critic's targets where every reward is 1: {} → {}"),
    # ---- losses
    Row("grpo.py", "else logp.detach()", "else micro.engine_logprobs",
        "details.py::test_an_update_is_the_formula", "gradient()", OFF),
    Row("losses.py", "r.clamp(max=1 + clip_high))", "r.clamp(max=clip_high))",
        "losses.py::test_a_loss_is_the_formula_and_its_gradient[clip]", "gradient()", OFF),
    Row("losses.py", "r.clamp(1 - clip_low, dual_clip)", "r.clamp(1 - clip_low, 1 + clip_high)",
        "losses.py::test_a_loss_is_the_formula_and_its_gradient[clip]",
        "loss_gradient(losses.clip_loss)", f"{OFF} for ratios of 0.6 to 1.6"),
    Row("losses.py", "log_s = row_mean(logp - old, row, n_rows).detach()",
        "log_s = row_sum(logp - old, row, n_rows).detach()",
        "losses.py::test_a_loss_is_the_formula_and_its_gradient[gspo]",
        "loss_gradient(losses.gspo_loss, clip_low=0.9, clip_high=9.0)",
        f"{OFF}, before the bounds cut"),
    Row("losses.py", "log_r.detach().clamp(max=80).exp()", "log_r.detach().exp()",
        "losses.py::test_a_ratio_that_overflows",
        "int(torch.autograd.grad(losses.clip_loss(x := torch.full((1,), 89.0, requires_grad=True), "
        "torch.zeros(1), torch.ones(1), None, clip_low=0.2, clip_high=0.2, dual_clip=None)[0], x)"
        "[0].isnan())",
        "one clipped token with a log-ratio of 89 in float32: {} → {} gradients are nan"),
    Row("losses.py", "0.5 * torch.maximum(error, clipped_error)", "0.5 * clipped_error",
        "losses.py::test_value_loss_is_pessimistic", "value_gradient()",
        "gradient of the critic's values: {} off"),
    Row("losses.py", '"k2": d.square() / 2', '"k2": d', "losses.py::test_kl_loss_gradients",
        "expected_kl_gradient('k2')", "norm of the expected gradient: {} → {}"),
    Row("losses.py", '"k3": (-d).exp() - 1 + d}', '"k3": d.exp() - 1 - d}',
        "losses.py::test_kl_loss_gradients", "gradient(kl_loss_coef=0.1)",
        f"{OFF} with `--kl_loss_coef 0.1`"),
    Row("losses.py", "log_ratio = old.detach() - engine", "log_ratio = engine - old.detach()",
        "losses.py::test_a_correction_is_the_formula_and_finite",
        "gradient(engine_correction='truncate')",
        f"{OFF} with `--engine_correction truncate`, gaps of 0.3 nats"),
    Row("losses.py", "n = (lengths > 0).sum().double()",
        "n = torch.tensor(len(lengths), dtype=torch.float64)", "losses.py::test_token_weights",
        "gradient(aggregation='sequence')", f"{OFF} with `--aggregation sequence`"),
    Row("losses.py", '"constant": max_tokens * n,', '"constant": lengths.max() * n,',
        "losses.py::test_token_weights", "losses.token_weights(torch.tensor([4, 8]), "
        "'constant', max_tokens=16)",
        "weights of rows of 4 and 8 tokens, limit 16: {} off"),
    # ---- the optimizer
    Row("trainer/model.py", "if math.isfinite(norm):", "if True:",
        "details.py::test_a_gradient_that_is_not_finite_is_not_applied",
        "one_step(float('nan'), 0.1)", "a weight after a gradient of nan: {} → {}"),
    Row("trainer/model.py", 'self.optimizer.param_groups[0]["lr"] = lr', "pass",
        "script.py::test_the_optimizer_uses_the_rate_it_is_given", "one_step(-1.0, 0.1)",
        "a weight after a step with lr 0.1: {} → {}"),
    # ---- the engine
    Row("rollout.py", "if not self.llm.reset_prefix_cache():", "if False:",
        "engine.py::test_logprobs_equal_after_every_sync_at_two_temperatures[tied]",
        "engine_gap()", "engine and trainer: {} → {} nats a token at most"),
    Row("trainer/model.py",
        "self.module.lm.state_dict().items()", "self.module.lm.named_parameters()",
        "engine.py::test_logprobs_equal_after_every_sync_at_two_temperatures[tied]",
        "engine_gap()", "engine and trainer: {} → {} nats a token at most"),
    Row("rollout.py", 'logprobs_mode="processed_logprobs"', 'logprobs_mode="raw_logprobs"',
        "engine.py::test_logprobs_equal_after_every_sync_at_two_temperatures[tied]",
        "engine_gap()", "engine and trainer: {} → {} nats a token at most, temperature 0.7"),
    Row("rollout.py", "return int.from_bytes(hashlib.blake2b(repr(parts).encode(), "
        "digest_size=8).digest()) >> 1", "return sum(p for p in parts if isinstance(p, int))",
        "details.py::test_each_completion_has_a_seed_of_its_own", "seeds()",
        "different seeds of 64 × 8 completions: {} → {}"),
    # ---- rewards, and the run
    Row("rewards.py", "[self.socket], [], [], left)", "[self.socket], [], [], None)",
        "rewards.py::test_hostile_rewards_cost_their_completion_only", "reward_that_hangs()",
        "after 2 s a completion has {} → {}", 60),
    Row("scoring/verifiers.py", "if not isinstance(node, NODES) or called",
        "if False and called",
        "details.py::test_sympy_gets_arithmetic_only", "evaluated()",
        "code in a formula that sympy gets is {} → {}"),
    Row("data.py", "self.position += len(prompts)", "self.position += n",
        "data.py::test_an_epoch_is_every_row_once", "two_epochs()",
        "rows drawn in two epochs of 1,000, batch 64: {} → {}"),
    Row("keeping/checkpoint.py", 'found |= {f"{who}.{name}.{k}": value for k, value in '
        "state.items()}", "pass",
        "checkpoint.py::test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one", "resumed()",
        "weights two steps after a resume: {} off"),
    Row("running/evaluate.py", "return 1.0 - comb(n - correct, k) / comb(n, k)",
        "return 1.0 - (1.0 - correct / n) ** k", "details.py::test_pass_at_k_is_unbiased",
        "round(evaluate.pass_at_k(8, 2, 4), 3)", "pass@4 of 2 correct in 8: {} → {}"),
]


def copy_of_the_code(folder: Path) -> Path:
    skip = shutil.ignore_patterns(".*", "runs", "__pycache__", "wandb")
    shutil.copytree(ROOT, folder, ignore=skip)
    (folder / "runs").symlink_to(ROOT / "runs")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder: Path, tests: list[str], probed: list[str], limit: int):
    """(status of the tests, None: they hang; values of the probes; what was printed).

    All processes that were started are ended.
    """
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+") as text:
        process = os.fork()
        if not process:  # torch is here already: an import takes seconds
            child(folder, f"{place}/values", tests, probed, text.fileno())
        end = time.monotonic() + limit
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.05)
        status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
        if status is None:
            os.killpg(process, signal.SIGTERM)
            time.sleep(2)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if status is None:
            os.waitpid(process, 0)
        text.seek(0)
        return status, pickle.loads(Path(place, "values").read_bytes()), text.read()


def child(folder: Path, values: str, tests: list[str], probed: list[str], out: int):
    """Runs probes.main in the copy, and ends this process."""
    status = 9
    try:
        os.setsid()
        os.chdir(folder)
        for stream in 1, 2:
            os.dup2(out, stream)
        sys.path[:1] = [str(folder), str(folder / "tests")]
        import probes
        if not probed:  # nothing was computed here: a rank can be a fork of this process
            import ranks
            ranks.context = multiprocessing.get_context("fork")
        status = probes.main(values, "\n".join(f"tests/test_{test}" for test in tests), *probed)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def said(effect: str, right, wrong) -> str:
    """The sentence of two values: of tensors the relative difference."""
    if hasattr(right, "norm") and hasattr(wrong, "norm"):
        if right.shape != wrong.shape:
            return effect.format("of another shape:")
        gap = float((right - wrong).norm() / right.norm())
        return effect.format(f"{gap:.0%}" if gap > 0.005 else f"{gap:.0e}")
    if hasattr(right, "norm"):
        return f"ends with {wrong}"
    return effect.format(right, wrong)


def page_cells() -> dict[int, list[str]]:
    """{number: cells} of the table of the page."""
    lines = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(), re.M)
    return {int(number): [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)]
            for number, rest in lines}


@contextmanager
def broken(path: Path, old: str, new: str):
    """The file has the mistake for a while."""
    whole = path.read_text()
    assert whole.count(old) == 1, f"{old!r} is not in {path.name} once"
    path.write_text(whole.replace(old, new))
    yield
    path.write_text(whole)


def verdict_of(status: int | None, text: str) -> str:
    """A test that cannot be collected proves nothing. A fixture may fail."""
    if status is None:
        return "hangs"
    if status == 1 and re.search(r"\d+ (failed|error)", text):
        return "caught"
    print(text)
    return "DOES NOT FAIL"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=(
        argparse.RawDescriptionHelpFormatter))
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in PRELOADED:
        __import__(name)
    return measure(asked.rows or [*range(1, len(ROWS) + 1)], asked.write)


def measure(numbers: list[int], write: bool) -> int:
    """The rows of the page. Ends with 1 if a test does not fail or an effect is another."""
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory() as place:
        copy, rows = copy_of_the_code(Path(place, "copy")), [ROWS[n - 1] for n in numbers]
        tests, probes = (list(dict.fromkeys(each)) for each in zip(
            *((row.test, row.probe) for row in rows), strict=True))
        status, values, text = run(copy, tests, probes, 10 * LIMIT)
        right = dict(zip(probes, values, strict=True))
        for expression, value in right.items():
            assert not isinstance(value, str) or not value.endswith("Error"), (expression, value)
        print(f"{len(tests)} tests {'pass' if status == 0 else 'DO NOT PASS'} as they are: "
              f"{time.monotonic() - began:.0f} s", flush=True)
        if status != 0:
            print(text)
            return 1
        for number, row in zip(numbers, rows, strict=True):
            start = time.monotonic()
            with broken(copy / row.file, row.old, row.new):
                status, (value,), text = run(copy, [row.test], [row.probe], row.limit)
            effect, page = said(row.effect, right[row.probe], value), page_cells()
            verdict = verdict_of(status, text)
            if "0e+00" in effect or not hasattr(value, "norm") and value == right[row.probe]:
                verdict += "; NO EFFECT"
            if write:
                lines = PAGE.read_text().split("\n")
                at = next(i for i, line in enumerate(lines) if line.startswith(f"| {number} |"))
                lines[at] = lines[at].replace(f"| {page[number][EFFECT]} |", f"| {effect} |")
                PAGE.write_text("\n".join(lines))
            elif page.get(number, [""] * 9)[EFFECT] != effect:
                verdict += "; THE PAGE SAYS SOMETHING ELSE"
            wrong += [number] if re.search("[A-Z]{3}", verdict) else []
            print(f"{number:>2}  {verdict:<6} {row.test}  {effect}  "
                  f"({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(rows)} rows in {(time.monotonic() - began) / 60:.0f} minutes; "
          f"wrong: {wrong or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
