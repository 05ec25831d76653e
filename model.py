"""model.py: the trainer's weights: load, shard (FSDP2), log-probs, values, optimizer steps.

Top to bottom: `build` makes a LogprobModel or a ValueModel (the critic's), shards it over the ranks
and loads its weights. `token_logprobs` computes the log-probs of sampled tokens from hidden states.
Trained adds the optimizer; a loop calls Policy and Critic. Last come the learning rate and `kinds`,
which lets parts extend these classes.

Shapes: a packed input (batch.py) has S tokens with hidden states of size H; V is the vocabulary
size; n is the number of sampled tokens in a micro-batch.
"""
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_layer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute

import batch
import part
from batch import MicroBatch
from dist import World
from errors import SettingsError, as_sentence
from model_files import architecture_of, config_of, load, names_in_files
from settings import Flags

# ---- a model ----

HEAD_LOGITS = 2**27  # logits per chunk if --head_chunk is 0: 512 MiB in float32


@dataclass
class ModelArgs(Flags):
    """Weights and memory. These change results only by rounding."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute dtype (auto: bfloat16 on GPU). Master weights are at least float32."""
    checkpointing: bool = False
    """Activation checkpointing: a third slower, less memory."""
    offload: tuple[Literal["params", "optimizer", "reference"], ...] = ()
    """Offload to the host. params, optimizer: while the engine generates. reference: always."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer on the host: slow, least memory."""
    shard_size: int = 0
    """Ranks that share a copy of the weights (hybrid sharding). 0: all."""
    head_chunk: int = 0
    """Tokens whose logits are in memory at once. 0: 512 MiB of float32 logits."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.shard_size and plan.ranks % self.shard_size:
            works = max(k for k in range(1, self.shard_size + 1) if plan.ranks % k == 0)
            yield (f"--shard_size must divide the {plan.ranks:,} ranks (got {self.shard_size}). "
                   f"Would work: --shard_size {works}, or 0.")


@dataclass
class OptimizerArgs(Flags):
    """AdamW and its learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on every parameter."""
    max_grad_norm: float = 1.0
    """Clip the gradient norm to this value. 0: no clipping."""
    warmup_steps: int = 0
    """Steps of linear warm-up to --lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up, until --steps."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if max(self.betas) >= 1:
            yield f"--betas must be below 1 (got {self.betas}). Usual: --betas 0.9 0.999."


def skeleton(folder: str, dtype=torch.float32, flag: str = "model"):
    """Returns a folder's model without weights, on the "meta" device. Its attention takes packed
    inputs (batch.attention). SettingsError: this model_type is not supported; `flag` is the flag
    named in the message."""
    from transformers import AttentionInterface
    # It gets what transformers does not know of a model's inputs, such as `packed` of a MicroBatch.
    AttentionInterface.register("packed", batch.attention)
    config = config_of(folder, flag)
    architecture = architecture_of(config)
    unfit = f"--{flag} {folder} has model_type {config.model_type}, which is not supported"
    with as_sentence(unfit):
        lm = architecture.skeleton(dtype)
        architecture.stacks(lm)[0].set_attn_implementation("packed")
    # torch gives row `padding_idx` no gradient. transformers sets it to config.json's pad_token_id,
    # which may be the end token. Nothing is padded here, so every row is trained.
    for module in lm.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    # vLLM, in this process, may give transformers' class a __call__ that reads this.
    lm.base_model.do_not_compile = True
    return lm


