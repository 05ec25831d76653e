"""rollout.py: the colocated vLLM engine: new weights go in, completions come out.

Each rank runs an engine in its own process, on the GPU that the trainer uses too. The two take
turns: `Engine.generating` moves the trainer's tensors away, wakes the engine and gives it the new
weights; afterwards the engine sleeps. With --tp K, K neighbouring ranks are one engine.

Every completion is a request with a seed of its own, so what is sampled does not depend on the
number of ranks or on how requests are split over engines, but for rounding.

Top to bottom: the flags, then Engine (weights in: `load`, `take`; completions out: `sample`,
`complete`, `generate`), then where weights stand in vLLM's model, and what vLLM reads from the
environment.
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
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from batch import Completion, Sample
from data import Prompt, Row
from dist import assert_divisible, card_bytes, share
from model import Policy, Trained
from settings import Count, Flags, Range
from texts import reader


@dataclass
class EngineArgs(Flags):
    """The vLLM engine. Only --stop changes the maths."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, and are part of it."""
    tp: Count = 1
    """Ranks of one engine (tensor parallel)."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.5
    """The engine's share of each GPU."""
    kv_cache_gb: float = 0.0
    """Key-value cache in GiB. 0: on GPU what --gpu_memory_utilization leaves beside the weights; on
    CPU what a step can use, at most 1."""
    max_num_seqs: Annotated[int, Range(0, 4096)] = 0
    """Completions that one engine generates at once. 0: 1,024 on a GPU of 70 GiB and more, else
    256."""
    sleep_level: Literal[0, 1, 2] = 2
    """What the engine frees on GPU while the trainer works. 2: weights and cache. 1: the same, but
    it keeps the weights on the host. 0: nothing."""
    eager: bool = False
    """No CUDA graphs: a faster start, a slower generation."""

    def rules(self, plan):
        """Yields a sentence for each rule that is broken (settings.Flags)."""
        multiples = [(plan.ranks, "ranks")]
        if plan.local_size:  # an engine stays within a machine
            multiples = [(plan.local_size, "ranks of a machine")]
        if plan.shape:
            multiples.append((plan.shape.heads, "attention heads"))
        if words := " and ".join(f"{n:,} {word}" for n, word in multiples if n % self.tp):
            works = max(k for k in range(1, self.tp + 1) if not any(n % k for n, _ in multiples))
            yield f"--tp must divide the {words} (got {self.tp}). Would work: --tp {works}."


class Request(NamedTuple):
    """One completion to generate."""
    prompt_ids: list[int]
    seed: int
    room: int | None = None  # the most tokens to generate; None: --max_tokens
    row: Row | None = None  # the prompt's row of the data, which parts read


