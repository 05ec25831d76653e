"""packing.py: one input with each prompt once. Its completions attend to it, and to themselves.

    rows, one after another    [p p p a a]  [p p p b b b]  [q c]
    packed                     [p p p q a b b]      a: position 3, b: positions 3 and 4

All prompts come first, then all completions without their last tokens, which predict nothing. A
row's attention is what it was: this changes no log-prob (bench/packing.py).
"""
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

EVEN = 0.7  # segments of one block have at least this share of the longest one's length


class Segment(NamedTuple):
    """A prompt, or a completion without its last token: `length` tokens of the input from `start`.

    It attends to its prefix, which is its prompt, and to itself. A prompt has no prefix.
    """
    start: int
    length: int
    prefix_start: int
    prefix: int  # tokens


@dataclass
class Packed:
    """Who attends to whom in an input of S tokens."""
    segments: list[Segment]
    tokens: int  # S
    device: torch.device

    @cached_property
    def blocks(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor, int]], torch.Tensor]:
        """Segments of one prefix length and similar lengths as matrices of token numbers:

        [(queries (n, L), keys (n, prefix + L), prefix)], and (S,): where each token is among all
        queries. Padding is to the right, so the causal mask hides it.
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
            place[queries[real]] = done + real.flatten().nonzero().flatten()
            done += queries.numel()
            queries = queries.clamp(max=self.tokens - 1)
            keys = torch.cat([prefix_start + torch.arange(prefix), queries], 1)
            blocks.append((to_device(queries, self.device), to_device(keys, self.device), prefix))
        return blocks, to_device(place, self.device)

    @cached_property
    def varlen(self) -> tuple:
        """varlen_attn's arguments, and the token numbers of all keys, one segment after another."""
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
    """A copy there."""
    if device.type == "cuda":  # pinned: the host does not wait for the GPU
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def pack(owners: list[int], prompts: list[list[int]], completions: list[torch.Tensor],
         device: torch.device):
    """Rows → one input. Rows of one owner share their prompt.

    → ids (1, S), positions (1, S), Packed, and for each row (c,): where in S the token stands that
    predicts each token of the completion. The prompt's last token predicts the first one.
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
    """The models' attention: (1, heads, S, d) → (1, S, heads, d). transformers calls it.

    sliding_window: keys that a query sees, itself included (Mistral, Gemma 3). softcap: a bound on
    the scores (Gemma 2). None: none.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, heads, d)
    half = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
    if query.is_cuda and half and softcap is None:  # the kernel has no larger heads
        return varlen(q, k, v, packed, scaling, sliding_window).unsqueeze(0), None
    return blocks(q, k, v, packed, scaling, sliding_window, softcap).unsqueeze(0), None


def varlen(q, k, v, packed: Packed, scale: float, window: int | None = None):
    """torch's kernel for bfloat16 on a GPU, (S, heads, d) → the same. It aligns the ends of queries
    and keys: a completion's keys are its prompt and itself."""
    from torch.nn.attention.varlen import varlen_attn  # slow to import
    keys, *sizes = packed.varlen
    left = -1 if window is None else window - 1
    return varlen_attn(q, k.index_select(0, keys), v.index_select(0, keys), *sizes,
                       window_size=(left, 0), scale=scale, enable_gqa=True)


def blocks(q, k, v, packed: Packed, scale: float, window: int | None = None,
           cap: float | None = None):
    """The same with plain attention over rows of gathered keys."""
    parts, place = packed.blocks
    done = []
    for queries, keys, prefix in parts:
        mask = None  # causal: what the kernel has of its own
        if prefix or cap or (window and window < keys.shape[1]):
            mask = visible(queries.shape[1], prefix, window, q.device)
        attend = partial(capped_attention, cap=cap) if cap else F.scaled_dot_product_attention
        out = attend(gather(q, queries), gather(k, keys), gather(v, keys),  # (n, heads, L, d)
                     attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        done.append(out.transpose(1, 2).flatten(0, 1))  # (n·L, heads, d)
    return torch.cat(done).index_select(0, place)


def put_in_rows(lm):
    """In the place of the layers of a Qwen3.5 that have a state, layers that compute a packed input
    row by row. All names stay."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    class Rows(Qwen3_5GatedDeltaNet):
        def forward(self, hidden_states, packed: Packed | None = None, **inputs):
            """(1, S, H) → the same. Each completion goes through it behind a copy of its prompt, so
            nothing of a row reaches another."""
            if packed is None:  # transformers' own
                return super().forward(hidden_states, **inputs)
            parts, place = packed.blocks
            done = []
            for _, row, prefix in parts:
                out = super().forward(F.embedding(row, hidden_states[0]), **inputs)
                done.append(out[:, prefix:].flatten(0, 1))
            return torch.cat(done).index_select(0, place).unsqueeze(0)

    for name, layer in [*lm.named_modules()]:
        if isinstance(layer, Qwen3_5GatedDeltaNet):
            with torch.device("meta"):
                lm.set_submodule(name, Rows(lm.config, layer.layer_idx).to(lm.dtype))


def gather(x, index):
    """(S, heads, d) at index (n, L) → (n, heads, L, d). On a CPU the gradient of x[index] depends
    on the threads; that of F.embedding does not."""
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:]).transpose(1, 2)


def visible(length: int, prefix: int, window: int | None, device) -> torch.Tensor:
    """(length, prefix + length) bool: which keys each query of a segment sees."""
    mask = torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril(prefix)
    return mask if window is None else mask.triu(prefix - window + 1)


def capped_attention(q, k, v, *, attn_mask, scale: float, cap: float, **options):
    """Attention whose scores are cap * tanh(score / cap): no kernel of torch has it.

    (n, heads, L, d) → the same. https://arxiv.org/abs/2408.00118, section 2
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1).to(v.dtype) @ v