def compute_dtype(args: ModelArgs, device: torch.device):
    """Returns the compute dtype: --dtype, or with "auto" bfloat16 on a GPU and float32 on a CPU."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return auto if args.dtype == "auto" else getattr(torch, args.dtype)


def build(kind, folder: str, world: World, args, trained: bool = True):
    """Returns a sharded LogprobModel or ValueModel with a folder's weights. All ranks must call it
    (a collective). kind: its class. args: the script's Args. A model that is not trained has no
    float32 master weights. SettingsError: the files have missing or unexpected weights, or values
    that are not finite."""
    sizes, dims = (world.size,), None
    compute = compute_dtype(args, world.device)
    master = torch.promote_types(compute, torch.float32) if trained else compute
    lm = skeleton(folder, compute if kind.frozen else master)
    names = names_in_files(lm, folder)
    root = kind(lm, args).eval()  # eval: without dropout, like the engine
    root.names = names
    if args.shard_size not in (0, world.size):
        sizes, dims = (world.size // args.shard_size, args.shard_size), ("replicate", "shard")
    mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=dims)
    offload = args.cpu_offload or (not trained and "reference" in args.offload)
    # FSDP shards the root and the first ModuleList of each module that the Architecture names.
    layers = [layer for stack in root.architecture.stacks(lm)
              for layer in next((m for m in stack.modules() if isinstance(m, nn.ModuleList)), [])]
    shard(root, layers, mesh, compute, master, args.checkpointing, offload)
    root.to_empty(device="cpu" if offload else world.device)
    for module in lm.modules():  # non-persistent buffers (rotary frequencies) are in no file
        if module._non_persistent_buffers_set:
            for p in module.parameters():
                p._is_hf_initialized = True  # so that _init_weights fills only the buffers
            lm.base_model._init_weights(module)
        # FSDP neither casts buffers nor moves them from the host, where offloaded parameters stay.
        # Non-persistent ones keep their dtype.
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            dtype = None if name in module._non_persistent_buffers_set else compute
            setattr(module, name, buffer.to(world.device, dtype))
    root.start(args.seed)  # the parameters that are in no file
    load(lm, names, folder)
    bad = [name for name, p in lm.named_parameters() if not p.to_local().isfinite().all()]
    if bad := world.gather(bad):
        raise SettingsError(f"{folder}: {bad[0]} has values that are not finite.")
    return root


def shard(root, layers, mesh, compute, master, checkpointing: bool, offload: bool):
    """Shards `root` and its `layers` with FSDP2, in place. Gradients are summed in the dtype
    `master`; the computation runs in the dtype `compute`."""
    options = {"mesh": mesh, "mp_policy": fsdp.MixedPrecisionPolicy(compute, master)}
    if offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in layers:
        if checkpointing:  # before fully_shard, so that it runs inside FSDP's hooks
            checkpoint_layer(layer, preserve_rng_state=False)
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(root, **options)
    if mesh.size() == 1:  # sum and mean are equal; a factor would copy each gradient
        return
    # The loss is a sum over all ranks, so gradients are too. FSDP's default is the mean over ranks;
    # multiplying it by their number would round differently from the gradient of 1 rank.
    for module in (*layers, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole(tensor):
    """Returns the full tensor if FSDP has sharded `tensor`, else `tensor` itself. All ranks must
    call it (a collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


class Model(nn.Module):
    """A transformers language model, `lm`, with its Architecture. FSDP shards this module."""
    frozen = False  # True: the files' weights are frozen; only what a part adds is trained
    # {name in Policy.weights: name in the files of this model's folder}, from names_in_files. They
    # differ where the folder has the older names of some model types.
    names: dict[str, str]

    def __init__(self, lm, args):
        """lm is the `skeleton` of a folder. args is the script's Args."""
        super().__init__()
        self.lm, self.architecture = lm, architecture_of(lm.config)

    def start(self, seed: int):
        """Sets the parameters that are in no file, such as the critic's head, to zero. `seed` is
        for subclasses with random initialization."""
        for name, p in self.named_parameters():
            if not name.startswith("lm."):
                nn.init.zeros_(p)

    def states(self, inputs):
        """Returns the hidden states before the head, (1, S, H), of a packed input: the `inputs` of
        a batch.MicroBatch. The attention layers call batch.attention (registered in `skeleton`),
        which gets `packed` from these inputs."""
        return self.lm.base_model(**inputs, use_cache=False).last_hidden_state

    def hidden(self, inputs, source):
        """Returns the rows (n, H) of `states` at positions `source` (n,) of the packed input, which
        may repeat.

        On a CPU the gradient of x[source] depends on the number of threads; that of index_select
        does not. On CUDA it is summed by atomic additions, in no fixed order.
        """
        return self.states(inputs).flatten(0, 1).index_select(0, source)


class LogprobModel(Model):
    """A causal language model whose forward returns log-probs."""

    def __init__(self, lm, args):
        super().__init__(lm, args)
        text = lm.config.get_text_config().to_dict()
        self.chunk = args.head_chunk or max(1, HEAD_LOGITS // text["vocab_size"])
        # Cohere multiplies logits by logit_scale; Granite divides them by logits_scaling.
        self.scale = text.get("logit_scale", 1.0) / text.get("logits_scaling", 1.0)
        self.cap = text.get("final_logit_softcapping")  # Gemma 2 has one

    def forward(self, inputs, source, targets, temperature, entropy, formula=None):
        """Returns what `formula` returns: by default log-probs (n,) in nats and entropies (n,) of
        the tokens `targets` (n,), which the states at `source` (n,) predict."""
        formula = formula or token_logprobs
        # π = softmax(scale x head / temperature), so the scale goes into the temperature.
        return formula(self.hidden(inputs, source), self.head, targets,
                       temperature / self.scale, self.chunk, entropy)

    def head(self, hidden):
        """Computes logits (n, V), at least float32, from hidden states (n, H), without the factor
        `scale`, which `forward` puts into the temperature."""
        logits = self.lm.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def hf_logits(self, inputs, keep):
        """Computes logits (m, V) at the m positions `keep` of one row with transformers' own
        forward. parts/guards compares the trainer with it before the first step. `inputs` is the
        packed input of only this row."""
        capped = self.lm.config.to_dict().get("attn_logit_softcapping")
        text = self.architecture.stacks(self.lm)[0]
        text.set_attn_implementation("eager" if capped else "sdpa")
        logits = self.hf_forward(inputs, keep)
        text.set_attn_implementation("packed")
        return logits[0]

    def hf_forward(self, inputs, keep):
        """Runs the forward of `hf_logits`. Returns logits (1, m, V). transformers creates
        positions and mask itself."""
        ids = inputs["input_ids"]
        return self.lm(input_ids=ids, use_cache=False, logits_to_keep=keep).logits


class ValueModel(Model):
    """The same base model with a scalar head instead of the language model's: V of a state."""

    def __init__(self, lm, args):
        super().__init__(lm, args)
        del lm.lm_head
        self.head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, device="meta",
                              dtype=torch.promote_types(lm.dtype, torch.float32))  # a master weight

    def forward(self, inputs, source):
        """Returns the value of the state before each sampled token, (n,), at least float32.
        `source` (n,): the positions of these states in the packed input."""
        hidden = self.hidden(inputs, source)
        values = self.head(hidden).sum(-1)  # not squeeze, which makes a view: see of_logits
        return values.to(torch.promote_types(values.dtype, torch.float32))


# ---- log-probs ----

recomputed = partial(recompute, use_reentrant=False, preserve_rng_state=False)


def token_logprobs(hidden, head, targets, temperature, chunk: int, entropy: bool):
    """Computes log π(target) and the entropy of π, both in nats, where π = softmax(head(hidden) /
    temperature).

    hidden (n, H) with head(hidden) (n, V) and targets (n,) → log-probs (n,), entropies (n,). The
    entropy takes another pass over all logits, so without `entropy` it is zero. At most `chunk`
    tokens have logits at once (`in_chunks`).
    """
    def some(hidden, targets):
        """Computes the same for some of the tokens."""
        logits = head(hidden)
        function = compiled() if logits.is_cuda else of_logits
        # A copy: a view's storage offset would be part of the compiled graph.
        return function(logits, targets.clone(), temperature, entropy)

    return in_chunks(some, chunk, hidden, targets)


def in_chunks(function, chunk: int, *tensors):
    """Applies `function` to tensors (n, …), at most `chunk` rows at once. Returns a tuple of (n,).

    With more than one chunk, the backward pass recomputes the logits, so memory is a few times
    chunk × V numbers instead of n × V.
    """
    if len(tensors[0]) <= chunk:
        return function(*tensors)
    if torch.is_grad_enabled():
        function = partial(recomputed, function)
    chunks = zip(*(x.split(chunk) for x in tensors), strict=True)
    return tuple(map(torch.cat, zip(*(function(*some) for some in chunks), strict=True)))


def of_logits(logits, targets, temperature: float, entropy: bool):
    """Computes log-probs and entropies, (n,) each, from logits (n, V). See `token_logprobs`."""
    if temperature != 1:  # a division is another pass over all logits
        logits = logits / temperature
    logz = logits.logsumexp(-1, keepdim=True)  # (n, 1)
    # Squeeze both before subtracting: FSDP's hooks do not accept a view as an output.
    logp = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logz.squeeze(-1)  # (n,)
    if not entropy:
        return logp, torch.zeros_like(logp)
    logps = logits - logz  # (n, V)
    return logp, -(logps.exp() * logps).sum(-1)


@cache
def compiled():
    """Returns `of_logits`, compiled into few passes over the logits. One graph serves every n > 1:
    a chunk recomputed in the backward pass must use the graph of its forward pass, because another
    one may save different tensors. With n = 0 and 1, with and without gradient, there are 6 graphs;
    at 9 torch would stop compiling."""
    return torch.compile(of_logits, dynamic=True)


# ---- training ----

class Trained:
    """A model with its AdamW optimizer, which a reference model does not use. args: the script's
    Args."""

    def __init__(self, module: Model, world: World, args):
        self.module, self.world, self.args = module, world, args
        self.moving = args.offload
        if next(module.parameters()).device.type == "cpu":  # already on the host
            self.moving = ()
        self.max_grad_norm = args.max_grad_norm or math.inf
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), betas=args.betas,
                                           weight_decay=args.weight_decay, fused=True)

    def inputs(self, micro: MicroBatch) -> dict:
        """Returns the module's inputs for a micro-batch. A part may add to them."""
        return micro.inputs

    def run(self, micro: MicroBatch, *more):
        """Runs the module's forward on a micro-batch and returns its output. more: the forward's
        arguments after `source`. All ranks must call it (a collective)."""
        out = self.module(self.inputs(micro), micro.source, *more)
        if not torch.is_grad_enabled():  # FSDP frees the root's full weights in the backward pass
            self.module.reshard()
        return out

    def backward(self, loss):
        """Adds the gradient of a micro-batch's loss. FSDP sums it over the ranks, so all ranks must
        call it (a collective)."""
        loss.backward()

    def step(self, lr: float) -> float:
        """Takes one AdamW step on the clipped gradient. Returns the gradient norm before clipping.
        If the norm is not finite, skips the step. All ranks must call it (a collective)."""
        norm = float(whole(nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)))
        if math.isfinite(norm):
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def move(self, device: torch.device):
        """Moves what --offload lists (parameters, AdamW's moments) to the device: to the host while
        the engine generates, and back."""
        if "params" in self.moving:
            self.module.to(device)
        if "optimizer" in self.moving:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to(device)


