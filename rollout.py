"""rollout.py: the colocated vLLM engine. Start it, give it the trainer's weights, generate, put it to sleep, end it.

Each rank runs its own engine inside the trainer's process ("external launcher"); with --tp K, K neighbouring ranks are
one engine together and must generate the same requests. One request per completion, each with its own seed: what is
sampled then does not depend on which rank, or beside which others, a request runs.
"""
import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from batch import Completion
from dist import World, assert_divisible, share


@dataclass(frozen=True)
class Request:
    """One completion to sample: prompt ids, and the seed of its own random stream."""
    prompt_ids: list[int]
    seed: int


def hash_seed(*parts: int | str) -> int:
    """A 63-bit seed from (run seed, position in the data stream, completion, …).

    Hashed, because neighbouring seeds shared by neighbouring prompts (vLLM's own `n=k` gives child i seed + i) repeat streams.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class Engine:
    """vLLM in this process. Building it is a collective: every rank must.

    kv_cache: bytes of its key-value cache; 0: what gpu_memory_utilization leaves, which only a GPU knows.
    """

    def __init__(self, folder: str, world: World, *, tp: int, dtype: torch.dtype, max_len: int, vocab_size: int, eos_ids: list[int],
                 seed: int, gpu_memory_utilization: float, kv_cache: float, max_num_seqs: int, sleep_level: int,
                 eager: bool, log_level: str):
        for name, value in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL=log_level, VLLM_NO_USAGE_STATS="1",
                                DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false").items():
            os.environ.setdefault(name, value)
        gpu = world.device.type == "cuda"
        if not gpu:                                    # the ranks of one machine share its cores; vLLM would pin them all to the first
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # The sampler's small functions would take the C++ compiler 10 s at the first call. Not TORCH_COMPILE_DISABLE: FSDP has had that read.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed.reduce_op` is deprecated")
        for name in ("vllm.triton_utils.importing", "torch._library.triton"):          # both say at every start that a CPU has no Triton
            logging.getLogger(name).setLevel(logging.ERROR)
        from vllm import LLM
        if not gpu and tp > 1:
            # vLLM names the shared memory of an engine's ranks after their numbers alone, and leaves it behind: the next run on this
            # machine, and one beside this, would find it there and fail ("errno: 17"). Without a common name they talk by gloo.
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        self.world, self.dtype, self.tp = world, dtype, tp
        self.engines = assert_divisible(world.size, tp, "ranks", "--tp")
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        self.sleep_level = sleep_level if gpu else 0   # the CPU build has no sleep mode
        self.llm = LLM(
            folder, tokenizer=folder, distributed_executor_backend="external_launcher", tensor_parallel_size=tp,
            dtype=str(dtype).removeprefix("torch."), max_model_len=max_len, seed=seed, max_num_seqs=max_num_seqs,
            load_format="dummy",                       # the first load() brings the real ones, before anything is sampled
            logprobs_mode="processed_logprobs",        # after the temperature, like the trainer's
            enable_prefix_caching=True, generation_config="vllm", enforce_eager=eager or not gpu, disable_log_stats=True,
            # A prompt that is computed in parts makes the runner rewind its request's generator, which those of a CPU cannot: an exception
            # as soon as one call has more prompt tokens than a batch (4,096). So there a prompt is computed whole, or waits.
            **({} if gpu else dict(enable_chunked_prefill=False, max_num_batched_tokens=max(4096, max_len))),
            enable_sleep_mode=bool(self.sleep_level), gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=int(kv_cache) or None)
        self.asleep = False

    def mine(self, requests: list) -> list:
        """My engine's contiguous share of the requests: the same for the --tp ranks of one engine."""
        return requests[share(len(requests), self.engines, self.world.rank // self.tp)]

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The trainer's weights become the engine's, one tensor at a time; what was computed with the old ones is forgotten.

        Asleep: wakes the weights first, loads, then wakes the cache (all at once is the classic out-of-memory).
        The whole model in one call of the engine's public reload path: a part of a fused layer would leave wrong weights.
        """
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        for _ in weights:                              # a collective: every rank must use it up
            pass
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        if not self.llm.reset_prefix_cache():          # no update does it; stale prefixes are wrong by 0.5 nats, in silence
            raise RuntimeError("the engine refused to reset its prefix cache after new weights: blocks are still in use")

    def generate(self, requests: list[Request], *, temperature: float, max_tokens: int, top_p: float = 1.0,
                 stop: tuple[str, ...] = ()) -> list[Completion]:
        """One completion for each request, in order. Log-probs are those of the sampling distribution, in nats.

        With stop strings, the tokens up to and with the one that completes a stop string are part of the completion.
        An engine error leaves the engine unusable: let it end the run. Ids are checked first for that reason.
        """
        from vllm import SamplingParams, TokensPrompt
        for r in requests:
            if not r.prompt_ids or max(r.prompt_ids) >= self.vocab_size:
                raise ValueError(f"a prompt of {len(r.prompt_ids)} tokens with ids up to {max(r.prompt_ids, default=None)}: "
                                 f"it needs at least one, all below the vocabulary size {self.vocab_size}")
        if not requests:
            return []
        params = [SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=r.seed, logprobs=0,
                                 flat_logprobs=True, stop=list(stop), stop_token_ids=self.eos_ids, ignore_eos=True,
                                 detokenize=bool(stop), skip_special_tokens=False) for r in requests]
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=r.prompt_ids) for r in requests], params, use_tqdm=False)
        done = []
        for output in outputs:
            sample = output.outputs[0]
            logprobs = np.asarray(sample.logprobs.logprobs, dtype=np.float32)
            if len(logprobs) != len(sample.token_ids) or not np.isfinite(logprobs).all():
                raise RuntimeError(f"the engine returned {len(sample.token_ids)} tokens with {len(logprobs)} log-probs, "
                                   f"{int((~np.isfinite(logprobs)).sum())} of them not finite: its weights are broken")
            done.append(Completion(np.asarray(sample.token_ids, dtype=np.int32), logprobs, sample.finish_reason == "length"))
        return done

    def sleep(self) -> None:
        """Gives the GPU back to the trainer: level 2 drops the weights too, since load() brings new ones anyway."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True

    def close(self) -> None:
        """Ends the engine on every rank, and with it the default process group: call it last, after the files are written.

        The order matters: a barrier first (FSDP's threads abort otherwise), then the engine, then what is left of the group.
        """
        self.world.barrier()
        self.llm.llm_engine.engine_core.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