def hash_seed(*parts: int | str) -> int:
    """Hashes its arguments to a seed of 63 bits. With seed + i, as vLLM's `n=k` has it, completions
    of prompts with near seeds would get the same seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class Engine:
    """vLLM in this process. All ranks must build it together (a collective).

    run: the Run of run.py, whose models are built already; they share the GPU with the engine.
    """

    def __init__(self, run):
        world, args, inputs = run.world, run.args.engine_args, run.inputs
        self.on_gpu = world.device.type == "cuda"
        prepare_environment(self.on_gpu, args)
        from vllm import LLM
        self.run, self.world, self.args, self.log = run, world, args, run.log
        self.dtype = run.dtype if run.dtype == torch.bfloat16 else torch.float32  # no float64
        # The models whose tensors --offload may move.
        self.movable = [it for it in (run.policy, run.reference, run.critic)
                        if isinstance(it, Trained)]
        self.tokenizer, self.eos_ids = inputs.tokenizer, inputs.ends
        self.text = reader(self.tokenizer, self.eos_ids) if self.tokenizer else None  # ids → str
        self.metrics: dict[str, float] = {}  # of the last `sample`; parts write them
        self.engine_count = assert_divisible(world.size, args.tp, "ranks", "--tp")
        self.max_tokens, self.seed, self.asleep = run.args.max_tokens, run.args.seed, False
        # {name of a weight: the engine's tensor}. None: not searched yet; {}: not found.
        self.places = None
        max_len = inputs.plan.longest  # tokens of the longest sequence
        watched = world.rank == 0 and sys.stderr.isatty()
        self.bar = partial(tqdm, leave=False) if watched else False  # vLLM's progress bar
        self.sleep_level = args.sleep_level if self.on_gpu else 0  # vLLM has no sleep mode on CPU
        if self.on_gpu:
            self.make_room()  # LLM() measures how much memory is free
        threads = torch.get_num_threads()
        self.llm = LLM(
            inputs.source, tokenizer=inputs.source,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=args.tp, dtype=self.dtype, max_model_len=max_len,
            load_format="dummy",  # the first load() brings the real weights
            logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
            enable_prefix_caching=True, disable_log_stats=True,
            generation_config="vllm",  # not the model's own temperature, top_p, …
            enable_sleep_mode=self.sleep_level > 0,
            gpu_memory_utilization=args.gpu_memory_utilization,
            # The plan's. None: it found no room, and vLLM says how much it needs.
            kv_cache_memory_bytes=int(inputs.kv_cache) or None, **self.options(max_len))
        if self.on_gpu:  # LLM() leaves one thread, with which --cpu_offload's AdamW is slow
            torch.set_num_threads(threads)

    def options(self, max_len: int) -> dict:
        """Returns those arguments of vLLM.LLM that differ between GPU and CPU. max_len is the
        longest sequence, in tokens."""
        tokens, seqs = engine_limits(self.args, card_bytes(), max_len)
        # With chunked prefill vLLM computes prompts in parts and rewinds their random generators,
        # which fails on CPU in any call of more than 4,096 prompt tokens. None: vLLM's default.
        return {"enforce_eager": self.args.eager or not self.on_gpu,
                "enable_chunked_prefill": None if self.on_gpu else False,
                "block_size": None if self.on_gpu else block_tokens(None, max_len),
                "max_num_batched_tokens": tokens, "max_num_seqs": seqs}

    @contextmanager
    def generating(self, policy: Policy):
        """A context in which the engine has the GPU and the policy's weights. On leaving it, the
        trainer has the GPU back. All ranks must enter it (a collective)."""
        with self.log.time("sync"):
            if self.on_gpu:
                self.make_room()
            self.load(policy)
        yield
        if self.on_gpu:
            self.sleep()

    def make_room(self) -> None:
        """Moves the trainer's tensors that --offload names to the host, and frees what torch caches
        of the GPU, so that the engine can use it."""
        for model in self.movable:
            model.move(torch.device("cpu"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # vLLM can use only what torch does not keep

    def sleep(self) -> None:
        """Puts the engine to sleep, as --sleep_level says, and moves the trainer's tensors back to
        the GPU."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        for model in self.movable:
            model.move(self.world.device)

    def load(self, policy: Policy) -> None:
        """Gives the engine the policy's weights. All ranks must call it (a collective)."""
        with self.changing():
            self.take(policy.weights(self.dtype))

    @contextmanager
    def changing(self):
        """A context in which the engine gets new weights. It wakes the engine's weights first;
        afterwards the engine has its key-value cache too, and no prefix in it."""
        if self.asleep:  # with the cache awake too, the sync of weights may find no memory
            self.llm.wake_up(tags=["weights"])
        yield
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.forget()

    def forget(self) -> None:
        """Clears the prefix cache, which was computed with other weights: in a trial, log-probs
        after an old prefix were wrong by 0.5 nats. RuntimeError: vLLM could not clear it."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine did not reset its prefix cache: blocks are in use")

    def take(self, weights: Iterator) -> None:
        """Copies new weights, an iterator of (name, tensor), into the engine's tensors.

        vLLM's loader does this. On a CPU the first call then finds where the loader put each
        weight, and later calls copy straight to these places, if all were found. All ranks must
        call it (a collective).
        """
        if self.places:
            for name, tensor in weights:
                self.places[name].copy_(tensor)
            self.llm.apply_model(self.finish_loading)
            return
        digests: dict[str, tuple] = {}
        if not self.on_gpu:
            weights = digested(weights, digests)
        # All weights in one call: vLLM fuses layers (q, k and v), and a call with some weights of a
        # fused layer would leave the others wrong.
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        deque(weights, maxlen=0)  # `weights` is a collective: every rank must use it up
        if self.places is None and not self.on_gpu:
            [self.places] = self.llm.apply_model(partial(find_places, digests=digests))

    def finish_loading(self, model) -> None:
        """Computes again what vLLM derives from the weights, such as a packed copy of the head.
        model: vLLM's."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        process_weights_after_loading(model, self.llm.model_config, self.world.device)

    def sample(self, prompts: list[Prompt], group: int, temperature: float,
               purpose: str = "train") -> list[Sample]:
        """Samples `group` completions of each prompt → the samples of all ranks, in request order,
        the same list on every rank. Their texts and scores are filled in later
        (rewards.score_samples). `purpose` goes into the seeds: an evaluation draws from other
        random streams than training. All ranks must call it (a collective)."""
        owners = [prompt for prompt in prompts for _ in range(group)]
        requests = []
        for i, p in enumerate(owners):
            seed = hash_seed(self.seed, purpose, p.position, i % group)
            requests.append(Request(p.row.prompt_ids, seed, row=p.row))
        self.world.same_phase("rollout", len(requests))
        with self.log.time("rollout"):
            completions = self.complete(requests, temperature)
        return [Sample(*one) for one in zip(owners, completions, strict=True)]

    def complete(self, requests: list[Request], temperature: float) -> list[Completion]:
        """Returns one completion of each request, in order, the same list on every rank. Each
        engine generates its share of them. All ranks must call it (a collective)."""
        engine, tp_rank = divmod(self.world.rank, self.args.tp)
        mine = requests[share(len(requests), self.engine_count, engine)]
        completions = self.generate(mine, temperature)
        # The ranks of one engine made the same completions: each keeps its share of them.
        return self.world.gather(completions[share(len(mine), self.args.tp, tp_rank)])

    def generate(self, requests: list[Request], temperature: float) -> list[Completion]:
        """Generates a completion of each request on this engine. Their log-probs are in nats, of
        the distribution that was sampled from (after the temperature)."""
        found = self.outputs(requests, temperature) if requests else []
        return [self.completion(output.outputs[0]) for output in found]

    def outputs(self, requests: list[Request], temperature: float, **options) -> list:
        """Runs vLLM on the requests → its RequestOutput objects, in the order of the requests.
        `options` are more arguments of vLLM's generate."""
        from vllm import SamplingParams
        params = [SamplingParams(**self.sampling(r, temperature)) for r in requests]
        return self.llm.generate(self.prompts(requests), params, use_tqdm=self.bar, **options)

    def sampling(self, request: Request, temperature: float) -> dict:
        """Returns the arguments of vLLM's SamplingParams for a request. `logprobs=0` asks for the
        log-prob of the sampled token alone. A completion ends at any of `eos_ids`, which stand in
        the place of vLLM's own end token (ignore_eos)."""
        stop = list(self.args.stop)
        return dict(
            temperature=temperature, top_p=1.0, max_tokens=request.room or self.max_tokens,
            seed=request.seed, logprobs=0, flat_logprobs=True, stop=stop, detokenize=bool(stop),
            skip_clone=True,  # of parameters that only this request has
            ignore_eos=True, stop_token_ids=self.eos_ids, skip_special_tokens=False)

    def prompts(self, requests: list[Request]) -> list[dict]:
        """Returns the prompts of the requests in the form that vLLM's generate takes. A part may
        add to them."""
        return [{"prompt_token_ids": request.prompt_ids} for request in requests]

    def completion(self, output) -> Completion:
        """Makes a Completion from vLLM's CompletionOutput. RuntimeError: its log-probs are missing
        or not finite."""
        ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
            raise RuntimeError(
                f"the engine's weights are broken: {len(ids)} tokens have the log-probs {logprobs}")
        return Completion(ids, logprobs, output.finish_reason == "length")

    def close(self) -> None:
        """Shuts the engine and the process group down, unless the engine sleeps. It must be the
        last call of a run. All ranks must call it (a collective)."""
        self.world.end()  # without its barrier FSDP's threads may abort
        # An engine that sleeps ends with the process (dist.run): its shutdown would free memory
        # that the sleep has freed already, with an error of CUDA for each piece.
        if self.asleep:
            return
        self.llm.llm_engine.engine_core.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def digest(tensor: torch.Tensor) -> tuple:
    """Returns the shape and a hash of the bytes of a tensor on the host. Two tensors with one
    digest are equal to the last bit."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return tuple(tensor.shape), hashlib.blake2b(data).digest()


def digested(weights: Iterator, digests: dict[str, tuple]) -> Iterator:
    """Yields the same weights. The digest of each is written into `digests` when it is read."""
    for name, tensor in weights:
        digests[name] = digest(tensor)
        yield name, tensor


def find_places(model, digests: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """Finds where each loaded weight is stored in vLLM's model → {name: a parameter, or a view of
    some of its rows}.

    `digests` has the weights by name. The result is {} if some weight, or some parameter, is not
    found bit for bit, because vLLM cut it over ranks, transposed, scaled or packed it. A parameter
    may have more rows than its weights: a padded vocabulary.
    """
    packed, places = getattr(model, "packed_modules_mapping", {}), {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        # For example model.layers.0.self_attn + qkv_proj + weight: its rows are those of q_proj,
        # k_proj and v_proj, one after another.
        path, _, kind = full_name.rpartition(".")
        path, _, layer = path.rpartition(".")
        start = 0
        for part in packed.get(layer, [layer]):
            name = ".".join(filter(None, (path, part, kind)))
            if name not in digests:
                return {}
            shape, _ = digests[name]
            end = start + shape[0] if shape else None  # None: a single number
            place = parameter.data[start:end] if shape else parameter.data
            if digest(place) != digests[name]:
                return {}
            places[name], start = place, end
    return places if places.keys() == digests.keys() else {}


def engine_limits(args: EngineArgs, card: int | None, longest: int) -> tuple[int, int]:
    """Returns (prompt tokens that one pass computes, completions that are generated at once), at
    most, for the plan and for the engine. card: bytes of the GPU, None on a CPU. longest: tokens of
    the longest sequence, which fits into one pass on a CPU.

    These are vLLM's own defaults (get_batch_defaults in engine/arg_utils.py), except on an A100 of
    80 GB, where vLLM takes the smaller ones.
    """
    large = card and card >= 70 * 2**30
    seqs = args.max_num_seqs or (1024 if large else 256)
    if not card:
        return max(4096, longest), seqs
    return min(16384 if large else 8192, seqs * longest), seqs


def block_tokens(card: int | None, longest: int) -> int:
    """Returns how many tokens a block of the key-value cache has, for the plan and for the engine.

    The completions of a prompt share its whole blocks only, and with the 128 tokens that vLLM takes
    on a CPU most prompts have none. Small ones slow down long completions (bench/RESULTS.md), and
    below 32 vLLM's attention does not run there.
    """
    return 16 if card else 32 if longest <= 1024 else 128


def prepare_environment(gpu: bool, args: EngineArgs) -> None:
    """Sets the environment variables that vLLM and its libraries read when they are imported,
    unless they are set already, silences a few warnings, and on a CPU repairs a thing in vLLM, with
    --tp above 1 (`args`) two."""
    env = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
               VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    if not gpu:
        # vLLM would pin all ranks of this machine to the same cores. A compiler would take 10 s of
        # the first call; TORCH_COMPILE_DISABLE would be too late, since FSDP's import has read it.
        env |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    if len(tempfile.gettempdir()) > 60:  # the name of a socket has at most 107 characters
        env["VLLM_RPC_BASE_PATH"] = "/tmp"
    os.environ |= env | os.environ
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated")
    for name in ("vllm.triton_utils.importing", "torch._library.triton"):  # no triton on a CPU
        logging.getLogger(name).setLevel(logging.ERROR)
    # vLLM does without these, for sound and traces, if they cannot be imported: a second less.
    unseen = {"scipy.signal", "opentelemetry.exporter"} - sys.modules.keys()
    sys.modules |= dict.fromkeys(unseen)
    import vllm.entrypoints.llm  # noqa: F401
    for name in unseen:
        del sys.modules[name]
    if gpu:
        return
    # vLLM would pack each linear layer anew at each sync, and drop the weights into which `take`
    # copies. torch's kernel takes them as they are. With 106 million parameters a sync took 0.05 s
    # of a core and not 0.8, but 64 completions of 32 tokens 8.0 and not 6.2 (bench/RESULTS.md).
    from vllm.model_executor.layers.linear import LinearBase
    LinearBase._cpu_skip_gemm_dispatch = True
    if args.tp > 1:
        # Ranks talk by gloo: vLLM leaves its shared memory behind, and the next run fails on it
        # ("errno: 17").
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
