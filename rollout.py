"""rollout.py: the colocated vLLM engine: new weights go in, completions come out.

Each rank runs vLLM inside the trainer's process, on the same device. Engine and trainer take
turns: `Engine.generating` moves what --offload lists to the host, wakes the engine and loads the
new weights into it; afterwards the engine sleeps. With --tp K, K consecutive ranks form one engine.

Each completion has its own seed, so the samples do not depend, up to rounding, on the number of
ranks or on how requests are split over engines.

Top to bottom: the flags; Engine (weights in: `load`, `reload`; samples out: `sample`, `complete`,
`generate`); its limits, which the plan needs too; and the environment variables that vLLM reads.
"""
import hashlib
import logging
import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from tqdm import tqdm

from batch import Sample
from data import Prompt
from dist import World, assert_divisible, card_bytes, share
from model import Policy, Trained, compute_dtype
from settings import Count, Flags, Range


@dataclass
class EngineArgs(Flags):
    """The vLLM engine. Only --stop changes what is computed."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they are part of it."""
    tp: Count = 1
    """Ranks per engine (tensor parallelism)."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.5
    """Fraction of each GPU's memory for the engine."""
    kv_cache_gb: float = 0.0
    """Key-value cache in GiB. 0: on GPU, what --gpu_memory_utilization leaves after the weights; on
    CPU, what a step can use, at most 1."""
    max_num_seqs: Annotated[int, Range(0, 4096)] = 0
    """Maximum number of completions that one engine generates at once. 0: 1,024 on a GPU with at
    least 70 GiB, else 256."""
    sleep_level: Literal[0, 1, 2] = 2
    """GPU memory that the engine frees while the trainer runs. 2: weights and cache. 1: both, with
    a copy of the weights on the host. 0: none."""
    eager: bool = False
    """Disable CUDA graphs: faster startup, slower generation."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        multiples = [(plan.ranks, "ranks")]
        if plan.local_size:  # an engine cannot span machines
            multiples = [(plan.local_size, "ranks of a machine")]
        if plan.shape:
            multiples.append((plan.shape.heads, "attention heads"))
        if words := " and ".join(f"{n:,} {word}" for n, word in multiples if n % self.tp):
            works = max(k for k in range(1, self.tp + 1) if not any(n % k for n, _ in multiples))
            yield f"--tp must divide the {words} (got {self.tp}). Would work: --tp {works}."


def hash_seed(*parts: int | str) -> int:
    """Hashes its arguments to a 63-bit seed. With seed + i, as in vLLM's `n=k`, prompts with
    nearby seeds would share completion seeds."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class Engine:
    """vLLM in this process. All ranks must construct it together (a collective).

    args: the script's Args. inputs: preflight.Inputs. log: log.Log, which times the phases. models:
    the policy and other models that share the GPU with the engine; they are already built.
    """

    def __init__(self, args, world: World, inputs, log, models: list):
        self.on_gpu = world.device.type == "cuda"
        self.world, self.args, self.log = world, args, log
        prepare_environment(self.on_gpu, self.args)
        from vllm import LLM
        dtype = compute_dtype(args, world.device)
        self.dtype = dtype if dtype == torch.bfloat16 else torch.float32  # vLLM has no float64
        # The models whose tensors --offload may move.
        self.movable = [it for it in models if isinstance(it, Trained)]
        self.eos_ids = inputs.ends
        self.metrics: dict[str, float] = {}  # of the last call of `sample`; set by parts
        self.engine_count = assert_divisible(world.size, self.args.tp, "ranks", "--tp")
        self.max_tokens, self.seed, self.asleep = args.max_tokens, args.seed, False
        max_len = inputs.plan.longest  # tokens of the longest sequence
        watched = world.rank == 0 and sys.stderr.isatty()
        self.bar = partial(tqdm, leave=False) if watched else False  # vLLM's progress bar
        # vLLM has no sleep mode on a CPU.
        self.sleep_level = self.args.sleep_level if self.on_gpu else 0
        if self.on_gpu:
            self.make_room()  # LLM() measures the free memory
        threads = torch.get_num_threads()
        self.llm = LLM(
            inputs.source, tokenizer=inputs.source,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=self.args.tp, dtype=self.dtype, max_model_len=max_len,
            load_format="dummy",  # the first load() copies the real weights
            logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
            enable_prefix_caching=True, disable_log_stats=True,
            generation_config="vllm",  # not the model's own temperature, top_p, …
            enable_sleep_mode=self.sleep_level > 0,
            gpu_memory_utilization=self.args.gpu_memory_utilization,
            # From the plan. None: no memory is left for it; vLLM then reports how much it needs.
            kv_cache_memory_bytes=int(inputs.kv_cache) or None, **self.options(max_len))
        if self.on_gpu:  # LLM() limits torch to one thread, which slows --cpu_offload's AdamW
            torch.set_num_threads(threads)

    def options(self, max_len: int) -> dict:
        """Returns the arguments of vllm.LLM that differ between GPU and CPU. max_len: the longest
        sequence, in tokens."""
        tokens, seqs = engine_limits(self.args, card_bytes(), max_len)
        # With chunked prefill, vLLM computes prompts in chunks and rewinds their random generators,
        # which fails on a CPU if a call has more than 4,096 prompt tokens. None: vLLM's default.
        return {"enforce_eager": self.args.eager or not self.on_gpu,
                "enable_chunked_prefill": None if self.on_gpu else False,
                "block_size": None if self.on_gpu else block_tokens(None, max_len),
                "max_num_batched_tokens": tokens, "max_num_seqs": seqs}

    @contextmanager
    def generating(self, policy: Policy):
        """Context manager in which the engine has the GPU and the policy's weights; on exit, the
        trainer gets the GPU back. All ranks must enter it (a collective)."""
        with self.log.time("sync"):
            if self.on_gpu:
                self.make_room()
            self.load(policy)
        yield
        if self.on_gpu:
            self.sleep()

    def make_room(self) -> None:
        """Moves the trainer's tensors listed in --offload to the host, and empties torch's CUDA
        cache, to free memory for the engine."""
        for model in self.movable:
            model.move(torch.device("cpu"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # vLLM cannot use memory that torch caches

    def sleep(self) -> None:
        """Puts the engine to sleep at --sleep_level, and moves what --offload lists back to the
        GPU."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        for model in self.movable:
            model.move(self.world.device)

    def load(self, policy: Policy) -> None:
        """Copies the policy's weights to the engine. All ranks must call it (a collective)."""
        with self.changing():
            self.reload(policy.weights(self.dtype))

    @contextmanager
    def changing(self):
        """Context manager for loading new weights into the engine. On entry, it wakes the
        engine's weights; on exit, the key-value cache, which is then empty."""
        if self.asleep:  # with the cache awake too, loading could run out of memory
            self.llm.wake_up(tags=["weights"])
        yield
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.forget()

    def forget(self) -> None:
        """Clears the prefix cache, which was computed with the old weights: in an experiment,
        log-probs after a stale prefix were off by 0.5 nats. Raises RuntimeError if vLLM cannot
        clear it."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine did not reset its prefix cache: blocks are in use")

    def reload(self, weights: Iterator) -> None:
        """Loads new weights, an iterator of (name, tensor), into vLLM. All ranks must call it (a
        collective).
        """
        # All weights in one call: vLLM fuses layers (q, k and v), and a call with only some of the
        # weights of a fused layer would corrupt the others. The "rpc" stays in this process.
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        deque(weights, maxlen=0)  # iterating is a collective: every rank must exhaust `weights`

    def sample(self, prompts: list[Prompt], group: int, temperature: float,
               purpose: str = "train") -> list[Sample]:
        """Samples `group` completions for each prompt. Returns the samples of all ranks, the same
        list on every rank; rewards.score_samples fills in their texts and rewards. Seeds depend on
        `purpose`, so evaluations and training use different random streams. All ranks must call it
        (a collective)."""
        samples = [Sample(prompt, seed=hash_seed(self.seed, purpose, prompt.position, i))
                   for prompt in prompts for i in range(group)]
        self.world.same_phase("rollout", len(samples))
        with self.log.time("rollout"):
            self.complete(samples, temperature)
        return samples

    def complete(self, samples: list[Sample], temperature: float) -> None:
        """Appends tokens to each sample, in place, until it ends, has --max_tokens or got as many
        as its `room`. `samples` is the same list on every rank; each engine generates its share.
        All ranks must call it (a collective)."""
        engine, tp_rank = divmod(self.world.rank, self.args.tp)
        mine = samples[share(len(samples), self.engine_count, engine)]
        found = self.generate(mine, temperature)
        # All ranks of an engine have the same tokens; each keeps its share.
        found = self.world.gather(found[share(len(mine), self.args.tp, tp_rank)])
        for sample, new in zip(samples, found, strict=True):
            sample.append(**new)

    def generate(self, samples: list[Sample], temperature: float) -> list[dict]:
        """Generates tokens for each sample on this engine. Returns for each the arguments of
        `Sample.append`. Log-probs, in nats, are those of the sampling distribution (after the
        temperature)."""
        found = self.outputs(samples, temperature) if samples else []
        return [self.new_tokens(output.outputs[0]) for output in found]

    def outputs(self, samples: list[Sample], temperature: float, **options) -> list:
        """Runs vLLM on the samples and returns its RequestOutput objects, in their order. options:
        further arguments of vLLM's generate."""
        from vllm import SamplingParams
        params = [SamplingParams(**self.sampling(s, temperature)) for s in samples]
        return self.llm.generate(self.contexts(samples), params, use_tqdm=self.bar, **options)

    def sampling(self, sample: Sample, temperature: float) -> dict:
        """Returns the arguments of vLLM's SamplingParams for a sample. With `logprobs=0`, vLLM
        returns only the log-prob of the sampled token. A completion ends at any of `eos_ids`, which
        replace vLLM's own end token (ignore_eos)."""
        stop, left = list(self.args.stop), self.max_tokens - len(sample.ids)
        return dict(
            temperature=temperature, top_p=1.0, max_tokens=min(sample.room or left, left),
            seed=sample.seed, logprobs=0, flat_logprobs=True, stop=stop, detokenize=bool(stop),
            skip_clone=True,  # these parameters are not shared between requests
            ignore_eos=True, stop_token_ids=self.eos_ids, skip_special_tokens=False)

    def contexts(self, samples: list[Sample]) -> list[dict]:
        """Returns the tokens so far of each sample, of prompt and completion, in the format of
        vLLM's generate. Parts may add keys."""
        return [{"prompt_token_ids": s.prompt.row.prompt_ids + s.ids.tolist()} for s in samples]

    def new_tokens(self, output) -> dict:
        """Converts vLLM's CompletionOutput to the arguments of `Sample.append`. Raises RuntimeError
        if log-probs are missing or not finite."""
        ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
            raise RuntimeError(
                f"the engine's weights are broken: {len(ids)} tokens have the log-probs {logprobs}")
        return {"ids": ids, "logprobs": logprobs, "truncated": output.finish_reason == "length"}

    def close(self) -> None:
        """Shuts down the engine and the process group, unless the engine is asleep. This must be
        the last call of a run. All ranks must call it (a collective)."""
        self.world.end()  # a barrier; without it, FSDP's threads may abort
        # A sleeping engine is left until the process ends (dist.run): shutting it down would free
        # memory that sleep has already freed and raise a CUDA error for each block.
        if self.asleep:
            return
        self.llm.llm_engine.engine_core.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def engine_limits(args: EngineArgs, card: int | None, longest: int) -> tuple[int, int]:
    """Returns (max_num_batched_tokens, max_num_seqs) for the plan and the engine: the maximum
    number of prompt tokens in one pass, and of completions generated at once. card: bytes of the
    GPU; None on a CPU. longest: tokens of the longest sequence; on a CPU it must fit in one pass.

    These are vLLM's defaults (get_batch_defaults in engine/arg_utils.py), except on an 80 GB A100,
    where vLLM uses the smaller ones.
    """
    large = card and card >= 70 * 2**30
    seqs = args.max_num_seqs or (1024 if large else 256)
    if not card:
        return max(4096, longest), seqs
    return min(16384 if large else 8192, seqs * longest), seqs


def block_tokens(card: int | None, longest: int) -> int:
    """Returns the number of tokens per block of the key-value cache, for the plan and the engine.

    The completions of a prompt share only its full blocks. With vLLM's CPU default of 128 tokens,
    most prompts have none. Small blocks slow down long completions (bench/RESULTS.md), and vLLM's
    CPU attention needs at least 32.
    """
    return 16 if card else 32 if longest <= 1024 else 128


def prepare_environment(gpu: bool, args: EngineArgs) -> None:
    """Sets the environment variables that vLLM and its libraries read on import, unless already
    set; silences a few warnings; and, on a CPU with --tp > 1, patches vLLM in one place."""
    env = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
               VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    if not gpu:
        # vLLM would pin all ranks of a machine to the same cores. Compilation would add 10 s to the
        # first call. TORCH_COMPILE_DISABLE has no effect here: importing FSDP has already read it.
        env |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    if len(tempfile.gettempdir()) > 60:  # a socket path has at most 107 characters
        env["VLLM_RPC_BASE_PATH"] = "/tmp"
    os.environ |= env | os.environ
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated")
    for name in ("vllm.triton_utils.importing", "torch._library.triton"):  # no Triton on a CPU
        logging.getLogger(name).setLevel(logging.ERROR)
    # vLLM works without these modules (audio, tracing). Making their import fail saves a second.
    unseen = {"scipy.signal", "opentelemetry.exporter"} - sys.modules.keys()
    sys.modules |= dict.fromkeys(unseen)
    import vllm.entrypoints.llm  # noqa: F401
    for name in unseen:
        del sys.modules[name]
    if not gpu and args.tp > 1:
        # Use gloo between ranks: otherwise vLLM leaves its shared memory behind, and the next run
        # fails with "errno: 17".
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
