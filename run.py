"""run.py: set-up, and what surrounds the steps: evaluation, samples, saving, the end.

`set_up` is read first: its five numbered parts join the ranks, check flags and files, find the
checkpoint, open the run's folder, and load models and engine. It returns a Run, which a loop such
as `train` in grpo.py uses between its steps. Mistakes in flags and files end the run before
weights load, on all ranks together. What needs the weights fails later: values that are not finite,
a checkpoint that cannot be read, policies that differ (parts/guards).
"""
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import dist
import files
import log
import model
import part
import rewards
from chat_template import decoder
from checkpoint import export_model
from data import Stream
from errors import Mistakes, SettingsError, numbered
from evaluate import evaluation_metrics, sample_rows
from flags import CommonArgs
from identity import identity, of_one_rank
from log import write_samples
from model_files import config_of
from preflight import Inputs, read_inputs
from rollout import Engine
from settings import save_every

# ---- set-up ----

def set_up(args, kind=None) -> "Run":
    """Sets up what a loop needs and returns the Run. kind: its class. All ranks must call it."""
    # 1. Join the other ranks. `began` is when the run first started: chat templates may write it.
    world = dist.join(args.timeout)
    folder = world.together(files.choose_folder, args, world.began)
    began = world.gather([files.began(folder, world.began)])[0]  # as rank 0 says
    # 2. Check flags and files, and read the rows. Each machine has its own files: compare them.
    mistakes = Mistakes()
    inputs = mistakes.attempt(read_inputs, args, world.size, world.local_size, began)
    world.meet()  # one machine may fetch the model for longer than another
    world.together(mistakes.stop)  # a mistake of one rank ends all of them
    made_of = identity(args, inputs, world)
    Mistakes(world.differences(of_one_rank(made_of))).stop()
    # 3. Find the newest checkpoint, if this run has one.
    saved = checkpoint.newest(args, world, folder, made_of)
    settings = {name: entry.value for name, entry in made_of.items()}
    if saved:
        settings["changes"] = saved.state["settings"].get("changes", []) + saved.changed
    # 4. Open the run's folder.
    out = world.gather([files.output_folder(folder, args)])[0]
    run_log = log.Log(out, world, args.steps)
    open_folder(run_log, args, inputs, saved.state["step"] if saved else 0, vars(args) | {
        "script": args.script, "ranks": world.size, "versions": log.versions(), "began": began,
        "changes": settings.get("changes", [])})
    introduce(run_log, args, inputs, saved, began, folder)
    # 5. Load weights, start the engine and the reward workers.
    with run_log.time("loading"):
        return build(args, world, inputs, run_log, settings, saved, kind)


def introduce(run_log: log.Log, args, inputs: Inputs, saved: checkpoint.Saved | None, began: str,
              folder: Path):
    """Prints the first lines of a run: what it is, its plan, what was read, warnings."""
    world = run_log.world
    if not args.eval_only:
        world.again = again(world, folder.name)
        after = "a kill" if save_every(args) else "SIGTERM"  # only that saves then
        what = "a new run"
        if saved:
            what = f"resumes after step {saved.state['step']} of {args.steps}, begun {began}"
        run_log.say(f"{folder}: {what}. After {after}: {world.again}")
    run_log.say(inputs.plan.text(short=True))
    resumed = [f"resumed from {saved.path}", *saved.changed] if saved else []
    for note in inputs.notes + resumed:
        run_log.say(f"  {note}")
    if inputs.warnings:
        run_log.say(numbered("warnings:", inputs.warnings))


def open_folder(run_log: log.Log, args, inputs: Inputs, start: int, kept: dict):
    """Opens the run's folder, which from here on only this run writes (Log.open). start: steps that
    are done. kept: what args.json gets. SettingsError: another run writes the folder; or
    checkpoints are wanted, and some machine does not see it. All ranks must call it (a collective).
    """
    world, every, folder = run_log.world, save_every(args), run_log.folder
    world.together(run_log.open, kept, inputs.plan.text(), start)
    if world.any_rank(every > 0 and not (folder / ".lock").exists()):  # rank 0 made it
        raise SettingsError(
            f"--save_every {every} needs a folder that all machines share: some have no {folder}. "
            f"Would work: --save_every 0.")


def again(world: dist.World, name: str) -> str:
    """Returns the command that resumes this run, whose flags are in args.json. If run.sh started
    the run, STARTED_AS has the command."""
    named = f"--name {shlex.quote(name)}"
    if started := os.environ.get("STARTED_AS"):
        return f"{started} {named}"
    place = os.path.relpath(os.path.dirname(sys.executable))
    script = f"{shlex.quote(sys.argv[0])} {named}"
    if world.size == 1:
        return f"{place}/python {script}"
    return (f"{place}/torchrun --nproc_per_node {world.local_size} {script} (with your flags of "
            f"torchrun)")