class Policy(Trained):
    """The trained language model, or a reference model, which takes no steps."""

    def __init__(self, module, world, args):
        super().__init__(module, world, args)
        self.metrics: dict[str, float] = {}  # of the last step; set by parts
        # vLLM rejects the head of Gemma 2, which is tied.
        gemma2 = type(module.lm).__name__.startswith("Gemma2")
        self.left_out = {"lm_head.weight"} if gemma2 else set()

    def logprobs(self, micro: MicroBatch, temperature: float, entropy: bool = False, formula=None):
        """Returns log π of each sampled token (n,), in nats, and the entropy (n,) of π before it
        (zeros unless `entropy`), or the result of another `formula`. All ranks must call it (a
        collective)."""
        return self.run(micro, micro.targets, temperature, entropy, formula)

    def reference(self, load):
        """Returns the policy that training started from, for a KL term. load: a function that
        builds it from its files; a part that needs no second copy does not call it."""
        return load()

    def stored(self, dtype=None):
        """Yields (name in the model, full tensor) for each parameter and saved buffer not in
        `left_out`; a tied one under each of its names. All ranks must exhaust it (a collective)."""
        for name, value in self.module.lm.state_dict().items():
            if name not in self.left_out:
                yield name, whole(value.to(self.world.device, dtype or value.dtype))

    def weights(self, dtype=None):
        """Yields (name, full tensor) for each weight, one at a time, in `dtype` or its own. One
        parameter may yield several weights (Architecture.pieces), under the names that transformers
        saves and vLLM loads; the model folder's own files may have older names (Model.names). All
        ranks must exhaust it (a collective)."""
        for name, value in self.stored(dtype):
            for there, piece, _ in self.module.architecture.pieces(name, value):
                yield there, piece


