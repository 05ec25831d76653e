"""tools/trial.py: a file's `learn` under the conditions of a trial, on real ranks (gloo)."""
import os
import pickle
import socket
import sys
import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed.fsdp  # noqa: F401  (before the ranks are forked)
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

import dist
import losses
from keeping import checkpoint
from preflight import plan
from tools import float64
from trainer import lora, model
from trainer.batch import Batch, Micro, Sample


@dataclass
class Trial:
    """One way to call `learn`."""
    args: object
    steps: list[list[Sample]]  # the samples of each call
    ranks: int = 1
    shared: bool = True  # prompts, by their completions in a micro-batch
    plain: bool = False  # one sequence at a time, by transformers
    only: range | None = None  # these rows alone have a gradient; losses.whiten, batch_std are off
    save: bool = False  # a checkpoint after it
    load: bool = False  # that checkpoint before it


@dataclass
class Outcome:
    """What came of the last call of a trial."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # "policy, update 1" → (n,)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)  # model → all its changes, (n,)
    metrics: dict[str, float] = field(default_factory=dict)
    whitened: bool = False  # one of them was called, where it is off


# ---- models ----

class Watched:
    """Keeps the gradient of each update, and gives its outputs as the trial wants them."""

    def begin(self, trial: Trial) -> None:
        self.trial, self.gradients = trial, []

    def step(self, lr: float) -> float:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad
                 for p in self.parameters.values()]
        self.gradients.append(torch.cat([model.whole(part).flatten().clone() for part in parts]))
        return super().step(lr)

    def shown(self, micro: Micro, values):
        """(n,) → (n,): with a gradient where the trial wants one."""
        if self.trial.only is None:
            return values
        inside = torch.tensor([row in self.trial.only for row in micro.rows], dtype=torch.bool)
        return torch.where(inside[micro.row], values, values.detach())


class Policy(Watched, model.Policy):
    def logprobs(self, *inputs):
        micro, *_ = inputs
        return tuple(self.shown(micro, values) for values in super().logprobs(*inputs))


class Critic(Watched, model.Critic):
    def values(self, micro):
        return self.shown(micro, super().values(micro))


CLASSES = {"policy": (model.LogprobModel, Policy), "critic": (model.ValueModel, Critic),
           "reference": (model.LogprobModel, Policy)}


class Models:
    """The models of one process group. FOLDER/model and FOLDER/reference have their weights."""

    def __init__(self, args, world, folder: str):
        self.world, self.folder, self.modules, self.start = world, folder, {}, {}
        self.adapters = args.lora_args if args.lora_args.lora_rank else None
        names = ["policy"]
        if args.critic_args is not None:
            names.append("critic")
        if args.needs_reference and not self.adapters:
            names.append("reference")
        for name in names:
            self.modules[name] = self.build(name, args)
            self.start[name] = starting_weights(self.modules[name])

    def build(self, name: str, args):
        place = "reference" if name == "reference" else "model"
        return float64.build(CLASSES[name][0], f"{self.folder}/{place}", self.world,
                             args.model_args, adapters=self.adapters)

    def fresh(self, trial: Trial) -> dict[str, Watched]:
        """All of them with their starting weights and with new optimizers."""
        made, args = {}, trial.args
        for name, module in self.modules.items():
            module.reshard()  # after a forward without a backward, the root is whole
            made[name] = CLASSES[name][1](module, self.world, args.model_args, args.optimizer_args)
            made[name].begin(trial)
            with torch.no_grad():
                for key, p in module.named_parameters():
                    p.copy_(self.start[name][key])
            module.lm.set_attn_implementation(attention(module.lm, trial.plain))
        return made


def starting_weights(module) -> dict:
    """The file's weights. A zero would hide gradients: LoRA's B and the critic's head get others.
    """
    start, generator = {}, torch.Generator().manual_seed(0)
    for key, p in module.named_parameters():
        start[key] = p.detach().clone()
        if key.endswith("lora_B") or key == "head.weight":
            full = 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            start[key] = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
    return start


def attention(lm, plain: bool) -> str:
    """Which of transformers' functions: packing.attention, or its own."""
    if not plain:
        return "packed"
    return "eager" if getattr(lm.config, "attn_logit_softcapping", None) else "sdpa"


# ---- conditions ----

def plain_forward(self, inputs, source, targets, temperature, entropy, formula=None):
    """LogprobModel.forward of one sequence as one would write it: log-probs and entropies, (n,)."""
    if formula not in (None, model.token_logprobs):  # beside a teacher
        hidden = self.lm.base_model(input_ids=inputs["input_ids"], use_cache=False)
        return formula(hidden.last_hidden_state[0, source], self.head, targets,
                       temperature / self.scale, 1 << 20, entropy)
    logits = self.lm(input_ids=inputs["input_ids"], use_cache=False).logits[0, source]  # (n, V)
    logps = (logits / temperature).log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    if entropy != "grad":
        entropies = entropies.detach()
    return logps[torch.arange(len(targets)), targets], entropies  # FSDP wants no view


