"""packing.py: one input with each prompt once. Its completions attend to it, and to themselves.

    rows, one after another    [p p p a a]  [p p p b b b]  [q c]
    packed                     [p p p q a b b]      a: position 3, b: positions 3 and 4

All prompts come first, then all completions without their last tokens, which predict nothing. A
row's attention is what it was: this changes no log-prob (docs/packing.md).
"""
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

KEYS = 4  # a micro-batch gathers at most so many keys for each token of its budget
EVEN = 0.7  # segments of one block have at least this share of the longest one's length


@dataclass
class Packed:
    """Who attends to whom. A segment is a prompt or a completion of the input, [start, start + n).

    A completion attends to its prompt, [prefix_start, prefix_start + prefix), and to itself.
    """
    device: torch.device
    tokens: int = 0  # S, of all segments
    start: list[int] = field(default_factory=list)  # of each segment
    length: list[int] = field(default_factory=list)  # n
    prefix_start: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)  # tokens; 0 for a prompt

    def append(self, length: int, prefix_start: int = 0, prefix: int = 0) -> int:
        """A new segment at the end of the input → where it starts."""
        start = self.tokens
        if length:  # a completion of one token has no segment: nothing is predicted from it
            self.start.append(start)
            self.length.append(length)
            self.prefix_start.append(prefix_start)
            self.prefix.append(prefix)
        self.tokens += length
        return start

    def similar(self) -> list[list[int]]:
        """Segments in groups of one prefix length and similar lengths, the longest first."""
        groups: list[list[int]] = []
        order = sorted(range(len(self.start)), key=lambda i: (self.prefix[i], -self.length[i]))
        for i in order:
            head = groups[-1][0] if groups else i
            alike = self.prefix[i] == self.prefix[head]
            if groups and alike and self.length[i] >= EVEN * self.length[head]:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    @cached_property
    def blocks(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor, int]], torch.Tensor]:
        """`similar` segments as matrices of token numbers, padded to the right:

        [(queries (n, L), keys (n, prefix + L), prefix)], and (S,): where each token is among all
        queries. The causal mask hides the padding from real queries.
        """
        blocks, place, done = [], torch.empty(self.tokens, dtype=torch.long), 0
        for rows in self.similar():
            start, length = (torch.tensor([values[i] for i in rows]).view(-1, 1)
                             for values in (self.start, self.length))  # (n, 1)
            prefix_start = torch.tensor([self.prefix_start[i] for i in rows]).view(-1, 1)
            prefix, at = self.prefix[rows[0]], torch.arange(int(length.max()))  # (L,)
            queries, real = start + at, at < length  # (n, L)
            place[queries[real]] = done + real.flatten().nonzero().flatten()
            done += queries.numel()
            queries = queries.clamp(max=self.tokens - 1)
            keys = torch.cat([prefix_start + torch.arange(prefix), queries], 1)
            blocks.append((queries.to(self.device), keys.to(self.device), prefix))
        return blocks, place.to(self.device)

    @cached_property
    def varlen(self) -> tuple:
        """varlen_attn's arguments, and the token numbers of all keys, one segment after another."""
        keys = [torch.arange(begin, begin + n) for segment in zip(
            self.prefix_start, self.prefix, self.start, self.length, strict=True)
            for begin, n in (segment[:2], segment[2:])]
        queries = torch.tensor(self.length)
        with_prefix = queries + torch.tensor(self.prefix)
        ends = [F.pad(n.cumsum(0), (1, 0)).int().to(self.device) for n in (queries, with_prefix)]
        return (torch.cat(keys).to(self.device), *ends,
                int(queries.max()), int(with_prefix.max()))


def pack(rows: list[tuple[int, torch.Tensor, torch.Tensor]], device: torch.device):
    """Rows (owner, prompt (p,), completion (c,)) → one input. Rows of one owner share the prompt.

    → ids (1, S), positions (1, S), Packed, and for each row (c,): where in S the token stands that
    predicts each token of the completion. The prompt's last token predicts the first one.
    """
    packed, ids, positions, starts, sources = Packed(device), [], [], {}, []
    for owner, prompt, _ in rows:
        if owner not in starts:
            starts[owner] = packed.append(len(prompt))
            ids.append(prompt)
            positions.append(torch.arange(len(prompt)))
    for owner, prompt, completion in rows:
        p, n = len(prompt), len(completion) - 1
        start = packed.append(n, starts[owner], p)
        ids.append(completion[:-1])
        positions.append(torch.arange(p, p + n))
        sources.append(torch.cat([torch.tensor([starts[owner] + p - 1]),
                                  torch.arange(start, start + n)]))
    return torch.cat(ids).unsqueeze(0), torch.cat(positions).unsqueeze(0), packed, sources


def attention(module, query, key, value, attention_mask, scaling=None, packed=None,
              sliding_window=None, softcap=None, **options):
    """The models' attention: (1, heads, S, d) → (1, S, heads, d). transformers calls it.

    sliding_window: keys that a query sees, itself included (Mistral, Gemma 3). softcap: a bound on
    the scores (Gemma 2). None: none.
    """
    packed = packed or module.packed  # StableLM's layers drop the argument: see model.build
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, heads, d)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        out = varlen(q, k, v, packed, scaling, sliding_window)
    else:
        out = blocks(q, k, v, packed, scaling, sliding_window, softcap)
    return out.unsqueeze(0), None


def varlen(q, k, v, packed: Packed, scale: float, window: int | None = None):
    """torch's kernel for bfloat16 on a GPU, (S, heads, d) → the same. It aligns the ends of queries
    and keys: a completion's keys are its prompt and itself."""
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
        inputs = gather(q, queries), gather(k, keys), gather(v, keys)  # (n, heads, L, d)
        if cap:
            out = capped_attention(*inputs, mask, scale, cap)
        else:
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None,
                                                 scale=scale, enable_gqa=True)
        done.append(out.transpose(1, 2).flatten(0, 1))  # (n·L, heads, d)
    return torch.cat(done).index_select(0, place)


def gather(x, index):
    """(S, heads, d) at index (n, L) → (n, heads, L, d). On a CPU the gradient of x[index] depends
    on the threads; that of F.embedding does not."""
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:]).transpose(1, 2)


def visible(length: int, prefix: int, window: int | None, device) -> torch.Tensor:
    """(length, prefix + length) bool: which keys each query of a segment sees."""
    mask = torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril(prefix)
    return mask if window is None else mask.triu(prefix - window + 1)


def capped_attention(q, k, v, mask, scale: float, cap: float):
    """Attention whose scores are cap * tanh(score / cap): no kernel of torch has it.

    (n, heads, L, d) → the same. https://arxiv.org/abs/2408.00118, section 2
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