class Critic(Trained):
    """The value function V of ppo.py. Its head starts at zero, so V is zero at first."""

    def values(self, micro: MicroBatch):
        """Returns V(s_t), (n,), where s_t is the state in which token t was chosen. All ranks must
        call it (a collective)."""
        return self.run(micro)


def learning_rate(step: int, steps: int, peak: float, args: OptimizerArgs):
    """Returns the learning rate of a step, counted from 0. It grows linearly to `peak` over
    --warmup_steps, then follows --lr_schedule until `steps`."""
    if step < args.warmup_steps:
        return peak * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, steps - args.warmup_steps)
    return peak * {"constant": 1.0, "linear": 1.0 - done,
                   "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[args.lr_schedule]


# ---- the classes of a run, with what parts add ----

class Kinds(NamedTuple):
    """The classes that a run builds: the core's, or a part's extensions of them."""
    logprob_model: type[LogprobModel]
    value_model: type[ValueModel]
    policy: type[Policy]
    critic: type[Critic]


def kinds(args, config, trained: bool = True) -> Kinds:
    """Returns the classes for these flags and a model of this config.json. `trained` is False for a
    reference model."""
    return Kinds(part.model(LogprobModel, args, config, trained),
                 part.model(ValueModel, args, config, trained),
                 part.policy(Policy, args, config, trained),
                 part.policy(Critic, args, config, trained))
