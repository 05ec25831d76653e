"""rollout.py: the colocated vLLM engine.

Each rank runs an engine in its own process. With --tp K, K neighbouring ranks are one engine. Every
completion is a request with a seed of its own: what is sampled does not depend on the layout.
"""
import hashlib
import logging
import os
import sys
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
from data import Prompt, reader
from dist import World, assert_divisible, share
from errors import Count, Range
from model import Policy, Trained
from parts.lora import lora
from parts.pictures.eyes import opened
from parts.pictures.rows import pictures_in
from parts.pictures.seeing import NEVER

HELD = 2  # GiB of pictures' pixels that an engine holds at once


@dataclass
class EngineArgs:
    """The vLLM engine. Only --stop changes the maths."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, and are part of it."""
    tp: Count = 1
    """Ranks of one engine (tensor parallel)."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.5
    """The engine's share of each GPU."""
    kv_cache_gb: float = 0.0
    """Key-value cache in GiB. 0: what the share leaves; on CPU what a step can use, up to 1."""
    max_num_seqs: Annotated[int, Range(0, 4096)] = 0
    """Completions that one engine generates at once. 0: vLLM's choice for the GPU; 256 on CPU."""
    sleep_level: Literal[0, 1, 2] = 2
    """What it frees on GPU while the trainer works. 2: weights and cache. 1: the same, but it keeps
    the weights on the host. 0: nothing."""
    eager: bool = False
    """No CUDA graphs: a faster start, a slower generation."""

    def rules(self, plan):
        """See plan.problems."""
        wholes = [(plan.ranks, "ranks")]
        if plan.local_size:
            wholes = [(plan.local_size, "ranks of a machine")]
        if plan.shape:
            wholes.append((plan.shape.heads, "attention heads"))
        if words := " and ".join(f"{n:,} {word}" for n, word in wholes if n % self.tp):
            works = max(k for k in range(1, self.tp + 1) if not any(n % k for n, _ in wholes))
            yield f"--tp must divide the {words} (got {self.tp}). Would work: --tp {works}."


class Request(NamedTuple):
    prompt_ids: list[int]
    seed: int
    room: int | None = None  # tokens at most; None: --max_tokens
    pictures: object = None  # of the prompt: parts/pictures/rows.py


