"""run.py: what all training scripts share: set-up, saving, evaluation, the end."""
import os
import shlex
import sys
from dataclasses import dataclass

import torch

import dist
import rewards
from chats.carry import Carry
from chats.turns import Episodes
from data import Stream
from errors import Mistakes, SettingsError
from keeping import checkpoint, log, summary
from keeping.checkpoint import export_adapter, export_model
from keeping.samples import write_samples
from preflight import plan
from preflight.inputs import Inputs, is_tiny, read_inputs
from rollout import Engine
from running.args import CommonArgs
from running.evaluate import held_out_metrics, sampled_metrics
from running.same_policy import compare_policies
from running.worst_case import try_worst_case
from trainer import lora, model

# ---- set-up ----

def set_up(args) -> "Run":
    """Everything that a loop needs, in five phases. Weights load in the last."""
    # 1. Join the other ranks. The time of this names the folder and dates the prompts.
    world, mistakes = dist.join(args.run_args.timeout), Mistakes()
    folder = mistakes.attempt(log.choose_folder, args, world.began)
    began = world.gather([mistakes.attempt(log.began, folder, world.began)])[0]
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
    run_log = log.Log(folder, world, args.steps, args.run_args.wandb)
    open_folder(run_log, args, inputs, saved.state["step"] if saved else 0, flags | {
        "script": args.script, "ranks": world.size, "versions": versions, "began": began,
        "changes": settings.get("changes", [])})
    if not args.eval_args.eval_only:
        world.again = again(world, folder.name)
        after = "a kill" if plan.save_every(args) else "SIGTERM"
        run_log.say(f"{folder}: after {after} this goes on: {world.again}")
    run_log.say(inputs.plan.text(short=True))
    about = [f"model {args.model}, reward {' + '.join(args.reward) or 'none'}, peak learning rate "
             f"{args.lr:g}"]
    resumed = [f"resumed from {saved.path}", *saved.changed] if saved else []
    for note in about + inputs.notes + resumed:
        run_log.say(f"  {note}")
    # 5. Build the models, the engine, the reward workers.
    with run_log.time("loading"):
        return build(args, world, inputs, run_log, settings, saved)


def open_folder(run_log: log.Log, args, inputs: Inputs, start: int, kept: dict):
    """From here on only this run writes its folder. kept: what args.json gets. A collective."""
    world, every, folder = run_log.world, plan.save_every(args), run_log.folder
    world.together(run_log.open, kept, inputs.plan.text(), start)
    # Rank 0 made .lock. A rank that does not see it has another disk.
    if world.any_rank(every > 0 and not (folder / ".lock").exists()):
        raise SettingsError(
            f"--save_every {every} needs a folder that all machines share: some have no {folder}. "
            f"Would work: --save_every 0.")


def again(world: dist.World, name: str) -> str:
    """The command that goes on with this run. run.sh says how it was started."""
    folder, started = os.path.relpath(os.path.dirname(sys.executable)), os.environ.get("STARTED_AS")
    start = [f"{folder}/python"]
    if world.size > 1:
        start = [f"{folder}/torchrun", "--nproc_per_node", str(world.local_size)]
    command = started or shlex.join([*start, *sys.argv])
    if not any(word.partition("=")[0] == "--name" for word in sys.argv):
        command += f" --name {shlex.quote(name)}"
    if world.size > 1 and not started:
        command += " (with your flags of torchrun)"
    return command


def build(args, world: dist.World, inputs: Inputs, run_log: log.Log, settings: dict,
          saved: checkpoint.Saved | None) -> "Run":
    """The run with its models, engine and reward workers; a resumed one as its checkpoint has it.
    settings: of the next checkpoint. A collective."""
    scorer = rewards.Pool(list(args.reward), args.reward_args)  # its processes start now
    scorer.progress["max_steps"] = args.steps
    policy, reference, critic, adapter = build_models(args, world, inputs)
    stream, carry, episodes = Stream(inputs.rows, args.seed), None, None
    if args.carry_args and args.carry_args.carry:
        carry = Carry(args, stream)
    if args.needs_engine and inputs.bridge:
        episodes = Episodes(args, inputs.bridge, world, run_log)
    run = Run(args, world, inputs, run_log, settings, stream, scorer, policy, reference, critic,
              adapter, carry, episodes, start=saved.state["step"] if saved else 0,
              kl_coef=getattr(args, "kl_reward_coef", 0.0))
    if args.needs_engine:
        run.engine = build_engine(run)
    world.together(scorer.wait)
    if not args.eval_args.eval_only:
        try_worst_case(run)
        run.stop = dist.Stop(world)  # until here SIGTERM ends the process
    if saved:
        run.restore(saved)
    compare_policies(run)
    return run


