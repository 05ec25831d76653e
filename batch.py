"""batch.py: the global batch, its minibatches, and how micro-batches are packed.

    batch → minibatches    one optimizer step each: contiguous slices of the samples
    minibatch → ranks → micro-batches    to fit in memory (balance); never changes the maths

A row of this file is not a data row, but a sample: a completion with its prompt. N completions have
M sampled tokens in total. A vector with one number per completion is (N,). A vector with one number
per sampled token is (M,): the completions' tokens, concatenated. Tokens that the policy did not
sample, such as a tool's reply, are in the model's input but in no (M,) vector. A micro-batch has n
of the M tokens: (n,). No vector is padded.

A micro-batch is one input that contains each of its prompts once. A completion attends to its
prompt and to itself:

    rows, concatenated         [p p p a a]  [p p p b b b]  [q c]
    packed                     [p p p q a b b]      a: position 3, b: positions 3 and 4
                               c is the last token of its row, so it is not in the input

All prompts come first, then all completions without their last tokens, which predict nothing. Each
row attends to the same tokens as it would unpacked, so packing changes log-probs only by rounding
(tests/test_float64.py).

Top to bottom: rows to micro-batches by their sizes, the packed input and its attention, and the
classes of the batch: `Sample`, `Batch` and `MicroBatch`.
"""
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data import Prompt, Row
from dist import World, pad_to_multiple, share

# ---- rows → micro-batches ----

# Attention copies the keys of a prompt for each of its completions. All completions of a
# micro-batch have at most KEYS x its token budget keys.
KEYS = 4

# The size of a row is (owner, prompt tokens p, completion tokens c). owner: the index of the first
# adjacent row with the same prompt. A micro-batch contains each of its prompts once, and the
# completions without their last tokens, which predict nothing.
Size = tuple[int, int, int]


def packed_tokens(rows: list[int], sizes: list[Size]) -> int:
    """Returns the number of input tokens of a micro-batch with these rows: each of its prompts
    once, and each completion without its last token. sizes: the Size of every row; `rows` are
    indices into it.
    """
    prompts = {sizes[row][0]: sizes[row][1] for row in rows}
    return sum(prompts.values()) + sum(sizes[row][2] - 1 for row in rows)


def cut(sizes: list[Size], budget: int) -> list[list[int]]:
    """Splits the rows of `sizes`, in order, into micro-batches and returns the row numbers of each.

    Each micro-batch has at most `budget` tokens, and its completions attend to at most KEYS x
    budget keys. Raises a ValueError if a single row has more tokens than the budget.
    """
    micros, last, room, keys = [], None, 0, 0
    for row, (owner, p, c) in enumerate(sizes):
        if p + c > budget:
            raise ValueError(f"row {row} has {p + c} tokens; the budget is {budget}")
        new = c - 1 if owner == last else p + c - 1
        if not micros or new > room or p + c > keys:
            micros.append([])
            new, room, keys = p + c, budget, KEYS * budget  # p + c, as in the check above
        micros[-1].append(row)
        last, room, keys = owner, room - new, keys - p - c
    return micros


