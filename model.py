"""model.py: the weights. Find them, shard them with FSDP2, token log-probs and entropy, values, optimizer, export.

Nothing here knows what the numbers are used for. One `Policy` (and for ppo.py one `Critic`) is one FSDP2 module whose
forward takes a `batch.Micro`. Read top to bottom: load → head → Policy → Critic.
"""
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from batch import Micro
from dist import World
from memory import HEAD_LOGITS
from plan import SettingsError


# ---- files → sharded module -----------------------------------------------------------------------------------------

def find(model: str) -> str:
    """A local folder, or a name on the Hugging Face hub (downloaded once into its cache) → the folder with the weights.

    SettingsError when it is neither. Every rank may call it: the hub's client locks its files.
    """
    if (Path(model) / "config.json").is_file():
        return model
    if Path(model).is_dir():
        raise SettingsError(f"--model {model} is a folder without a config.json; it must hold a model in Hugging Face format.")
    from huggingface_hub import snapshot_download
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    try:
        return snapshot_download(model, allow_patterns=patterns)
    except Exception as error:     # the hub's client raises a dozen kinds, from a bad name to no network: all mean "not there"
        raise SettingsError(f"--model {model} is neither a folder here nor a model that the Hugging Face hub or its local cache "
                            f"could give ({type(error).__name__}); give a folder with config.json and *.safetensors, "
                            f"a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or 'tiny'.") from None