def single_rows(self, world, rows, budget, phase, learns=None) -> list[Micro]:
    """Batch.micros of a plain loop over the rows."""
    return [Micro(self, [row], world.device) for row in rows]


@contextmanager
def conditions(trial: Trial, file, outcome: Outcome):
    """Inside, batches are as the trial wants them. file: the module whose `learn` is called."""
    real_init = Batch.__init__

    def init(self, samples):
        real_init(self, samples)
        if not trial.shared:
            self.sizes = [(row, p, c) for row, (_, p, c) in enumerate(self.sizes)]

    def whiten(values, among):
        outcome.whitened = True
        return torch.where(among, values.double(), 0)

    def batch_std(rewards, scored):
        outcome.whitened = True
        return 1.0

    with ExitStack() as stack:
        stack.enter_context(patch.object(Batch, "__init__", init))
        if trial.plain:
            stack.enter_context(patch.object(Batch, "micros", single_rows))
            stack.enter_context(patch.object(model.LogprobModel, "forward", plain_forward))
        if trial.only is not None:
            stack.enter_context(patch.multiple(losses, whiten=whiten, batch_std=batch_std))
            if hasattr(file, "whiten"):
                stack.enter_context(patch.object(file, "whiten", whiten))
        yield


def attempt(trial: Trial, file, models: Models) -> Outcome:
    """Call the file's `learn` once for each step."""
    args, world, outcome = trial.args, models.world, Outcome()
    made = models.fresh(trial)
    learner, options = made["policy"], {}
    if args.critic_args is not None:
        learner = made["policy"], made["critic"]
        options = {"critic_lr": args.critic_args.critic_lr, "kl_coef": args.kl_reward_coef}
    if args.needs_reference:
        options["reference"] = made.pop("reference", None) or lora.Base(made["policy"])
    checkpoints = Path(models.folder, "checkpoints")
    if trial.load:
        checkpoint.load(checkpoint.Saved(checkpoints / "step_1", {}), world, made)
    with conditions(trial, file, outcome):
        for samples in trial.steps:
            for one in made.values():
                one.gradients.clear()
            outcome.metrics = file.learn(args, world, learner, samples, lr=args.lr, **options)
    if trial.save:
        checkpoint.save(checkpoints, world, made, {"step": 1}, keep=1)
    for name, one in made.items():
        for update, gradient in enumerate(one.gradients, 1):
            outcome.gradients[f"{name}, update {update}"] = gradient
        one.module.reshard()
        outcome.moved[f"{name}'s weights"] = torch.cat([
            model.whole(p.detach() - models.start[name][key]).flatten()
            for key, p in one.parameters.items()])
    return outcome


# ---- ranks ----

def run_trials(wanted: dict[str, Trial], file, folder: str) -> dict[str, Outcome]:
    """What came of each. One that failed is missing, and so are those after it on as many ranks."""
    outcomes = {}
    for size in sorted({trial.ranks for trial in wanted.values()}):
        these = {name: trial for name, trial in wanted.items() if trial.ranks == size}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:  # forked: torch is imported once
            start_processes(rank, (size, port, these, file, folder), size, start_method="fork")
        except ProcessException as error:
            print(f"  {plan.count(size, 'rank')}: {error}; the cause is above", flush=True)
        path = Path(folder, f"outcomes-{size}")
        if path.exists():
            outcomes |= pickle.loads(path.read_bytes())
    return outcomes


def rank(number: int, size: int, port: int, wanted: dict[str, Trial], file, folder: str) -> None:
    """One rank of a process group, in a process of its own. Rank 0 writes the outcomes."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size),
                   "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    outcomes, models, status = {}, None, 0
    world = dist.join(timeout=60)
    for name, trial in wanted.items():
        if number == 0:
            print(f"  {plan.count(size, 'rank')}: {name}", flush=True)
        try:
            models = models or Models(trial.args, world, folder)
            outcomes[name] = attempt(trial, file, models)
        except Exception:
            traceback.print_exc()
            models, status = None, 1
            if size > 1:  # the others wait for this rank
                break
    if number == 0:
        Path(folder, f"outcomes-{size}").write_bytes(pickle.dumps(outcomes))
    if status == 0:
        with suppress(RuntimeError):  # another rank has failed
            world.barrier()  # all end together
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # FSDP's threads may hang a normal exit
