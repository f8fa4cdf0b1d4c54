"""Attention over SGLang's paged KV cache, a request at a time, in float32."""

import torch


def _attend(query, pools, slots, mask, scaling, logit_cap):
    """query [tokens, heads, dim]; pools [slot, heads, dim]; slots [length]; mask [tokens, length]."""
    groups = query.shape[1] // pools[0].shape[1]
    key, value = (pool[slots.long()].float().repeat_interleave(groups, 1) for pool in pools)
    scores = torch.einsum("thd,shd->hts", query.float(), key) * scaling
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[None], float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value).to(query.dtype)


def _without_scales(arguments):
    """From 0.5.20 SGLang passes the two scales of a quantised cache, which are 1 here."""
    return arguments if torch.is_tensor(arguments[0]) else arguments[2:]


def decode_attention_cpu(query, key_pool, value_pool, *rest):
    """One new token a request: put its key and value into the pools, attend to all of its tokens."""
    output, key, value, location, _, table, requests, lengths, scaling, cap, cross, *_ = _without_scales(rest)
    pools = key_pool, value_pool
    if key is not None and not cross:
        for pool, new in zip(pools, (key, value), strict=True):
            pool[location] = new.view(-1, *pool.shape[1:]).to(pool.dtype)
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        one = slice(row, row + 1)
        output[one] = _attend(query[one], pools, table[request, :length], None, scaling, cap)


def extend_attention_cpu(query, _key, _value, output, key_pool, value_pool, *rest):
    """Several new tokens a request; their keys and values are in the pools already."""
    table, requests, lengths, counts, starts, _, scaling, cap, _, _, _, _, *last = _without_scales(rest)
    tree = last[0].reshape(-1).bool() if last and last[0] is not None else None
    causal = last[1] if len(last) > 1 else True
    done = 0
    each = zip(requests.tolist(), lengths.tolist(), counts.tolist(), starts.tolist(), strict=True)
    for request, length, count, start in each:
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree is not None:  # the new tokens among themselves; all see the prefix
            mask[:, length - count :] = tree[done : done + count * count].view(count, count)
            done += count * count
        elif causal:
            mask = mask.tril(length - count)
        part = slice(start, start + count)
        output[part] = _attend(
            query[part], (key_pool, value_pool), table[request, :length], mask, scaling, cap
        )