def build(args, world: dist.World, inputs: Inputs, run_log: log.Log, settings: dict,
          saved: checkpoint.Saved | None, kind=None) -> "Run":
    """Builds the Run and all that it holds: reward workers, models, engine. With a checkpoint
    `saved` they continue from it. At the end parts/guards compares the log-probs of
    engine, trainer and transformers. All ranks must call it (a collective)."""
    pool_class = part.pool(rewards.Pool, args, inputs.reward_facts.waits)
    decode = decoder(inputs.tokenizer, inputs.ends)
    scorer = pool_class(list(args.reward), args, decode)  # its processes start now
    scorer.progress["max_steps"] = args.steps  # a reward may read it, as TRL's trainer_state
    policy, reference, critic = build_models(args, world, inputs)
    run = (kind or Run)(
        args, world, inputs, run_log, settings, Stream(inputs.rows, args.seed), scorer, policy,
        reference, critic, start=saved.state["step"] if saved else 0,
        kl_coef=vars(args).get("kl_reward_coef", 0.0))
    if args.needs_engine:
        engine_class = part.engine(Engine, args, inputs.lm.config, run.dtype)
        run.engine = engine_class(args, world, inputs, run_log, [policy, reference, critic])
        run.engine.sleep()  # the trainer has the GPU
    world.together(scorer.wait)  # until a worker has loaded the rewards
    part.begin(run)
    if not args.eval_only:
        run.stop = dist.Stop(world)  # until here SIGTERM ends the process
    if saved:
        run.restore(saved)
    part.ready(run)
    return run


def build_models(args, world: dist.World, inputs: Inputs):
    """Builds (policy, reference, critic). reference and critic are None if the run needs none. All
    ranks must call it (a collective)."""
    def made(folder: str, trained: bool, wrapper="policy", module="logprob_model"):
        """Builds one model from a folder. module: the nn.Module's class. wrapper: the class that
        holds it and steps the optimizer. Both are names of fields of model.Kinds."""
        kinds = model.kinds(args, config_of(folder), trained)
        built = model.build(getattr(kinds, module), folder, world, args, trained)
        return getattr(kinds, wrapper)(built, world, args)

    def load_reference():
        """Builds the reference model from its files."""
        return made(inputs.reference or inputs.source, False)

    policy, critic = made(inputs.source, True), None
    if args.needs_critic:
        critic = made(inputs.source, True, "critic", "value_model")
    if not args.needs_reference:
        return policy, None, critic
    if inputs.reference:  # other files than the policy's
        return policy, load_reference(), critic
    return policy, policy.reference(load_reference), critic


