"""run.py: what grpo.py and ppo.py share around their loops: set-up, one rollout with its rewards, and the end.

Set-up finds every mistake it can before weights load, and reports them all at once. Nothing here is algorithm.
"""
import json
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import canary
import checkpoint
import data
import dist
import evaluate
import log
import memory
import model
import plan
import rewards
import shapes
from batch import Completion
from plan import SettingsError
from rollout import Engine, Request, hash_seed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TINY_LR, TINY_CRITIC_LR, LR, CRITIC_LR = 3e-4, 1e-3, 1e-6, 1e-5


@dataclass
class Sample:
    """One completion with all that is known of it."""
    prompt: data.Prompt
    completion: Completion
    text: str
    score: rewards.Score


def lengths_of(spec: str | None) -> int | None:
    """Rows of a data set, read without a tokenizer; None without a spec."""
    return len(data.read(spec)[0]) if spec else None


class Run:
    """Everything a loop needs, set up: world, stream, policy (and reference, critic), engine, scorer, log."""

    def __init__(self, args, script: str):
        self.args, self.script = args, script
        is_tiny = args.model.partition(":")[0] == "tiny"
        args.lr = args.lr if args.lr is not None else TINY_LR if is_tiny else LR
        if args.algorithm == "ppo":
            args.critic_lr = args.critic_lr if args.critic_lr is not None else TINY_CRITIC_LR if is_tiny else CRITIC_LR

        # Every mistake that can be known before weights load: tried one after the other, told together, by every rank alike.
        problems: list[str] = []

        def attempt(function, *a, **k):
            try:
                return function(*a, **k)
            except SettingsError as error:
                problems.append(str(error))

        if args.plan:
            attempt(rewards.check, list(args.reward))
            n_rows, n_eval = attempt(lengths_of, args.data), attempt(lengths_of, args.eval_data) or 0
            shape = attempt(shapes.shape_of, args.model, args.sizes)
            problems += [str(p) for p in plan.problems(args, args.ranks, n_rows, n_eval, shape)]
            if problems:
                raise SettingsError(plan.together(problems))
            print(memory.planned(plan.Plan(args, script, args.ranks, n_rows, n_eval), shape, args.gpu_gb * memory.GIB).text())
            sys.exit(0)
        self.world = world = dist.start(args.timeout)
        self.stop = dist.Stop(world, args.stop_seconds)

        def agree() -> None:
            said = next((p for p in world.gather([problems]) if p), None)
            if said:
                raise SettingsError(plan.together(said))

        attempt(rewards.check, list(args.reward))
        names = [attempt(log.open_folder, args.name, Path(script).stem, args.resume, args.steps)] if world.rank == 0 else []
        self.folder = world.gather(names)[0]               # rank 0 writes it, and its machine's clock names it
        self.source = attempt(self._find_model)
        self.config = attempt(model.config_of, self.source) if self.source else None
        tokenizer = self.tokenizer = attempt(self._tokenizer) if self.source else None
        rows = eval_rows = None
        if tokenizer:
            shape = dict(max_prompt_tokens=args.max_prompt_tokens, prompt_template=args.prompt_template, system=args.system)
            rows = attempt(data.load, args.data, tokenizer, seed=args.seed, **shape)
            eval_rows = attempt(data.load, args.eval_data, tokenizer, **shape) if args.eval_data else None    # generated: the same for every --seed
        self.eval_rows = eval_rows[0] if eval_rows else []
        dense = None
        with suppress(SettingsError):                      # of a model that is none, whether --tp suits it is for vLLM to say
            dense = shapes.shape_from(self.config.to_dict()) if self.config else None
        problems += [str(p) for p in plan.problems(args, world.size, len(rows[0]) if rows else None, len(self.eval_rows), dense, world.local_size)]
        room = getattr(self.config, "max_position_embeddings", None)
        if room and args.max_prompt_tokens + args.max_tokens > room:
            problems.append(f"--max_prompt_tokens {args.max_prompt_tokens} + --max_tokens {args.max_tokens} is more than the {room} positions of "
                            f"{args.model}; --max_tokens {room - args.max_prompt_tokens} fits." if args.max_prompt_tokens < room else
                            f"--max_prompt_tokens {args.max_prompt_tokens} leaves no room in the {room} positions of {args.model}.")
        agree()
        problems += world.differences({f"--{name}": value for name, value in asdict(args).items()} | {
            "the model's folder": Path(self.source).name, "the rows of --data": len(rows[0]), "the rows of --eval_data": len(self.eval_rows)})
        agree()
        # The run's folder is ours from here on, and tells where to start.
        self.log = log.Log(self.folder, world.rank == 0, args.steps, args.wandb)
        attempt(self.log.take)
        agree()
        if world.agree(bool(args.save_every) and not (self.folder / ".lock").exists()):
            raise SettingsError(f"--save_every is {args.save_every}, but {self.folder} of rank 0 is not there for all ranks; a checkpoint needs a folder "
                                f"that all machines share. Would work: --save_every 0, or to start in a shared folder.")
        self.settings = asdict(args) | {"algorithm": args.algorithm, "source": Path(self.source).name, "rows": len(rows[0]), "ranks": world.size} | log.versions()
        told = attempt(self._resume)
        agree()
        self.plan = self._with_memory(plan.Plan(args, script, world.size, len(rows[0]), len(self.eval_rows)))
        self.scorer = rewards.Scorer(list(args.reward), args.reward_workers, args.reward_timeout)   # imports while we load
        self.scorer.needs_groups                           # waits for own files to load, so that a mistake in one shows here

        # From here on weights load.
        self.stream = data.Stream(rows[0], args.seed)
        self.bad_streak, self.warned, self.best = 0, False, None   # the best evaluation so far: {"step", "score"}
        self.log.open(asdict(args) | {"ranks": world.size}, self.plan.text(), self.start)
        self.log.say(self.plan.text(short=True))
        for line in (rows[1].text(), eval_rows[1].text() if eval_rows else None):
            if line:
                self.log.say(f"  {line}")
        for line in told:
            self.log.say(f"  {line}")
        for line in plan.warnings(args):
            self.log.say(f"  note: {line}")
        compute = DTYPES[args.dtype] if args.dtype != "auto" else torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.build = partial(model.build, folder=self.source, world=world, compute=compute, checkpointing=args.checkpointing,
                             shard_size=args.shard_size, head_chunk=args.head_chunk, offload=args.cpu_offload)
        self.optimizer = dict(betas=args.betas, weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm,
                              rest=() if args.cpu_offload else args.offload)
        self.policy = model.Policy(self.build(model.Scorer), world, **self.optimizer)
        self.reference = self._reference() if plan.needs_reference(args) else None
        self.critic = model.Critic(self.build(model.Valuer), world, **self.optimizer) if args.algorithm == "ppo" else None
        self.trained = {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})
        self.kl_coef = args.kl_reward_coef
        self.peaks = canary.Peaks(world)
        self.trainer_rests()                               # the engine takes its share of what is free
        self.engine = Engine(
            self.source, world, tp=args.tp, dtype=torch.bfloat16 if compute == torch.bfloat16 else torch.float32,
            max_len=self.plan.longest, vocab_size=self.config.vocab_size, eos_ids=self._eos_ids(), seed=args.seed,
            gpu_memory_utilization=args.gpu_memory_utilization, kv_cache=self.kv_cache,
            max_num_seqs=args.max_num_seqs, sleep_level=args.sleep_level, eager=args.eager, log_level=args.engine_log)
        self.engine_rests()
        if not args.eval_only and (args.canary == "on" or args.canary == "auto" and world.device.type == "cuda"):
            began = time.perf_counter()
            peaks = canary.canary(self.plan, world, self.config.vocab_size, self.policy, self.reference, self.critic)
            self.log.say("  canary: a worst-case micro-batch of each phase fits, peaks " + ", ".join(f"{name} {peak / memory.GIB:.2f} GiB" for name, peak
                         in peaks.items()) + f", in {time.perf_counter() - began:.1f} s")

    def _resume(self) -> list[str]:
        """Finds the checkpoint that an unfinished run of this name goes on from, and where that is → lines to tell. A collective."""
        self.saved, told = checkpoint.find(self.folder / "checkpoints", self.world)
        self.start = self.saved.state["step"] if self.saved else 0
        if self.saved:
            changed = checkpoint.compare(self.saved, self.settings)
            return [*told, f"resumed from {self.saved.path}" + (f"; changed since: {', '.join(changed)}" if changed else "")]
        if log.finished_steps(self.folder):
            raise SettingsError(f"{self.folder} is finished and kept no checkpoint (--save_every was 0), so it cannot go on to --steps {self.args.steps}; "
                                f"choose another --name.")
        return [f"{self.folder} was begun before but has no checkpoint: it begins anew"] * (self.folder / "metrics.jsonl").exists()

    def _with_memory(self, sizes: plan.Plan) -> plan.Plan:
        """The plan with its memory, where the model is one whose memory can be planned."""
        card = torch.cuda.mem_get_info()[1] if self.world.device.type == "cuda" else None
        self.planned_gb, self.kv_cache = {}, self.args.kv_cache_gb * memory.GIB or (0 if card else memory.CPU_CACHE)     # 0: the engine finds out
        try:
            shape = shapes.shape_from(self.config.to_dict())
        except SettingsError as error:
            return replace(sizes, memory=f"  memory     {error}")
        if not card:
            self.kv_cache = memory.Engine(sizes, shape, card).cache
        for load in memory.loads(sizes, shape, card):
            self.planned_gb[f"memory/plan_{load.phase.replace(' ', '_')}_gb"] = load.total / memory.GIB
        return memory.planned(sizes, shape, card)

    def _reference(self) -> model.Policy:
        """The starting model, never trained; with --offload reference on the host, from where FSDP fetches a layer at a time."""
        away = self.args.cpu_offload or "reference" in self.args.offload
        module = self.build(model.Scorer, offload=away, trained=False)
        return model.Policy(module, self.world, **self.optimizer | ({"rest": ()} if away else {}))

    def _find_model(self) -> str:
        kind, _, task = self.args.model.partition(":")
        if kind == "tiny":
            import tiny
            if task and task not in tiny.TASKS:
                raise SettingsError(f"--model {self.args.model} is no task of tiny.py; it makes models for {', '.join(f'tiny:{name}' for name in tiny.TASKS)}.")
            return tiny.ensure("runs", *([task] if task else []))
        return model.find(self.args.model)

    def _tokenizer(self):
        from transformers import AutoTokenizer
        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--model {self.args.model} has no tokenizer that transformers can load ({str(error).splitlines()[0]})") from None

    def _eos_ids(self) -> list[int]:
        """All ids that end a completion: the generation config's list and the tokenizer's own."""
        path = Path(self.source) / "generation_config.json"
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        ids = ids if isinstance(ids, list) else [ids]
        return sorted({i for i in [*ids, self.tokenizer.eos_token_id] if i is not None})

    def learning_rate(self, step: int, peak: float, warmup_steps: int) -> float:
        """--lr at this step, by --warmup_steps and --lr_schedule."""
        return model.learning_rate(step, self.args.steps, peak, warmup_steps, self.args.lr_schedule)

    # ---- around and between the steps -------------------------------------------------------------------------------

    def steps(self):
        """The steps to do, with what belongs between them: evaluation, checkpoints, and the end on SIGTERM."""
        a, trouble = self.args, None
        self.restore()
        if a.eval_only:
            self.evaluate(self.start)
            self.log.step(self.start, {})
            return
        self.stop.looping = True                           # from here on SIGTERM waits for the end of a step
        for step in range(self.start, a.steps):
            if a.eval_every and step % a.eval_every == 0 or a.eval_data and step == 0:
                self.evaluate(step)
            yield step
            told_to_stop, done = self.stop.agreed(), step + 1
            if told_to_stop or a.save_every and (done % a.save_every == 0 or done == a.steps):
                trouble = self.save(done)
            if told_to_stop:
                self.log.say(f"SIGTERM: ended after {done} of {a.steps} steps; " + ("the last checkpoint stands" if trouble else
                             f"the same command with --name {self.folder.name} goes on from here"))
                self.close()
                sys.exit(143 if trouble else dist.STOPPED)

    def save(self, step: int) -> str | None:
        """Everything that the steps after `step` depend on, to disk → None, or why it could not be: then the run goes on without."""
        began = time.perf_counter()
        self.log.sync()
        state = {"step": step, "position": self.stream.position, "kl_coef": self.kl_coef, "bad_streak": self.bad_streak, "best": self.best,
                 "settings": self.settings}
        trouble = checkpoint.save(self.folder / "checkpoints", self.world, self.trained, state, self.args.keep)
        self.log.say(f"the checkpoint after {step} steps could not be written ({trouble}); the last one stands" if trouble else
                     f"saved {self.folder}/checkpoints/step_{step} in {time.perf_counter() - began:.1f} s")
        return trouble

    def restore(self) -> None:
        """Undoes `save`, once everything that has state is there."""
        if self.saved:
            state = self.saved.state
            checkpoint.load(self.saved, self.world, self.trained)
            self.stream.position, self.bad_streak = state["position"], state["bad_streak"]
            if getattr(self.args, "kl_target", None) is not None:
                self.kl_coef = state["kl_coef"]
            if all(state["settings"].get(k) == v for k, v in asdict(self.args).items() if k.startswith("eval_")):
                self.best = state["best"]                  # other rows or another way to count: scores do not compare

    @contextmanager
    def phase(self, name: str):
        """A phase of a step: its time and its peak of memory are logged."""
        with self.log.time(name), self.peaks.phase(name):
            yield

    def trainer_rests(self) -> None:
        """What --offload names leaves the GPU to the engine."""
        for trained in filter(None, (self.policy, self.reference, self.critic)):
            trained.rest()

    def sync(self) -> None:
        """The engine takes the policy's weights; what --offload names leaves the GPU to it first."""
        with self.phase("sync"):
            self.trainer_rests()
            self.engine.load(self.policy.weights(self.engine.dtype))

    # ---- one rollout ------------------------------------------------------------------------------------------------

    def sample(self, prompts: list[data.Prompt], step: int, group: int, *, temperature: float, salt: str = "train") -> list[Sample]:
        """`group` completions of each prompt, with rewards: the same list, in request order, on every rank."""
        a, world = self.args, self.world
        asked = [(p, Request(p.row.prompt_ids, hash_seed(a.seed, salt, p.position, g))) for p in prompts for g in range(group)]
        world.meet("rollout", step, len(asked))
        with self.phase("rollout"):
            mine = self.engine.generate(self.engine.mine([request for _, request in asked]), temperature=temperature,
                                        max_tokens=a.max_tokens, stop=a.stop)
            part = dist.share(len(mine), a.tp, world.rank % a.tp)               # the ranks of one engine made the same: count it once
            completions = world.gather(mine[part])
        world.meet("reward", step, len(asked))
        with self.log.time("reward"):
            texts = self.tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
            items = [rewards.Item(p.row.prompt, text, p.row.answer, p.row.columns, len(c.ids), c.truncated, c.ids.tolist())
                     for (p, _), text, c in zip(asked, texts, completions)]
            size = group if self.scorer.needs_groups else 1                     # rewards that compare need the whole group together
            units = [items[i:i + size] for i in range(0, len(items), size)]
            scores = world.gather(self.scorer.score([item for unit in world.mine(units) for item in unit], size))
            trace = next((t for t in world.gather([self.scorer.first_traceback]) if t), None)
            rewards.raise_if_all_failed(scores, trace)
            if trace and not self.warned:
                self.warned = True
                self.log.say(f"a completion could not be scored (it is left out, and counted); this is said once:\n{trace}")
        return [Sample(p, c, t, s) for (p, _), c, t, s in zip(asked, completions, texts, scores, strict=True)]

    def rollout_metrics(self, samples: list[Sample]) -> dict[str, float]:
        """What is said of all completions of a step, those included that are not trained on."""
        scored = np.array([s.score.total for s in samples if s.score.total is not None])
        lengths = np.array([len(s.completion.ids) for s in samples])
        metrics = {"reward/mean": scored.mean(), "reward/std": scored.std()} if len(scored) else {}
        for name in samples[0].score.parts:
            values = [s.score.parts[name] for s in samples if s.score.parts[name] is not None]
            if values:
                metrics[f"reward/{name}"] = np.mean(values)
        metrics |= {"rollout/length_mean": lengths.mean(), "rollout/truncated_frac": np.mean([s.completion.truncated for s in samples]),
                    "rollout/unscored": len(samples) - len(scored), "rollout/tokens": int(lengths.sum()),
                    "rollout/tokens_per_s": lengths.sum() / max(1e-9, self.log.times.get("time/rollout", 0.0))}
        return {k: v if isinstance(v, int) else float(v) for k, v in metrics.items()}

    def engine_rests(self) -> None:
        """The GPU goes back to the trainer."""
        self.engine.sleep()
        for trained in filter(None, (self.policy, self.reference, self.critic)):
            trained.wake()

    def check_finite(self, metrics: dict[str, float]) -> None:
        """A gradient that is not finite was not applied, on any rank; --max_bad_steps steps in a row with one end the run."""
        bad = sum(v for k, v in metrics.items() if k.endswith("_not_finite"))
        self.bad_streak = self.bad_streak + 1 if bad else 0
        if bad:
            self.log.say(f"{bad} updates of this step had a gradient that is not finite and were not applied; {self.bad_streak} such steps in a row")
        if self.bad_streak >= self.args.max_bad_steps:
            raise RuntimeError(f"{self.bad_streak} steps in a row had a gradient that is not finite (--max_bad_steps {self.args.max_bad_steps}); "
                               f"the weights are still those of the last good update; a smaller --lr or --max_grad_norm may help")

    def end_step(self, step: int, samples: list[Sample], metrics: dict[str, float]) -> None:
        """Logs one step, with some completions now and then."""
        self.log.step(step, metrics | self.peaks.metrics() | self.planned_gb)
        self.check_finite(metrics)
        if step % self.args.samples_every == 0 or step == self.args.steps - 1:
            self.log.samples(f"step_{step:05d}", [(s.prompt.row.prompt, s.text, s.score.total, s.prompt.row.answer) for s in samples], show=3)

    # ---- evaluation and the end -------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """pass@1 and pass@k on --eval_data with the current policy, through the same engine and rewards."""
        with self.log.time("eval"):
            self.sync()
            metrics, samples = evaluate.evaluate(self, step)
            self.engine_rests()
        self.log.samples(f"eval_{step:05d}", [(s.prompt.row.prompt, s.text, s.score.total, s.prompt.row.answer) for s in samples])
        self.log.times.clear()
        self.log.hold(metrics, step)
        score = float(np.mean([v for k, v in metrics.items() if k.endswith("/pass@1")]))
        if self.best is None or score > self.best["score"]:
            self.best = {"step": step, "score": score}
            if self.args.export and step:                  # before the first step the best is --model itself
                self.policy.export(self.source, str(self.folder / "best"), notes={"best.json": json.dumps(self.best | metrics, indent=1)})
        return metrics

    def end(self) -> None:
        """The last evaluation, the exported model, the curve, a summary, the grade; then everything is shut down in order."""
        a, rows = self.args, self.log.rows
        if a.eval_only:
            self.log.say(f"everything is in {self.folder}/: metrics.jsonl, samples/")
            self.close()
            sys.exit(0)
        if self.eval_rows:
            self.evaluate(a.steps)
            self.log.step(a.steps, {})
        if a.export:
            self.policy.export(self.source, str(self.folder / "model"))
        grade = 0
        if self.log.writing:
            curve = self.log.curve()
            means = [r["reward/mean"] for r in rows if r.get("reward/mean") is not None]
            seconds = sum(r.get("time/step", 0.0) for r in rows)
            tokens = sum(r.get("rollout/tokens", 0) for r in rows)
            before, after = np.mean(means[:3]), np.mean(means[-10:])
            self.log.say(f"reward {before:.3f} -> {after:.3f} (mean of the first 3 and the last 10 of {len(means)} steps), "
                         f"{tokens:,} tokens in {seconds:.0f} s = {tokens / seconds:,.0f} tokens/s, all phases")
            self.log.say(f"everything is in {self.folder}/: metrics.jsonl, samples/, {'model/, ' * a.export}{curve.name if curve else ''}")
            if a.target_reward is not None and not (before <= 0.4 and after >= a.target_reward):
                self.log.say(f"missed --target_reward: the first 3 steps must be at most 0.4 and the last 10 at least {a.target_reward}")
                grade = 1
        self.log.finish(a.steps)
        grade = self.world.agree(bool(grade))
        self.close()
        sys.exit(int(grade))

    def close(self) -> None:
        """Shuts everything down, in order."""
        self.log.close()
        self.scorer.close()
        self.engine.close()