def build_models(args, world: dist.World, inputs: Inputs):
    """(policy, reference, critic, adapter_config.json): None where the run has none. The critic is
    of ppo.py. The reference is the teacher, or the starting model."""
    source, shared = inputs.source, (world, args.model_args, args.optimizer_args)
    adapters = args.lora_args if args.lora_args.lora_rank else None
    critic = reference = adapter = None

    def load(kind, source=source, **options):
        return model.build(kind, source, world, args.model_args, seed=args.seed, **options)

    policy = load(model.LogprobModel, adapters=adapters)
    policy = model.Policy(policy, *shared, args.expert_args)
    if args.critic_args:
        critic = model.Critic(load(model.ValueModel, adapters=adapters), *shared)
    if args.needs_reference and adapters and not args.teacher:
        reference = lora.Base(policy)  # the same weights without the adapters
    elif args.needs_reference:
        teacher = load(model.LogprobModel, inputs.teacher or source, trained=False)
        reference = model.Policy(teacher, *shared)
    if adapters:
        base = source if is_tiny(args.model) else args.model
        adapter = lora.peft_config(policy.module.lm, adapters, base)
    return policy, reference, critic, adapter


def build_engine(run: "Run") -> Engine:
    """The engine, asleep: the trainer has the GPU."""
    args, inputs, bfloat16 = run.args, run.inputs, run.dtype == torch.bfloat16
    models = run.policy, run.reference, run.critic
    engine = Engine(
        inputs.source, run.world, args.engine_args, tokenizer=inputs.tokenizer,
        eos_ids=inputs.ends, log=run.log,
        trained=[m for m in models if isinstance(m, model.Trained)],  # share the GPU with it
        max_len=inputs.plan.longest, max_tokens=args.max_tokens, seed=args.seed,
        adapter=run.adapter if args.lora_args.in_engine(bfloat16) else None,
        kv_cache=inputs.kv_cache, dtype=torch.bfloat16 if bfloat16 else torch.float32,
        episodes=run.episodes, carry=run.carry, routes=args.expert_args.replay_routing,
        eyes=inputs.eyes, pictures=inputs.for_pictures)
    engine.sleep()
    return engine


@dataclass
class Run:
    """What a loop works with, and what stands between its steps."""
    args: CommonArgs
    world: dist.World
    inputs: Inputs
    log: log.Log
    settings: dict  # that a resumed run is compared with
    stream: Stream
    scorer: rewards.Pool
    policy: model.Policy
    reference: model.Policy | lora.Base | None
    critic: model.Critic | None  # of ppo.py
    adapter: dict | None  # adapter_config.json, with --lora_rank
    carry: Carry | None  # with --carry
    episodes: Episodes | None  # of several turns
    engine: Engine | None = None  # sft.py has none
    stop: dist.Stop | None = None  # --eval_only has none
    start: int = 0  # steps done
    kl_coef: float = 0.0  # ppo.py may adapt it

    @property
    def end(self) -> int:
        """Steps done when the loop ends."""
        return self.start if self.args.eval_args.eval_only else self.args.steps

    @property
    def evaluations(self) -> range:
        """Before which steps the loop evaluates. `finish` makes the last evaluation."""
        every = self.args.eval_args.eval_every or self.args.steps
        return range(0, self.args.steps if self.inputs.eval_rows else 0, every)

    @property
    def saves(self) -> set[int]:
        """After which steps the loop saves."""
        steps, every = self.args.steps, plan.save_every(self.args)
        return {*range(0, steps, every), steps} if every else set()

    @property
    def trained(self) -> dict[str, model.Trained]:
        """What a checkpoint has."""
        models = {"policy": self.policy, "critic": self.critic}
        return {name: it for name, it in models.items() if it}

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return model.compute_dtype(self.args.model_args, self.world.device)

    @property
    def max_gap(self) -> float:
        """Nats a token by which log-probs of trainer, engine and transformers may differ."""
        usual = 0.15 if self.dtype == torch.bfloat16 else 1e-3
        return self.args.run_args.max_gap or usual

    def restore(self, saved: checkpoint.Saved):
        """Goes on from the checkpoint. A collective."""
        state = saved.state
        checkpoint.load(saved, self.world, self.trained)
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
        self.log.say(f"SIGTERM: ended after {step} of {self.args.steps} steps. This goes on: "
                     f"{self.world.again}")
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
        if training:
            if self.args.run_args.export:
                self.export()
            if self.world.rank == 0:
                missed = summary.grade(self.log, self.args.run_args)
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
        """Ends workers and engine. A collective."""
        self.log.close()
        self.scorer.close()
        if self.episodes:
            self.episodes.workers.close()
        if self.engine:
            self.engine.close()
        else:
            self.world.barrier()  # all end together