def balance(sizes: list[Size], ranks: int, budget: int) -> list[list[list[int]]]:
    """Distributes the rows of `sizes` over the ranks. Returns [rank][round]: the row numbers of a
    micro-batch, which has at most `budget` tokens.

    Every rank gets the same number of micro-batches, because FSDP's collectives must match; an
    empty micro-batch is padding. There are as few rounds as the budget allows, and the
    micro-batches of a round have about the same cost.
    """
    rounds = max(1, -(-len(cut(sizes, budget)) // ranks))
    # The smallest budget with as few rounds keeps the largest micro-batch small.
    budgets = range(max((p + c for _, p, c in sizes), default=1), budget)
    even = bisect_left(budgets, True, key=lambda b: len(cut(sizes, b)) <= rounds * ranks)
    micros = cut(sizes, budgets[even] if even < len(budgets) else budget)
    # While there are fewer micro-batches than ranks x rounds, some rank would be idle, so halve the
    # largest one.
    while len(micros) < rounds * ranks and any(len(m) > 1 for m in micros):
        largest = max((m for m in micros if len(m) > 1), key=lambda m: packed_tokens(m, sizes))
        micros.remove(largest)
        micros += [largest[:len(largest) // 2], largest[len(largest) // 2:]]
    micros.sort(key=lambda m: packed_tokens(m, sizes), reverse=True)
    micros = pad_to_multiple(micros or [[]], rounds * ranks, [])
    return [micros[rank::ranks] for rank in range(ranks)]


# ---- packing ----

EVEN = 0.7  # each segment of a block has at least this share of the longest one's length


class Segment(NamedTuple):
    """A prompt, or a completion without its last token: `length` tokens of the packed input,
    starting at token number `start`.

    A segment attends to its prefix and to itself. A completion's prefix is its prompt; a prompt has
    no prefix.
    """
    start: int
    length: int
    prefix_start: int
    prefix: int  # the number of tokens of the prefix


class Packed:
    """The segments of a packed input of S tokens. They determine which tokens attend to which.

    `blocks` and `varlen` are computed once per micro-batch, by the first layer. This is not a
    dataclass: before a module runs, FSDP rebuilds every dataclass among its inputs, so each layer
    would recompute them.
    """

    def __init__(self, segments: list[Segment], tokens: int, device: torch.device):
        """tokens: S."""
        self.segments, self.tokens, self.device = segments, tokens, device

    @cached_property
    def blocks(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor, int]], torch.Tensor]:
        """Groups the segments into blocks for plain attention, and returns (blocks, place). The
        segments of one block have the same prefix length and similar lengths.

        A block is (queries (n, L), keys (n, prefix + L), prefix): the numbers of the input tokens
        of n segments and their prefixes. Shorter segments are padded on the right, where the causal
        mask hides the padding. place (S,): the index of each input token among the queries of all
        blocks.
        """
        groups: list[list[Segment]] = []
        for s in sorted(self.segments, key=lambda s: (s.prefix, -s.length)):
            longest = groups[-1][0] if groups else s
            if not groups or s.prefix != longest.prefix or s.length < EVEN * longest.length:
                groups.append([])
            groups[-1].append(s)
        blocks, place, done = [], torch.empty(self.tokens, dtype=torch.long), 0
        for group in groups:
            start, length, prefix_start, prefix = torch.tensor(group).unsqueeze(-1).unbind(1)
            at, prefix = torch.arange(int(length.max())), int(prefix[0])  # (L,)
            queries, real = start + at, at < length  # (n, L)
            # Where each real token stands among all padded queries.
            place[queries[real]] = done + real.flatten().nonzero().flatten()
            done += queries.numel()
            queries = queries.clamp(max=self.tokens - 1)  # padding may run past the end
            keys = torch.cat([prefix_start + torch.arange(prefix), queries], 1)
            blocks.append((to_device(queries, self.device), to_device(keys, self.device), prefix))
        return blocks, to_device(place, self.device)

    @cached_property
    def varlen(self) -> tuple:
        """The arguments of torch's varlen_attn: the token numbers of all keys, segment after
        segment; the cumulative numbers of queries and of keys, each (segments + 1,) int32; and the
        largest numbers of queries and of keys of a segment.
        """
        keys = []
        for s in self.segments:
            keys += [torch.arange(s.prefix_start, s.prefix_start + s.prefix),
                     torch.arange(s.start, s.start + s.length)]
        queries = torch.tensor([s.length for s in self.segments])
        with_prefix = queries + torch.tensor([s.prefix for s in self.segments])
        ends = [to_device(F.pad(n.cumsum(0), (1, 0)).int(), self.device)
                for n in (queries, with_prefix)]
        return (to_device(torch.cat(keys), self.device), *ends,
                int(queries.max()), int(with_prefix.max()))


def to_device(x, device: torch.device):
    """Returns the tensor on the device. A copy to a GPU is asynchronous."""
    if device.type == "cuda":  # from pinned memory: the host does not wait for the GPU
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def pack(owners: list[int], prompts: list[list[int]], completions: list[torch.Tensor],
         device: torch.device):
    """Packs rows into one input. Rows with the same owner share a prompt, which the input contains
    once.

    owners: a number per row. prompts: a list of ids per row. completions: ids (c,) per row. Returns
    ids (1, S), positions (1, S), the Packed, and for each row a vector (c,): the number of the
    input token whose output predicts each token of the completion. The last token of the prompt
    predicts the first one.
    """
    ids, segments, sources, starts, size = [], [], [], {}, 0
    for owner, prompt in zip(owners, prompts, strict=True):
        if owner not in starts:
            starts[owner] = size
            segments.append(Segment(size, len(prompt), 0, 0))
            ids.append(torch.tensor(prompt))
            size += len(prompt)
    for owner, prompt, completion in zip(owners, prompts, completions, strict=True):
        p, n, start = len(prompt), len(completion) - 1, starts[owner]
        segments.append(Segment(size, n, start, p))
        ids.append(completion[:-1])
        sources.append(torch.tensor([start + p - 1, *range(size, size + n)]))
        size += n
    positions = torch.cat([torch.arange(s.prefix, s.prefix + s.length) for s in segments])
    packed = Packed([s for s in segments if s.length], size, device)
    return torch.cat(ids).unsqueeze(0), positions.unsqueeze(0), packed, sources


def attention(module, query, key, value, attention_mask, *, packed, scaling=None,
              sliding_window=None, softcap=None, **options):
    """Computes the attention of a packed input, with the signature of a transformers attention
    function: query, key and value (1, heads, S, d) → (1, S, heads, d), None.

    packed: the Packed of the input, which says what each token sees; attention_mask is not read.
    scaling: the factor on the scores. sliding_window: how many keys a query attends to, itself
    included. softcap: a bound on the scores.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, heads, d)
    # The half-precision GPU kernel supports head sizes up to 256, and no cap.
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
    if query.is_cuda and fits and softcap is None:
        return varlen(q, k, v, packed, scaling, sliding_window).unsqueeze(0), None
    return blocks(q, k, v, packed, scaling, sliding_window, softcap).unsqueeze(0), None


def varlen(q, k, v, packed: Packed, scale: float, window: int | None = None):
    """Computes the attention of a packed input with torch's half-precision GPU kernel: q, k, v (S,
    heads, d) → (S, heads, d). Its causal mask is aligned at the end: the last query of a segment
    sees the last key, so a completion sees its whole prompt. scale: the factor on the scores.
    window: how many keys a query attends to, itself included.
    """
    from torch.nn.attention.varlen import varlen_attn  # slow to import
    keys, *sizes = packed.varlen
    left = (window or 0) - 1  # -1: no window
    return varlen_attn(q, k.index_select(0, keys), v.index_select(0, keys), *sizes,
                       window_size=(left, 0), scale=scale, enable_gqa=True)


def blocks(q, k, v, packed: Packed, scale: float, window: int | None = None,
           cap: float | None = None):
    """Computes the attention of a packed input block by block, with torch's
    scaled_dot_product_attention: q, k, v (S, heads, d) → (S, heads, d). scale, window: as in
    `varlen`. cap: a bound on the scores.
    """
    parts, place = packed.blocks
    done = []
    for queries, keys, prefix in parts:
        mask = None  # the kernel has its own causal mask
        if prefix or cap or (window and window < keys.shape[1]):
            mask = visible(queries.shape[1], prefix, window, q.device)
        attend = partial(capped_attention, cap=cap) if cap else F.scaled_dot_product_attention
        out = attend(gather(q, queries), gather(k, keys), gather(v, keys),  # (n, heads, L, d)
                     attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        done.append(out.transpose(1, 2).flatten(0, 1))  # (n·L, heads, d)
    return torch.cat(done).index_select(0, place)


def gather(x, index):
    """Returns x (S, heads, d) at the token numbers index (n, L), as (n, heads, L, d). It uses
    F.embedding, whose gradient on a CPU, unlike that of x[index], does not depend on the number of
    threads.
    """
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:]).transpose(1, 2)


def visible(length: int, prefix: int, window: int | None, device) -> torch.Tensor:
    """Returns the mask (length, prefix + length) of a segment: True where a query attends to a key.
    window: how many keys a query attends to at most, itself included; None: all keys up to itself.
    """
    mask = torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril(prefix)
    return mask if window is None else mask.triu(prefix - window + 1)


def capped_attention(q, k, v, *, attn_mask, scale: float, cap: float, **options):
    """Computes attention whose scores are cap * tanh(score / cap), for which torch has no kernel. q
    is (n, heads, L, d), and the result has the same shape. k, v: (n, key heads, keys, d).
    attn_mask: (L, keys) bool. https://arxiv.org/abs/2408.00118, section 2
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1).to(v.dtype) @ v


