"""packing.py: one input with each prompt once. Its completions attend to it, and to themselves.

    rows, padded       [p p p a a .]     packed       p p p q a b b      a: positions 3 …
                       [p p p b b b]                                     b: positions 3 …
                       [q c . . . .]

All prompts come first, then all completions without their last tokens, which predict nothing. A
row's attention is what it was: this changes no log-prob (docs/packing.md).
"""
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

KEYS = 4  # a micro-batch gathers at most so many keys for each token of its budget,
EVEN = 0.7  # and pads queries to a length of which each completion has at least this share


@dataclass
class Packed:
    """Who attends to whom. A segment is a prompt or a completion; all are (segments,)."""
    start: torch.Tensor  # its first token
    length: torch.Tensor
    prefix_start: torch.Tensor  # its prompt's first token
    prefix: torch.Tensor  # its prompt's tokens; 0 for a prompt
    device: torch.device

    @cached_property
    def blocks(self) -> tuple[list, torch.Tensor]:
        """Segments of one prefix length and similar lengths as matrices of token numbers:

        [(queries (n, L), keys (n, prefix + L), mask (L, prefix + L) or None)], and where each token
        is among all queries. Padding is to the right, so the causal mask hides it.
        """
        size, length, prefixes = (
            int(self.length.sum()), self.length.tolist(), self.prefix.tolist())
        members: list[list[int]] = []
        for i in sorted(range(len(length)), key=lambda i: (prefixes[i], -length[i])):
            head = members[-1][0] if members else i  # the longest
            if members and prefixes[i] == prefixes[head] and length[i] >= EVEN * length[head]:
                members[-1].append(i)
            else:
                members.append([i])
        made, place, done = [], torch.empty(size, dtype=torch.long), 0
        for rows in members:
            prefix, longest = prefixes[rows[0]], length[rows[0]]
            at = torch.arange(longest)
            queries = self.start[rows].view(-1, 1) + at  # (n, L)
            real = at < self.length[rows].view(-1, 1)
            place[queries[real]] = done + real.flatten().nonzero().flatten()
            done += queries.numel()
            queries = queries.clamp(max=size - 1)
            keys = self.prefix_start[rows].view(-1, 1) + torch.arange(prefix)  # (n, prefix)
            mask = torch.ones(longest, prefix + longest, dtype=torch.bool).tril(prefix)
            made.append((queries.to(self.device), torch.cat([keys, queries], 1).to(self.device),
                         mask.to(self.device) if prefix else None))
        return made, place.to(self.device)

    @cached_property
    def varlen(self) -> tuple:
        """varlen_attn's arguments, and the token numbers of all keys, one segment after another."""
        keys = torch.cat([
            torch.cat([torch.arange(p, p + n), torch.arange(s, s + m)]) for s, m, p, n in zip(
                *(x.tolist() for x in (self.start, self.length, self.prefix_start, self.prefix)),
                strict=True)])
        ends = [F.pad(x.cumsum(0), (1, 0)).int().to(self.device)
                for x in (self.length, self.length + self.prefix)]
        longest = [int(self.length.max()), int((self.length + self.prefix).max())]
        return keys.to(self.device), *ends, *longest


def pack(owners: list[int], rows: list, device: torch.device):
    """Rows → ids (1, S), positions (1, S), Packed, and (b,) each: where in S a row's prompt has its
    last token, and where its completion starts.

    rows: (prompt, completion) each; those of one owner share the prompt.
    """
    prompts = {owner: prompt for owner, (prompt, _) in zip(owners, rows, strict=True)}
    parts = [*prompts.values(), *(c[:-1] for _, c in rows)]
    length = torch.tensor([len(part) for part in parts])
    start, none = length.cumsum(0) - length, torch.zeros(len(prompts), dtype=torch.long)
    place = {owner: i for i, owner in enumerate(prompts)}
    of = torch.tensor([place[owner] for owner in owners])  # each row's prompt
    prefix_start, prefix = torch.cat([none, start[of]]), torch.cat([none, length[of]])
    positions = torch.cat([torch.arange(n, n + m) for n, m in zip(
        prefix.tolist(), length.tolist(), strict=True)])
    some = length > 0  # a completion of one token has none here
    packed = Packed(start[some], length[some], prefix_start[some], prefix[some], device)
    return (torch.cat(parts).unsqueeze(0), positions.unsqueeze(0), packed,
            start[of] + length[of] - 1, start[len(prompts):])


def attention(module, query, key, value, attention_mask, scaling=None, packed=None, **options):
    """The models' attention: (1, heads, S, d) → (1, S, heads, d). Without `packed`, plain rows."""
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, heads, d)
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return (varlen if flash else blocks)(q, k, v, packed, scaling).unsqueeze(0), None


def varlen(q, k, v, packed: Packed, scale: float):
    """torch's kernel for bfloat16 on a GPU, (S, heads, d) → the same. It aligns the ends of queries
    and keys: a completion's keys are its prompt and itself."""
    keys, *sizes = packed.varlen
    return varlen_attn(q, k.index_select(0, keys), v.index_select(0, keys), *sizes,
                       window_size=(-1, 0), scale=scale, enable_gqa=True)


def blocks(q, k, v, packed: Packed, scale: float):
    """The same with plain attention over rows of gathered keys."""
    rows = lambda x, index: F.embedding(  # unlike x[index], its gradient is deterministic
        index, x.flatten(1)).unflatten(-1, x.shape[1:]).transpose(1, 2)  # (n, heads, L, d)
    made, place = packed.blocks
    done = [F.scaled_dot_product_attention(
        rows(q, queries), rows(k, keys), rows(v, keys), attn_mask=mask, is_causal=mask is None,
        scale=scale, enable_gqa=True).transpose(1, 2).flatten(0, 1)  # (n·L, heads, d)
        for queries, keys, mask in made]
    return torch.cat(done).index_select(0, place)
