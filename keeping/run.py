"""run.py: what all training scripts share: flags, set-up, saving, evaluation, the end."""
import io
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import tyro

import dist
import rewards
from chats.carry import Carry
from chats.turns import Episodes, TurnArgs
from data import DataArgs, Stream
from errors import Count, Mistakes, Number, Positive, Range, SettingsError
from keeping import checkpoint, log, summary
from keeping.checkpoint import export_adapter, export_model
from keeping.evaluate import EvalArgs, held_out_metrics, sampled_metrics
from keeping.samples import write_samples
from preflight import plan
from preflight.inputs import is_tiny, read_inputs
from preflight.plan import PlanArgs
from preflight.worst_case import try_worst_case
from rewards import RewardArgs
from rollout import Engine, EngineArgs, SeeingEngine
from trainer import lora, model
from trainer.experts import ExpertArgs
from trainer.lora import LoraArgs
from trainer.model import ModelArgs, OptimizerArgs

# ---- flags ----

@dataclass
class RunArgs:
    """The run's folder, checkpoints, and what is shown."""
    resume: bool = True
    """--no-resume: refuse if runs/NAME exists."""
    save_every: int = 0
    """Steps between checkpoints, and one after the last step. 0: only after SIGTERM."""
    keep: Count = 2
    """Checkpoints to keep, the newest."""
    samples_every: Count = 10
    """Steps between printing a few completions and keeping all in samples/."""
    report: bool = True
    """Write runs/NAME/report.html at the end."""
    wandb: str | None = None
    """A Weights & Biases project. Without a key the run is recorded offline."""
    target_reward: tuple[Number, Number] | None = None
    """Exit status 1 unless the mean reward of the first 3 steps is at most the first number, and
    that of the last 10 at least the second."""
    target_eval: tuple[Number, Number] | None = None
    """The same of pass@1 on --eval_data, before the first step and after the last."""
    export: bool = True
    """Write the trained model to runs/NAME/model. tools/export.py: that of a checkpoint."""
    timeout: Annotated[float, Range(1, 1e6)] = 600.0
    """Seconds that one rank waits for another before the run ends."""
    max_gap: Positive | None = None
    """Nats a token by which log-probs of transformers, trainer and engine may differ. Not given:
    1e-3, or 0.15 in bfloat16."""
    try_worst_case: Literal["auto", "on", "off"] = "auto"
    """Try a worst-case micro-batch of each phase before the first rollout. auto: on GPU."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (plan.problems)."""
        if self.target_reward and plan.args.steps < 13:
            yield (f"--target_reward compares the first 3 and the last 10 steps: --steps must be "
                   f"at least 13 (got {plan.args.steps}).")
        if self.target_eval and not plan.args.eval_data:
            yield "--target_eval needs --eval_data."
        if self.wandb == "":
            yield "--wandb must be a project's name (got an empty text)."