# ---- the batch ----

@dataclass
class Sample:
    """A completion: the T tokens after a prompt, and what a step computes for it.

    The engine makes it and appends tokens, rewards.py sets the text and the reward, and
    `Batch.note_advantages` the advantages.
    """
    prompt: Prompt
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # (T,) int32
    logprobs: np.ndarray = None  # (T,) float32, of the engine; 0 where not sampled. None: all 0
    truncated: bool = False  # it reached --max_tokens and has no end-of-sequence token
    # (T,) bool: False for a token that an environment inserted between turns. None: all True
    sampled: np.ndarray = None
    text: str = ""  # the decoded ids
    reward: float | None = None  # the weighted sum of `rewards`; None: it has no reward
    rewards: dict[str, float | None] = field(default_factory=dict)  # of each --reward; None: none
    error: str | None = None  # why it has no reward
    advantage: float | None = None  # mean over its tokens; None: not in the loss
    advantages: torch.Tensor | None = None  # one for each sampled token
    seed: int = 0  # of the tokens that the engine appends next
    room: int | None = None  # the maximum number of them; None: as many as --max_tokens leaves
    turns: list[dict] = field(default_factory=list)  # []: one assistant message, `text`
    # Arrays that a part adds by name. One of shape (T,) has a number for each token.
    extras: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        if self.logprobs is None:
            self.logprobs = np.zeros(len(self.ids), np.float32)
        if self.sampled is None:
            self.sampled = np.ones(len(self.ids), bool)

    @property
    def tokens(self) -> int:
        """The number of tokens that the policy sampled, at most T."""
        return int(self.sampled.sum())

    def messages(self) -> list[dict]:
        """Returns the completion as chat messages."""
        return self.turns or [{"role": "assistant", "content": self.text}]

    def append(self, ids, logprobs, truncated: bool = False, sampled: bool = True, **extras):
        """Appends tokens: ids (n,) and their log-probs (n,), in nats. sampled: the policy sampled
        them. truncated, extras: of the whole completion, as it is with them.
        """
        self.ids = np.append(self.ids, ids).astype(np.int32)
        self.logprobs = np.append(self.logprobs, logprobs).astype(np.float32)
        self.sampled = np.append(self.sampled, np.full(len(ids), sampled))
        self.truncated = truncated
        self.extras |= extras