@dataclass
class Run:
    """What a loop works with, and what it calls between its steps."""
    args: CommonArgs
    world: dist.World
    inputs: Inputs
    log: log.Log
    settings: dict  # what the next checkpoint keeps: a resumed run is compared with them
    stream: Stream
    scorer: rewards.Pool
    policy: model.Policy
    reference: object | None  # a Policy, or what has its `logprobs`; None: no KL term
    critic: model.Critic | None  # only ppo.py has one
    engine: Engine | None = None  # None: nothing is sampled
    stop: dist.Stop | None = None  # the handler of SIGTERM; --eval_only has none
    start: int = 0  # steps that were done before
    kl_coef: float = 0.0  # β of the KL in the reward; ppo.py may adapt it

    reached: int | None = None  # after how many steps --stop_at was reached

    def __post_init__(self):
        # Objects whose state_dict() goes into state.json: {name: object}. Parts add theirs.
        self.stateful = {"stream": self.stream}

    @property
    def end(self) -> int:
        """The number of steps that are done when the loop ends. With --eval_only it is `start`, so
        the loop makes no step."""
        return self.start if self.args.eval_only else self.args.steps

    @property
    def evaluations(self) -> range:
        """The numbers of steps after which the loop evaluates. `finish` makes the last
        evaluation."""
        every = self.args.eval_every or self.args.steps
        return range(0, self.args.steps if self.inputs.eval_rows else 0, every)

    @property
    def saves(self) -> set[int]:
        """The numbers of steps after which the loop saves: each multiple of --save_every, and the
        last."""
        steps, every = self.args.steps, save_every(self.args)
        return {*range(0, steps, every), steps} if every else set()

    @property
    def trained(self) -> dict[str, model.Trained]:
        """The models that a checkpoint has, by name: the policy, and the critic if there is one."""
        models = {"policy": self.policy, "critic": self.critic}
        return {name: it for name, it in models.items() if it}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return model.compute_dtype(self.args, self.world.device)

    def restore(self, saved: checkpoint.Saved):
        """Continues from a checkpoint: it loads weights, optimizer states, the position in the data
        and the KL coefficient. All ranks must call it (a collective)."""
        state = saved.state
        checkpoint.load(saved, self.world, self.trained)
        for name, it in self.stateful.items():
            it.load_state_dict(state[name])
        self.log.bad_steps = state["bad_steps"]  # steps in a row without a finite gradient
        self.kl_coef = checkpoint.kl_coef(self.args, state)  # the state's, or a flag's new value

    # ---- between the steps ----

    def evaluate(self, step: int) -> bool:
        """Evaluates --eval_data after `step` steps, and writes the metrics, unless an earlier start
        of the run has done so. Returns whether they reach --stop_at, so that the run ends. With
        --keep_best it saves if no earlier evaluation was as good. All ranks must call it (a
        collective)."""
        flags, metrics = self.args, self.world.gather([self.log.evaluation(step)])[0]
        if not metrics:
            metrics = self.held_out(step)
            self.log.step(step, metrics)
        if flags.keep_best and self.world.any_rank(self.log.best().get("step") == step):
            self.save(step)
        self.end_if_asked(step)
        if flags.stop_at is None or metrics.get("eval/pass@1", -1) < flags.stop_at:
            return False
        self.reached = step
        if save_every(self.args):
            self.save(step)
        return True

    def held_out(self, step: int) -> dict[str, float]:
        """Returns the metrics of an evaluation: pass@1 and pass@k. A script without sampling
        overrides it. All ranks must call it (a collective)."""
        samples = []
        with self.log.time("eval"), self.engine.generating(self.policy):
            self.end_if_asked(step)  # after SIGTERM, before and between the batches
            for some in sample_rows(self.engine, self.scorer, self.inputs.eval_rows, self.args):
                samples += some
                self.end_if_asked(step)
        write_samples(self.log, f"eval_{step:05d}", samples, decode=self.inputs.tokenizer.decode)
        return evaluation_metrics(samples, self.args)

    def record(self, step: int, samples: list):
        """Writes the samples of a step, counted from 0, to samples/ and prints three of them: every
        --samples_every steps, and in the last step."""
        if step % self.args.samples_every == 0 or step == self.args.steps - 1:
            write_samples(self.log, f"step_{step + 1:05d}", samples, show=3,
                          decode=self.inputs.tokenizer.decode)

    def after_step(self, step: int):
        """Saves after `step` steps where --save_every says so. After SIGTERM it saves and ends the
        process. All ranks must call it (a collective)."""
        if step in self.saves:
            self.save(step)
        self.end_if_asked(step)

    def end_if_asked(self, step: int):
        """After SIGTERM, on any rank, it saves and ends the process with the exit status 75, which
        means "try again". All ranks must call it (a collective)."""
        if not self.stop or not self.stop.agreed():
            return
        if step:
            self.save(step)
        self.log.say(f"SIGTERM: ended after {step} of {self.args.steps} steps. To resume: "
                     f"{self.world.again}")
        self.close()
        sys.exit(dist.SAVED)

    def save(self, step: int):
        """Writes a checkpoint after `step` steps, if it is not there. All ranks must call it (a
        collective)."""
        folder, flags = self.log.folder / "checkpoints", self.args
        state = {"step": step, "kl_coef": self.kl_coef, "bad_steps": self.log.bad_steps,
                 "settings": self.settings}
        state |= {name: it.state_dict() for name, it in self.stateful.items()}
        best = self.log.best().get("step") if flags.keep_best else None
        gone = checkpoint.save(folder, self.world, self.trained, state, flags.keep, best)
        removed = f", and removed {', '.join(gone)}" if gone else ""
        self.log.say(f"saved {folder}/step_{step}{removed}")

    # ---- the end ----

    def finish(self) -> int:
        """Makes the last evaluation. After training it then exports the model, calls the parts'
        end(run), grades the run, and writes done.json. Returns the exit status: 1 if a grade was
        missed, else 0. All ranks must call it (a collective)."""
        missed, flags, end = False, self.args, self.end
        if self.reached is not None:
            end = self.reached
        elif self.inputs.eval_rows:
            self.evaluate(end)
        if not self.args.eval_only:
            self.end_if_asked(end)
            if flags.export:
                self.export()
            part.end(self)
            missed = self.world.rank == 0 and log.grade(self.log, flags)
            self.log.finish(end, flags.stop_at if self.reached is not None else None)
        self.world.meet()  # only rank 0 has written the files
        missed = self.world.any_rank(missed)
        if left := [text for text, metric in self.inputs.warnings.items()
                    if not metric or any(row.get(metric) for row in self.log.rows)]:
            self.log.say(numbered("warnings that still apply:", left))
        files = sorted(path.name for path in self.log.folder.glob("[!.]*"))
        self.log.say(f"the run is in {self.log.folder}/ with {', '.join(files)}")
        self.close()
        return int(missed)

    def export(self):
        """Writes the trained model to runs/NAME/model. All ranks must call it (a collective)."""
        if (self.log.folder / "model").exists():
            self.log.say(f"{self.log.folder}/model, from an earlier end of this run, is replaced")
        export_model(self.policy, self.inputs.source, self.log.folder / "model", self.inputs.ends)

    def close(self):
        """Ends the log's readers, the reward workers and, if there is one, the engine with the
        process group. All ranks must call it (a collective)."""
        self.log.close()
        self.scorer.close()
        if self.engine:
            self.engine.close()
        else:
            self.world.end()  # no rank ends while others still work