@dataclass
class CommonArgs:
    """Flags that several files read. The usual ones come first."""
    model: str = "tiny"
    """A folder in Hugging Face format, a hub name, or tiny, tiny:kk, tiny:guess (by tiny.py)."""
    data: str = "tiny"
    """A .jsonl, .json, .parquet or .csv, a hub NAME[:CONFIG][@SPLIT], reasoning_gym:TASK, tiny."""
    reward: tuple[str, ...] = ("exact",)
    """Rewards to add up, each NAME[:WEIGHT], or your own function FILE.py:NAME[:WEIGHT]."""
    batch: Count = 64
    """P: prompts per step, all ranks together. Any number works on any number of ranks."""
    group: Count = 8
    """G: completions per prompt."""
    max_tokens: Count = 256
    """Longest completion, in tokens. One that reaches it is cut, and counted as truncated."""
    temperature: Annotated[float, Range(0.01, 2)] = 1.0  # vLLM's own limits
    """Of sampling, and of the trainer's logprobs."""
    steps: Count = 60
    """Rollouts, each followed by its update."""
    lr: Positive | None = None
    """Peak learning rate. Not given: 1e-6, or 3e-4 for the tiny model; LoRA: ten times as much."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Of the data's order and of every completion's own random stream."""
    name: str | None = None
    """The run is runs/NAME; an unfinished one is resumed. Not given: a name from the time."""
    eval_data: str | None = None
    """Rows to evaluate on, in the forms of --data: before the first step and after the last."""
    minibatches: Count = 1
    """Optimizer steps per pass over the batch."""
    epochs: Count = 1
    """Passes over the samples of each rollout."""
    update_tokens: int = 16384
    """Tokens of one forward and backward, per rank: prompts once. It sets the memory, and never
    changes the maths."""
    score_tokens: int = 32768
    """The same for one forward without gradient: old and reference logprobs."""

    data_args: DataArgs = field(default_factory=DataArgs)
    engine_args: EngineArgs = field(default_factory=EngineArgs)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    lora_args: LoraArgs = field(default_factory=LoraArgs)
    expert_args: ExpertArgs = field(default_factory=ExpertArgs)
    optimizer_args: OptimizerArgs = field(default_factory=OptimizerArgs)
    reward_args: RewardArgs = field(default_factory=RewardArgs)
    turn_args: TurnArgs = field(default_factory=TurnArgs)
    eval_args: EvalArgs = field(default_factory=EvalArgs)
    run_args: RunArgs = field(default_factory=RunArgs)
    plan_args: PlanArgs = field(default_factory=PlanArgs)

    script: ClassVar[str]  # the file's name
    critic_args: ClassVar[None] = None  # ppo.py has one
    carry_args: ClassVar[None] = None  # grpo.py and ppo.py have one
    supervised: ClassVar[bool] = False  # sft.py: rows have what is learned
    needs_reward: ClassVar[bool] = True
    needs_engine: ClassVar[bool] = True
    teacher: ClassVar[None] = None  # distill.py has these three
    teacher_prompt: ClassVar[None] = None
    divergence: ClassVar[str] = "none"
    entropy_coef: ClassVar[float] = 0.0  # grpo.py and ppo.py have it
    usual_lr: ClassVar[float] = 1e-6  # of a model that is not tiny

    def rules(self, plan):
        """Yields a sentence for each broken rule (plan.problems)."""
        for name in ("model", "data", "eval_data"):
            if getattr(self, name) == "":
                yield f"--{name} must not be empty."
        # --name becomes a folder. The folders runs/tiny-… hold the tiny models.
        own = re.fullmatch(
            r"(?!tiny-(sort|kk|guess|skilled|experts|sharpen)-)\w[\w .,=+@-]*", str(self.name))
        if not own or len(self.name or "") > 200 or len(str(self.name).encode()) > 200:
            yield (f"--name must be at most 200 bytes of letters, digits, spaces and _.,=+@-, "
                   f"begin with a letter or digit, and not be a tiny model's (got "
                   f"{str(self.name)[:60]!r}). Would work: --name my-run.")
        if "environment" in [spec.partition(":")[0] for spec in self.reward] and (
                not self.turn_args.reply):
            yield "--reward environment needs --reply FILE.py:CLASS."
        smallest = min(plan.batches)
        if self.minibatches > smallest * self.group:
            yield (f"--minibatches must be at most {smallest * self.group:,} (got "
                   f"{self.minibatches:,}): the smallest batch has {smallest:,} prompts x --group "
                   f"{self.group:,}.")
        for name in ("update_tokens", "score_tokens"):
            yield from plan.too_small(name, getattr(self, name))