class Batch:
    """The N samples of a step in request order, as vectors. It is the same on every rank.

    tokens (N,): the number of sampled tokens of each completion. all_tokens (N,): the same, plus
    tokens that an environment inserted between turns. engine_logprobs (M,): of the sampled tokens,
    in nats, under the engine's sampling distribution. places: N index vectors, which together are
    0, …, M - 1; places[i] has the indices of the sampled tokens of completion i in an (M,) vector.
    truncated, scored (N,) bool. rewards (N,) float64, 0 if unscored. sizes: the Size of each row.
    """

    def __init__(self, samples: list[Sample]):
        self.samples = samples
        self.all_tokens = torch.tensor([len(s.ids) for s in samples]).long()  # (N,)
        self.tokens = torch.tensor([s.tokens for s in samples]).long()  # (N,) sampled ones
        logprobs = [torch.from_numpy(s.logprobs[s.sampled]) for s in samples]
        self.engine_logprobs = torch.cat([torch.empty(0), *logprobs])  # (M,)
        self.places = self.split(torch.arange(int(self.tokens.sum())))  # N parts of 0, …, M - 1
        self.truncated = torch.tensor([s.truncated for s in samples]).bool()  # (N,)
        rewards = [s.reward for s in samples]  # None: not scored
        self.scored = torch.tensor([r is not None for r in rewards]).bool()  # (N,)
        self.rewards = torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64)  # (N,)
        # The first number of a Size says which samples share a prompt. It is only compared, and
        # never used as an index: some of the samples may be left out.
        self.sizes, last = [], None
        for i, sample in enumerate(samples):
            data_row = sample.prompt.row
            if last != data_row:  # adjacent samples with equal data rows share a prompt
                owner, last = i, data_row
            self.sizes.append((owner, len(data_row.prompt_ids), len(sample.ids)))

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Repeats each completion's value for its sampled tokens: (N,) → (M,)."""
        return x.repeat_interleave(self.tokens)

    def sum_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the sampled tokens of each completion: (M,) → (N,) float64."""
        sums = [float(part.sum(dtype=torch.float64)) for part in self.split(x)]
        return torch.tensor(sums, dtype=torch.float64)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits a vector over all sampled tokens (M,) into N views, one per completion."""
        return x.split(self.tokens.tolist())

    def reward_values(self, name: str) -> torch.Tensor:
        """Returns the values of one reward of --reward, without its weight, (N,) float64. NaN means
        that the reward has no value for the completion. name: the reward's name.
        """
        values = [s.rewards[name] for s in self.samples]
        return torch.from_numpy(np.array(values, float))  # numpy makes NaN of None

    def minibatches(self, count: int, epochs: int) -> list[list[int]]:
        """Returns the row numbers of each optimizer step. The batch is split into `count`
        contiguous minibatches, and their list is repeated `epochs` times.
        """
        rows = list(range(len(self.sizes)))
        return [rows[share(len(rows), count, k)] for k in range(count)] * epochs

    def micro_batches(self, world: World, rows: list[int], budget: int,
                      phase: str) -> list["MicroBatch"]:
        """Packs these rows into micro-batches of at most `budget` tokens and returns this rank's.
        Every rank gets the same number of them, at least one. One without rows gives each parameter
        a zero gradient instead of None, as the optimizer requires. phase: a name for error
        messages. All ranks must call it (a collective).
        """
        mine = balance([self.sizes[row] for row in rows], world.size, budget)[world.rank]
        micros = [MicroBatch(self, [rows[i] for i in indices], world.device) for indices in mine]
        world.same_phase(phase, len(micros))
        return micros

    def forward(self, world: World, budget: int, phase: str, compute, among=None) -> torch.Tensor:
        """Computes compute(micro) → (n,) without gradient for all micro-batches, and returns the
        values of all sampled tokens (M,) on every rank.

        among (N,) bool: the rows to compute, by default all; tokens of the others are NaN. budget:
        the maximum number of tokens in a micro-batch. phase: a name for error messages. All ranks
        must call it (a collective).
        """
        among = torch.ones(len(self.samples), dtype=torch.bool) if among is None else among
        micros = self.micro_batches(world, among.nonzero().flatten().tolist(), budget, phase)
        with torch.no_grad():
            found = [compute(micro).cpu() for micro in micros]
        output = found[0].new_zeros(len(self.engine_logprobs))
        for micro, values in zip(micros, found, strict=True):
            output[micro.places] = values
        world.sum(output)  # each row was computed on one rank; the others add zeros
        return torch.where(self.per_token(among), output, math.nan)

    def note_advantages(self, advantages, loss_tokens) -> None:
        """Stores the advantages of its tokens in each sample, and their mean if the completion is
        in the loss. advantages (M,). loss_tokens (N,): the number of tokens of each completion in
        the loss.
        """
        for sample, own, in_loss in zip(self.samples, self.split(advantages), loss_tokens > 0,
                                        strict=True):
            sample.advantages, sample.advantage = own, float(own.mean()) if in_loss else None