def hash_seed(*parts: int | str) -> int:
    """63 bits. Neighbouring seeds (vLLM's `n=k`: seed + i) would share streams."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class Engine:
    """vLLM in this process. Building one is a collective.

    max_len: tokens of the longest sequence. kv_cache: bytes; 0: --gpu_memory_utilization decides.
    trained: the models that share the GPU with it. adapter: that of the policy, as
    lora.peft_config has it, if the engine takes it. episodes: turns.Episodes; None: one turn.
    carry: carry.Carry; None: each step waits for its longest completion.
    routes: it tells which experts each token used. eyes: of a model that sees (pictures/), and
    pictures: vLLM's options for them.
    """

    def __init__(self, folder: str, world: World, args: EngineArgs, *, tokenizer,
                 eos_ids: list[int], dtype: torch.dtype, max_len: int, max_tokens: int, seed: int,
                 kv_cache: float, log, trained: list[Trained], adapter: dict | None = None,
                 episodes=None, carry=None, routes: bool = False, eyes=None,
                 pictures: dict | None = None):
        self.on_gpu = world.device.type == "cuda"
        prepare_environment(self.on_gpu, args)
        from vllm import LLM
        self.world, self.args, self.dtype, self.log, self.trained = world, args, dtype, log, trained
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.text = reader(tokenizer, eos_ids) if tokenizer else None  # ids → str
        self.episodes, self.carry, self.metrics = episodes, carry, {}  # metrics: carry's
        self.engines = assert_divisible(world.size, args.tp, "ranks", "--tp")
        self.max_tokens, self.seed, self.asleep = max_tokens, seed, False
        self.adapter, self.request, self.syncs, self.eyes = adapter, None, 0, eyes
        watched = world.rank == 0 and sys.stderr.isatty()
        self.bar = partial(tqdm, leave=False) if watched else False  # vLLM's own
        # With an adapter the base comes once, in the first load: it must be kept.
        self.sleep_level = min(args.sleep_level, 1 if adapter else 2)
        if self.on_gpu:
            self.make_room()  # vLLM measures what is free
        else:
            self.sleep_level = 0  # vLLM has no sleep mode there
        threads = torch.get_num_threads()
        self.llm = LLM(
            folder, tokenizer=folder, distributed_executor_backend="external_launcher",
            tensor_parallel_size=args.tp, dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_len,
            load_format="dummy",  # the first load() brings the real weights
            logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
            enable_prefix_caching=True, generation_config="vllm", disable_log_stats=True,
            enable_sleep_mode=self.sleep_level > 0,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=int(kv_cache) or None,
            enable_return_routed_experts=routes, **(pictures or {}),
            **self.options_of_device(max_len), **self.options_of_adapter())
        if self.on_gpu:  # vLLM leaves one: --cpu_offload's AdamW would be slow
            torch.set_num_threads(threads)

    def options_of_device(self, max_len: int) -> dict:
        """vLLM's, by GPU or CPU. max_len: tokens."""
        if self.on_gpu:
            return {"enforce_eager": self.args.eager,
                    "max_num_seqs": self.args.max_num_seqs or None}
        # Else vLLM computes prompts in parts and rewinds their random generators, which fails on
        # CPU in any call of more than 4,096 prompt tokens.
        return {"enforce_eager": True, "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, max_len),
                "max_num_seqs": engine_limits(self.args, None)[1]}

    def options_of_adapter(self) -> dict:
        """vLLM's, for --lora_rank. {}: none."""
        if not self.adapter:
            return {}
        return {"enable_lora": True, "lora_target_modules": self.adapter["target_modules"],
                "max_lora_rank": next(r for r in lora.LORA_RANKS if r >= self.adapter["r"])}

    @contextmanager
    def generating(self, policy: Policy):
        """Inside, the engine has the policy's weights and the GPU."""
        with self.log.time("sync"):
            if self.on_gpu:
                self.make_room()
            adapter = lora.tensors(policy.module.lm, self.world.device) if self.adapter else None
            self.load(policy.weights(self.dtype, merge=not self.adapter), adapter)
        yield
        if self.on_gpu:
            self.sleep()

    def make_room(self) -> None:
        """The trainer leaves the GPU to the engine."""
        for model in self.trained:
            model.move(torch.device("cpu"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # vLLM can use only what torch does not keep

    def sleep(self) -> None:
        """The trainer has the GPU back."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        for model in self.trained:
            model.move(self.world.device)

    def load(self, weights: Iterator, adapter: Iterator | None = None) -> None:
        """Take new weights, all in one call (a part of a fused layer would leave wrong ones).

        Both yield (name, tensor). With an adapter, the weights are its base: they are taken once.
        """
        if self.asleep:  # weights and cache at once is the classic out-of-memory
            self.llm.wake_up(tags=["weights"])
        if not (adapter and self.request):
            if not self.on_gpu:
                self.llm.apply_model(forget_packed_experts)
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
            deque(weights, maxlen=0)  # a collective: every rank must use it up
            self.request = None
        if adapter:
            self.syncs += 1
            self.request = put_adapter(self.llm, self.adapter, adapter, self.syncs)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        if not self.llm.reset_prefix_cache():  # old prefixes would be wrong by 0.5 nats
            raise RuntimeError("the engine did not reset its prefix cache: blocks are in use")
        if self.eyes:  # the worker forgot the features of pictures: so must the scheduler
            self.llm.llm_engine.reset_encoder_cache()

    def sample(self, prompts: list[Prompt], group: int, temperature: float,
               purpose: str = "train") -> list[Sample]:
        """`group` completions of each prompt: P·group samples in request order, on every rank.
        Their texts come with their scores."""
        if self.carry and purpose == "train":  # completions go on in the next step
            return self.carry.sample(self, prompts)
        owners = [prompt for prompt in prompts for _ in range(group)]

        def seed(i: int, *turn: int) -> int:
            return hash_seed(self.seed, purpose, owners[i].position, i % group, *turn)

        requests = [Request(p.row.prompt_ids, seed(i), pictures=pictures_in(p.row))
                    for i, p in enumerate(owners)]
        self.world.same_phase("rollout", len(requests))
        with self.log.time("rollout"):
            completions = self.complete(requests, temperature)
            if self.episodes:
                self.episodes.play(
                    owners, completions, partial(self.complete, temperature=temperature), seed)
        return [Sample(*one) for one in zip(owners, completions, strict=True)]

    def complete(self, requests: list[Request], temperature: float) -> list[Completion]:
        """One completion of each request, on every rank. A collective."""
        engine, place = divmod(self.world.rank, self.args.tp)
        mine = requests[share(len(requests), self.engines, engine)]
        mine = self.generate(mine, temperature)
        # The ranks of one engine made the same completions: each keeps its share of them.
        return self.world.gather(mine[share(len(mine), self.args.tp, place)])

    def generate(self, requests: list[Request], temperature: float) -> list[Completion]:
        """With log-probs in nats, of the sampling distribution."""
        outputs = []
        for part in parts_of(requests) if self.eyes else [requests]:
            outputs += self.outputs(part, temperature) if part else []
        if self.eyes:
            self.llm.llm_engine.reset_mm_cache()
            compare_ids(requests, outputs)
        return [completion_of(output.outputs[0]) for output in outputs]

    def outputs(self, requests: list[Request], temperature: float) -> list:
        """vLLM's own."""
        from vllm import SamplingParams, TokensPrompt
        stop = list(self.args.stop)
        params = [SamplingParams(
            temperature=temperature, top_p=1.0, max_tokens=r.room or self.max_tokens, seed=r.seed,
            logprobs=0, flat_logprobs=True, stop=stop, detokenize=bool(stop), ignore_eos=True,
            stop_token_ids=self.eos_ids, skip_special_tokens=False,
            logit_bias={self.eyes.token: NEVER} if self.eyes else None) for r in requests]
        prompts = as_prompts(requests) if self.eyes else [
            TokensPrompt(prompt_token_ids=r.prompt_ids) for r in requests]
        return self.llm.generate(prompts, params, use_tqdm=self.bar, lora_request=self.request)

    def close(self) -> None:
        """The last call of a run: it ends the process group too."""
        self.world.barrier()  # else FSDP's threads may abort
        self.llm.llm_engine.engine_core.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def parts_of(requests: list[Request]) -> list[list[Request]]:
    """Of a model that sees: parts whose pixels fit. Those of a group count once."""
    parts, room, seen = [[]], HELD * 2**30, set()
    for request in requests:
        pictures = request.pictures
        if pictures and pictures.sources not in seen:
            if parts[-1] and pictures.bytes > room:
                parts, room, seen = [*parts, []], HELD * 2**30, set()
            room -= pictures.bytes
            seen.add(pictures.sources)
        parts[-1].append(request)
    return parts


def compare_ids(requests: list[Request], outputs: list) -> None:
    """RuntimeError unless engine and trainer have the same ids."""
    for request, output in zip(requests, outputs, strict=True):
        if output.prompt_token_ids != request.prompt_ids:
            raise RuntimeError(
                f"engine and trainer differ in the ids of a prompt with pictures: "
                f"{len(output.prompt_token_ids)} and {len(request.prompt_ids)} tokens")


def as_prompts(requests: list[Request]) -> list[dict]:
    """What vLLM gets: one token for each picture, of which it makes more itself. Of ids that are
    those of a tile already it would make still more, and say nothing."""
    images = {r.pictures.sources: [*map(opened, r.pictures.sources)]  # those of a group once
              for r in requests if r.pictures}
    return [{"prompt_token_ids": r.pictures.short_ids,
             "multi_modal_data": {"image": images[r.pictures.sources]}}
            if r.pictures else {"prompt_token_ids": r.prompt_ids} for r in requests]


def engine_limits(args, card) -> tuple[int, int]:
    """(prompt tokens in one pass of the engine, completions at once): by default vLLM's own choice
    for a card (get_batch_defaults in its arg_utils.py)."""
    tokens, seqs = 8192, 256
    if card and card >= 70 * 2**30:  # of an A100 it is less
        tokens, seqs = 16384, 1024
    return tokens, args.max_num_seqs or seqs


def put_adapter(llm, config: dict, adapter: Iterator, sync: int):
    """Put an adapter (lora.tensors) into the engine → the request for it. Its path exists nowhere,
    and is new in each sync: the prefix cache knows an adapter by it, and would serve an old one."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest
    copies = {name: t.to("cpu", copy=True) for name, t in adapter}  # vLLM scales B in place

    def put(model):
        manager, names = model.lora_manager, getattr(model, "hf_to_vllm_mapper", None)
        made = LoRAModel.from_lora_tensors(
            1, copies, PEFTHelper.from_dict(config), device="cpu",
            dtype=manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size,
            weights_mapper=names.get_rename_mapper() if names else None)
        manager.remove_adapter(1)
        manager.add_adapter(made)
        manager.activate_adapter(1)

    llm.apply_model(put)
    return LoRARequest("policy", 1, f"memory/sync_{sync}")


def forget_packed_experts(model) -> None:
    """Before new weights, on a CPU: vLLM packs those of experts only where it has no kernel for
    them yet. The log-probs of others were wrong by 10 nats."""
    for layer in model.modules():
        if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
            layer.quant_method.moe_kernel = None


def completion_of(output) -> Completion:
    """vLLM's output → ours."""
    ids = np.asarray(output.token_ids, dtype=np.int32)
    logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
    if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
        raise RuntimeError(
            f"the engine's weights are broken: {len(ids)} tokens have the log-probs {logprobs}")
    return Completion(ids, logprobs, output.finish_reason == "length", routes=output.routed_experts)


def prepare_environment(gpu: bool, args: EngineArgs) -> None:
    """What vLLM reads when it is imported, and one repair on CPU."""
    env = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
               VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    if not gpu:
        # vLLM would pin all ranks of this machine to the same cores. A compiler would take 10 s of
        # the first call (FSDP's import has read TORCH_COMPILE_DISABLE already).
        env |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    for name, value in env.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning,
                            message="`torch.distributed.reduce_op` is deprecated")
    for name in ("vllm.triton_utils.importing", "torch._library.triton"):  # a CPU has no Triton
        logging.getLogger(name).setLevel(logging.ERROR)
    if not gpu and args.tp > 1:
        # By gloo: vLLM leaves its shared memory behind, and the next run fails on it ("errno: 17").
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        def never(self) -> bool:
            return False

        CpuCommunicator._all_group_ranks_share_shm_group_name = never