def parse(kind: type, description: str):
    """The command line → Args, with learning rates that fit the model."""
    said = io.StringIO()
    # A file gets each line at once. A terminal may have no é.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    mistakes = None
    try:
        with redirect_stderr(said):
            args = tyro.cli(kind, description=description, use_underscores=True,
                            config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        mistakes = Mistakes([f"\n{said.getvalue().rstrip()}"] if end.code else [])  # 0: --help
    if mistakes is not None:
        dist.run(mistakes.stop)  # prints and ends
    lr, critic_lr = (3e-4, 1e-3) if is_tiny(args.model) else (kind.usual_lr, 1e-5)
    if args.lora_args.lora_rank:  # https://thinkingmachines.ai/blog/lora: 10 x full training's
        lr, critic_lr = 10 * lr, 10 * critic_lr
    if args.lr is None:
        args.lr = lr
    if args.critic_args and args.critic_args.critic_lr is None:
        args.critic_args.critic_lr = critic_lr
    return args


# ---- set-up ----

def set_up(args) -> "Run":
    """Everything that a loop needs, in five phases. Weights load in the last."""
    # 1. Join the other ranks. Rank 0's clock names the folder, and dates the prompts.
    world, mistakes = dist.join(args.run_args.timeout), Mistakes()
    folder = mistakes.attempt(log.choose_folder, args)
    folder, began = world.gather([(folder, mistakes.attempt(log.began, folder))])[0]
    # 2. Check flags and files. Machines have their own command lines and disks: compare them.
    inputs = mistakes.attempt(read_inputs, args, world.size, world.local_size, began)
    world.together(mistakes.stop)
    flags, facts = plan.flags(args), checkpoint.facts(args, inputs, world)
    same = {f"--{name}": value for name, value in flags.items()} | facts | {
        "row_digests": checkpoint.digest(facts["row_digests"]),
        "eval_digests": checkpoint.digest(checkpoint.row_digests(inputs.eval_rows))}
    Mistakes(world.differences(same)).stop()
    # 3. Find the newest checkpoint, if this run has one.
    versions = log.versions()
    settings = flags | facts | {"ranks": world.size} | versions
    saved = checkpoint.newest(args, world, folder, settings)
    if saved:
        settings["changes"] = saved.state["settings"].get("changes", []) + saved.changed
    # 4. Open the run's folder.
    run = Run(args, world, folder, inputs, saved, settings)
    open_folder(run, flags | {"script": args.script, "ranks": world.size, "versions": versions,
                              "began": began, "changes": settings.get("changes", [])})
    run.log.say(inputs.plan.text(short=True))
    for note in inputs.notes:
        run.log.say(f"  {note}")
    if saved:
        run.log.say(f"  resumed from {saved.path}")
        for text in saved.changed:
            run.log.say(f"  {text}")
    # 5. Build the models, the engine, the reward workers.
    with run.log.time("loading"):
        run.build()
    return run


def open_folder(run: "Run", args: dict):
    """From here on only this run writes its folder. args: what args.json gets. A collective."""
    run.world.together(run.log.open, args, run.inputs.plan.text(), run.start)
    every, folder = run.args.run_args.save_every, run.log.folder
    # Rank 0 made .lock. A rank that does not see it has another disk.
    if run.world.any_rank(every > 0 and not (folder / ".lock").exists()):
        raise SettingsError(
            f"--save_every {every} needs a folder that all machines share; some have no {folder}. "
            f"Would work: --save_every 0.")


class Run:
    """What a loop works with, and what stands between its steps."""

    def __init__(self, args, world, folder, inputs, saved, settings):
        self.args, self.world, self.inputs = args, world, inputs
        self.saved, self.settings = saved, settings
        self.stream = Stream(inputs.rows, args.seed)
        self.dtype = model.compute_dtype(args.model_args, world.device)
        bfloat16 = self.dtype == torch.bfloat16
        self.max_gap = args.run_args.max_gap or (0.15 if bfloat16 else 1e-3)
        self.log = log.Log(folder, world, args.steps, args.run_args.wandb)
        self.kl_coef = getattr(args, "kl_reward_coef", 0.0)  # ppo.py may adapt it
        self.start = saved.state["step"] if saved else 0
        self.compared = False  # the policies
        self.end = self.start if args.eval_args.eval_only else args.steps
        # Numbers of finished steps. `finish` makes the last evaluation.
        self.evaluations = self.saves = range(0)
        if inputs.eval_rows:
            self.evaluations = range(0, args.steps, args.eval_args.eval_every or args.steps)
        if args.run_args.save_every:
            self.saves = {*range(0, args.steps, args.run_args.save_every), args.steps}

    # ---- build ----

    def build(self):
        self.scorer = rewards.Scorer(list(self.args.reward), self.args.reward_args)  # starts now
        self.scorer.progress["max_steps"] = self.args.steps
        self.build_models()
        self.engine = self.episodes = self.carry = None
        if self.args.needs_engine:
            self.build_engine()
        self.world.together(self.scorer.wait)
        if not self.args.eval_args.eval_only:
            try_worst_case(self)
            self.stop = dist.Stop(self.world)  # until here SIGTERM ends the process
        if self.saved:
            self.restore(self.saved.state)

    def build_models(self):
        """The policy; the critic of ppo.py; the reference: the teacher, or the starting model."""
        args, world, source = self.args, self.world, self.inputs.source
        shared = world, args.model_args, args.optimizer_args
        adapters = args.lora_args if args.lora_args.lora_rank else None
        self.critic = self.reference = self.adapter = None

        def load(kind, source=source, **options):
            return model.build(kind, source, world, args.model_args, seed=args.seed, **options)

        self.policy = model.policy_of(args, load(model.LogprobModel, adapters=adapters), *shared)
        self.trained = {"policy": self.policy}
        if args.critic_args:
            critic = load(model.ValueModel, adapters=adapters)
            self.critic = model.made(model.Critic, critic, *shared)
            self.trained["critic"] = self.critic
        if args.needs_reference and adapters and not args.teacher:
            self.reference = lora.Base(self.policy)  # the same weights without the adapters
        elif args.needs_reference:
            teacher = load(model.LogprobModel, self.inputs.teacher or source, trained=False)
            self.reference = model.made(model.Policy, teacher, *shared)
        if adapters:
            base = source if is_tiny(args.model) else args.model
            self.adapter = lora.peft_config(self.policy.module.lm, adapters, base)

    def build_engine(self):
        """The engine, asleep: the trainer has the GPU."""
        args, inputs, bfloat16 = self.args, self.inputs, self.dtype == torch.bfloat16
        models = self.policy, self.reference, self.critic
        if args.carry_args and args.carry_args.carry:
            self.carry = Carry(args, self.stream)
        if inputs.bridge:
            self.episodes = Episodes(args, inputs.bridge, self.world, self.log)
        make = SeeingEngine if inputs.eyes else Engine
        self.engine = make(
            inputs.source, self.world, args.engine_args, tokenizer=inputs.tokenizer,
            eos_ids=inputs.ends, log=self.log,
            trained=[m for m in models if isinstance(m, model.Trained)],  # share the GPU with it
            max_len=inputs.plan.longest, max_tokens=args.max_tokens, seed=args.seed,
            adapter=self.adapter if args.lora_args.in_engine(bfloat16) else None,
            kv_cache=inputs.kv_cache, dtype=torch.bfloat16 if bfloat16 else torch.float32,
            episodes=self.episodes, carry=self.carry, routes=args.expert_args.replay_routing,
            pictures=inputs.for_pictures)
        self.engine.sleep()

    def restore(self, state: dict):
        """Goes on from the checkpoint."""
        checkpoint.load(self.saved, self.world, self.trained)
        self.stream.position = state["position"]
        if self.carry:
            self.carry.restore(state["flight"], self.inputs.rows)
        self.log.bad_steps = state["bad_steps"]
        before = state["settings"].get("kl_reward_coef")  # another one begins anew
        if self.args.critic_args and self.args.kl_target is not None and (
                self.settings.get("kl_reward_coef") == before):
            self.kl_coef = state["kl_coef"]

    # ---- between the steps ----

    def evaluate(self, step: int):
        """pass@1 and pass@k on --eval_data, or how well its rows are predicted (sft.py)."""
        metrics = {}
        if self.args.supervised:
            with self.log.time("eval"):
                metrics = held_out_metrics(self)
        if self.engine:
            metrics |= sampled_metrics(self, step)
        self.log.step(step, metrics)

    def record(self, step: int, samples: list):
        """Each --samples_every steps the samples go to samples/, those that an update has learned
        from with their tokens."""
        if step % self.args.run_args.samples_every == 0 or step == self.args.steps - 1:
            write_samples(self.log, f"step_{step + 1:05d}", samples, show=3,
                          decode=self.engine.tokenizer.decode)

    def save(self, step: int):
        """A checkpoint. A collective."""
        folder = self.log.folder / "checkpoints"
        state = {"step": step, "position": self.stream.position, "kl_coef": self.kl_coef,
                 "bad_steps": self.log.bad_steps, "settings": self.settings}
        if self.carry:
            state["flight"] = self.carry.state()
        checkpoint.save(folder, self.world, self.trained, state, self.args.run_args.keep)
        self.log.say(f"saved {folder}/step_{step}")

    # ---- the end ----

    def stopped(self, step: int) -> int:
        """After SIGTERM, with a checkpoint → exit status."""
        self.log.say(f"SIGTERM: ended after {step} of {self.args.steps} steps; the same command "
                     f"with --name {self.log.folder.name} goes on from here")
        self.close()
        return dist.SAVED

    def finish(self) -> int:
        """The last evaluation, the exported model, the curve, the grade → exit status."""
        missed, training = False, not self.args.eval_args.eval_only
        if self.inputs.eval_rows:
            self.evaluate(self.end)
        if training and self.stop.agreed():
            self.save(self.end)
            return self.stopped(self.end)
        if training and self.args.run_args.export:
            self.export()
        if training and self.world.rank == 0:
            missed = summary.grade(self.log, self.args.run_args)
        if training:
            self.log.finish(self.args.steps)
        if self.args.run_args.report and self.world.rank == 0:
            summary.write_report(self.log)
        missed = self.world.any_rank(missed)
        self.log.say(f"the run is in {self.log.folder}/")
        self.close()
        return int(missed)

    def export(self):
        """The policy to model/, adapters alone to adapter/ too. A collective."""
        export_model(self.policy, self.inputs.source, self.log.folder / "model",
                     self.inputs.ends)
        if self.adapter:
            export_adapter(self.policy, self.adapter, self.log.folder / "adapter")

    def close(self):
        self.log.close()
        self.scorer.close()
        if self.episodes:
            self.episodes.workers.close()
        if self.engine:
            self.engine.close()
        else:
            self.world.barrier()  # all end together