# The sample of a micro-batch without rows: its only token was not sampled.
NOTHING = Sample(Prompt(0, Row(0, "", [0], None, {}, "")), np.zeros(1, np.int32),
                 sampled=np.zeros(1, bool))


class MicroBatch:
    """A micro-batch: rows of the batch as one packed input, and their n sampled tokens.

    rows: their numbers in the batch. row_of_token (n,): the index in `rows` of each token's row.
    inputs: the arguments of the model. The output at input token source[i] predicts the id
    targets[i]; only `pack` shifts by one. Without rows, the model computes one dummy token and n is
    0, so the gradient of a sum over the sampled tokens is 0.
    """

    def __init__(self, batch: Batch, rows: list[int], device: torch.device):
        self.batch, self.rows, self.device = batch, rows, device
        self.samples = [batch.samples[row] for row in rows] or [NOTHING]
        prompts = [s.prompt.row.prompt_ids for s in self.samples]
        owners = [batch.sizes[row][0] for row in rows] or [0]
        completion_ids = [torch.from_numpy(s.ids).long() for s in self.samples]
        ids, positions, packed, sources = pack(owners, prompts, completion_ids, device)
        self.size = ids.numel()  # S, the number of input tokens
        self.inputs = {"input_ids": to_device(ids, device), "packed": packed,
                       "position_ids": to_device(positions, device)}
        sampled = torch.cat([torch.from_numpy(s.sampled) for s in self.samples])
        self.source = to_device(torch.cat(sources)[sampled], device)  # (n,)
        self.targets = to_device(torch.cat(completion_ids)[sampled], device)  # (n,)
        counts = torch.tensor([s.tokens for s in self.samples])
        # (n,): the index in `rows` of each token's row. The losses call it `row`.
        self.row_of_token = to_device(
            torch.arange(len(self.samples)).repeat_interleave(counts), device)
        # (n,): the index of each token in an (M,) vector of the batch
        self.places = torch.cat([batch.places[row] for row in rows] or [torch.arange(0)])
        self.engine_logprobs = self.take(batch.engine_logprobs)  # (n,)

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the value of its completion for each of the n tokens: x (N,) of the batch → (n,).
        """
        return to_device(x[self.rows], self.device)[self.row_of_token]

    def draws(self) -> torch.Tensor:
        """Returns a random number in [0, 1) for each token, (n,). It depends only on the completion
        and its prompt's position in the run, not on the order or the micro-batch.
        """
        found = [np.random.default_rng([s.prompt.position, *s.ids]).random(s.tokens)
                 for s in self.samples]
        return to_device(torch.from_numpy(np.concatenate(found)), self.device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the values of the n tokens of this micro-batch: x (M,) of the batch → (n,)."""
        return to_device(x[self.places], self.device)