def shard(root: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, compute: torch.dtype, master: torch.dtype,
          checkpointing: bool, offload: bool) -> None:
    """FSDP2, in place: one group of parameters a layer, and one for the rest. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

    Compute in `compute`; parameters, gradients and their reduction stay in `master`.
    """
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master) if compute != master else MixedPrecisionPolicy()
    where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for layer in layers:
        if checkpointing:          # inside FSDP's hooks, so the recomputation in backward finds the layer unsharded
            layer.forward = _checkpointed(layer.forward)
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=where)
    fully_shard(root, mesh=mesh, mp_policy=mixed, offload_policy=where)
    # FSDP's mean over ranks would need a loss scaled by their number, which rounds otherwise on 3 ranks than on 1 (norm layers
    # compute in float32 whatever the weights are): off by 1e-6 where 1e-16 is possible. So gradients are summed, never scaled.
    for module in (*layers, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _checkpointed(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def fill(root: nn.Module, folder: str, device: torch.device, prefix: str) -> None:
    """Weights of a Hugging Face folder into a sharded module on `meta`, one tensor at a time: the peak is the largest.

    Parameters whose name does not start with `prefix` are not in the files: they are left for the caller to set.
    """
    from safetensors import safe_open
    buffers = {name: b for name, b in root.named_buffers() if b.device.type != "meta"}
    root.to_empty(device=device)
    for name, value in buffers.items():                # to_empty would leave them as garbage: rotary frequencies, in silence
        module, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(module), leaf, value.to(device))
    want = {name.removeprefix(prefix): p for name, p in root.named_parameters() if name.startswith(prefix)}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name in want:
                    put(want.pop(name), file.get_tensor(name))
    if want:
        raise SettingsError(f"{folder} has no weights for {len(want)} parameters, the first is {sorted(want)[0]!r}: "
                            f"its *.safetensors must name them as the transformers model does.")


@torch.no_grad()
def put(param: torch.Tensor, full: torch.Tensor) -> None:
    """A full tensor, the same on every rank, into a (sharded) parameter: every rank keeps its own part, nothing is sent."""
    if isinstance(param, DTensor):
        full = distribute_tensor(full.to(param.dtype), param.device_mesh, param.placements, src_data_rank=None).to_local()
        param = param.to_local()
    param.copy_(full)


def config_of(folder: str):
    """The model's transformers config; SettingsError for an architecture without a causal language model."""
    from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise SettingsError(f"--model {folder}: its config.json cannot be read ({str(error).splitlines()[0]})") from None


def build(kind: type, folder: str, world: World, *, compute: torch.dtype, checkpointing: bool = False,
          offload: bool = False, shard_size: int = 0, head_chunk: int = 0, trained: bool = True) -> nn.Module:
    """A sharded `Scorer` or `Valuer` with the folder's weights. No rank ever holds the whole model.

    A model that is not trained needs no float32 master weights: it computes from the same rounded ones, bit for bit.
    """
    from transformers import AutoModelForCausalLM
    master = torch.promote_types(compute, torch.float32) if trained else compute
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config_of(folder), dtype=master, attn_implementation="sdpa")
    for module in lm.modules():                        # computed buffers are real from the start; only parameters stay on meta
        if module._non_persistent_buffers_set:
            with torch.device("cpu"):
                fresh = type(module)(module.config)
            for name in module._non_persistent_buffers_set:
                setattr(module, name, getattr(fresh, name))
    root = kind(lm, head_chunk)
    root.eval()                                        # dropout would make the trainer another policy than the engine
    size = shard_size or world.size
    kinds = world.device.type
    mesh = (init_device_mesh(kinds, (world.size,)) if size == world.size
            else init_device_mesh(kinds, (world.size // size, size), mesh_dim_names=("replicate", "shard")))
    shard(root, lm.model.layers, mesh, compute, master, checkpointing, offload)
    fill(root, folder, torch.device("cpu") if offload else world.device, "lm.")
    return root


# ---- the heads ------------------------------------------------------------------------------------------------------

def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
                   chunk: int, entropy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and the entropy of π = softmax(hidden · weightᵀ / temperature), never holding all logits.

    hidden (n, H), weight (V, H), targets (n,) → logprobs (n,), entropy (n,) in at least float32, nats.
    Vocabulary-sized temporaries are bounded by a few times chunk × V whatever n: each chunk is checkpointed, so its
    logits are computed again in backward and freed. entropy: "none" (zeros), "value" (no gradient) or "grad".
    """
    def part(h, w, t):
        logits = (h @ w.T).to(torch.promote_types(h.dtype, torch.float32)) / temperature               # (c, V)
        logz = logits.logsumexp(-1)                                                                    # (c,)
        logp = logits.gather(-1, t.unsqueeze(-1)).squeeze(-1) - logz
        if entropy == "none":
            return logp, torch.zeros_like(logp)
        if entropy == "value":
            logits, logz = logits.detach(), logz.detach()
        logps = logits - logz.unsqueeze(-1)                                                            # (c, V)
        p = logps.exp()
        return logp, -(p * logps if entropy == "grad" else p.mul_(logps)).sum(-1)                      # H = -E[log p]

    if len(hidden) <= chunk:                           # one chunk: its logits are within the bound already
        return part(hidden, weight, targets)
    run = (lambda *a: checkpoint(part, *a, use_reentrant=False, preserve_rng_state=False)) if torch.is_grad_enabled() else part
    parts = [run(h, weight, t) for h, t in zip(hidden.split(chunk), targets.split(chunk))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class Scorer(nn.Module):
    """A causal language model as the root FSDP module; its forward gives log-probs, so the head runs inside the hooks."""

    def __init__(self, lm: nn.Module, head_chunk: int):
        super().__init__()
        self.lm = lm
        self.head_chunk = head_chunk or max(1, HEAD_LOGITS // lm.config.vocab_size)

    def forward(self, ids, source, targets, temperature, entropy):
        hidden = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state                       # (b, L, H)
        hidden = hidden.flatten(0, 1)[source]                                                          # (n, H)
        return token_logprobs(hidden, self.lm.lm_head.weight, targets, temperature, self.head_chunk, entropy)


class Valuer(nn.Module):
    """The same base with a scalar head that starts at zero: V(s_t) for the state in which token t is chosen."""

    def __init__(self, lm: nn.Module, head_chunk: int):
        super().__init__()
        self.lm = lm
        del lm.lm_head
        self.head = nn.Linear(lm.config.hidden_size, 1, bias=False, device="meta", dtype=next(lm.parameters()).dtype)

    def forward(self, ids, source):
        hidden = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[source]  # (n, H)
        values = self.head(hidden).sum(-1)             # not squeeze: FSDP's hooks want an output that is no view
        return values.to(torch.promote_types(values.dtype, torch.float32))                             # (n,)


# ---- a module with its optimizer ------------------------------------------------------------------------------------

class Trained:
    """What Policy and Critic share: gradient, one optimizer step, and where their memory is between phases."""

    def __init__(self, module: nn.Module, world: World, *, betas: tuple[float, float], weight_decay: float,
                 max_grad_norm: float, rest: tuple[str, ...] = ()):
        self.module, self.world = module, world
        self.max_grad_norm, self.resting = max_grad_norm or math.inf, rest        # the gradient needs no rest: `step` frees it
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)

    def run(self, *inputs):
        """The module's forward. FSDP keeps the embedding and the head gathered for a backward; without one they are let go here."""
        out = self.module(*inputs)
        if not torch.is_grad_enabled():
            self.module.reshard()
        return out

    def backward(self, loss: torch.Tensor) -> None:
        """Adds this rank's part of the gradient. `loss` is a sum over my tokens, already divided by the global count."""
        loss.backward()                                # summed over ranks: see `shard`

    def step(self, lr: float) -> float:
        """One AdamW step at `lr` on the clipped gradient → its norm before clipping, the same on every rank.

        A norm that is not finite is returned without a step: the weights stay as they were, on all ranks alike.
        """
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def rest(self) -> None:
        """Before generation: what --offload names moves to the host, so that the engine has the GPU."""
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """After generation: everything back to the device."""
        self._move(self.world.device)

    def _move(self, device: torch.device) -> None:
        if "params" in self.resting:
            self.module.to(device)
        if "optimizer" in self.resting:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():        # the step counter is a scalar on the host
                        state[key] = value.to(device, non_blocking=True)
        if device.type == "cpu" and self.world.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Policy(Trained):
    """The language model that is trained; also, never stepped, the reference model."""

    def logprobs(self, micro: Micro, temperature: float, entropy: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
        """log π(token) at the sampling temperature, and the entropy of π there, of every completion token: (b, t) each."""
        logp, ent = self.run(micro.ids, micro.source, micro.targets, temperature, entropy)
        return micro.spread(logp), micro.spread(ent)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) for every weight, one at a time; a collective, so every rank must use it up.

        From the state dict and not from named_parameters(): with tied embeddings the engine needs lm_head.weight as well.
        """
        for name, value in self.module.lm.state_dict().items():
            moved = value.to(self.world.device, dtype or value.dtype)
            whole = [moved.full_tensor() if isinstance(moved, DTensor) else moved]
            del moved                                  # with nothing held here, the peak is that of one weight and of the one before
            yield name, whole.pop()

    def export(self, source: str, folder: str, shard_bytes: int = 4 * 2**30, notes: dict[str, str] = {}) -> None:
        """Writes a Hugging Face folder (in the source's dtype, with its tokenizer) that transformers and vLLM load; `notes`: more files."""
        from safetensors.torch import save_file
        config = config_of(source)
        dtype = getattr(config, "dtype", None) or torch.float32
        writing, target = self.world.rank == 0, Path(folder)
        partial = target.with_name(target.name + ".partial")
        if writing:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for path in Path(source).iterdir():        # config, tokenizer, chat template, generation config: all but weights
                if path.is_file() and path.suffix in {".json", ".txt", ".jinja", ".model"} and not path.name.endswith(".index.json"):
                    shutil.copy(path, partial)
        pending, size, files, index = {}, 0, [], {}

        def flush():
            if pending:
                files.append(f"model-{len(files) + 1:05d}.safetensors")
                save_file(pending, partial / files[-1], metadata={"format": "pt"})
                index.update(dict.fromkeys(pending, files[-1]))
                pending.clear()

        for name, value in self.weights(dtype):
            if writing and not (name == "lm_head.weight" and config.tie_word_embeddings):
                pending[name] = value.detach().cpu().contiguous().clone()
                size += pending[name].nbytes
                if sum(v.nbytes for v in pending.values()) >= shard_bytes:
                    flush()
        if writing:
            flush()
            if len(files) == 1:
                os.rename(partial / files[0], partial / "model.safetensors")
            else:
                (partial / "model.safetensors.index.json").write_text(
                    json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1))
            for name, text in notes.items():
                (partial / name).write_text(text)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(partial, target)
        self.world.barrier()


class Critic(Trained):
    """ppo.py's value function: a separate copy of the base with a scalar head, its own optimizer, no shared tensors."""

    def __init__(self, module: nn.Module, world: World, **optimizer):
        super().__init__(module, world, **optimizer)
        put(module.head.weight, torch.zeros(module.head.weight.shape, device=world.device))

    def values(self, micro: Micro) -> torch.Tensor:
        """V(s_t) of the state in which each completion token was chosen: (b, t), in units of reward."""
        return micro.spread(self.run(micro.ids, micro.source))


def learning_rate(step: int, steps: int, peak: float, warmup_steps: int, schedule: str) -> float:
    """The rate of one training step (0-based): linear warm-up over warmup_steps, then constant, linear or cosine to zero."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[schedule]
