"""Attention over SGLang's paged KV cache, a request at a time, in float32."""

import torch


def _attend(query, key_pool, value_pool, slots, mask, scaling, logit_cap):
    """query [tokens, heads, dim]; pools [slot, kv heads, dim]; slots [length]; mask [tokens, length] or None."""
    groups = query.shape[1] // key_pool.shape[1]
    key = key_pool[slots].float().repeat_interleave(groups, 1)
    value = value_pool[slots].float().repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", query.float(), key) * scaling
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[None], float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value)


def _decode(query, key_pool, value_pool, output, key, value, location, req_to_token, requests, lengths, scaling, cap, cross):
    if key is not None and not cross:
        key_pool[location] = key.view(-1, *key_pool.shape[1:]).to(key_pool.dtype)
        value_pool[location] = value.view(-1, *value_pool.shape[1:]).to(value_pool.dtype)
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist())):
        slots = req_to_token[request, :length].long()
        output[row] = _attend(query[row : row + 1], key_pool, value_pool, slots, None, scaling, cap)[0].to(output.dtype)


def _extend(query, output, key_pool, value_pool, req_to_token, requests, lengths, counts, starts, scaling, cap, tree, causal):
    done = 0
    rows = zip(requests.tolist(), lengths.tolist(), counts.tolist(), starts.tolist())
    for request, length, count, start in rows:
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree is not None:  # the new tokens among themselves; all see the prefix
            mask[:, length - count :] = tree[done : done + count * count].view(count, count)
            done += count * count
        elif causal:
            mask = mask.tril(length - count)
        part = slice(start, start + count)
        slots = req_to_token[request, :length].long()
        output[part] = _attend(query[part], key_pool, value_pool, slots, mask, scaling, cap).to(output.dtype)


def decode_attention_cpu(query, key_pool, value_pool, *rest):
    """sgl_kernel.decode_attention_cpu; from 0.5.20 with the two scales of a quantised cache, which must be 1."""
    if not torch.is_tensor(rest[0]):
        rest = rest[2:]
    output, key, value, location, _, req_to_token, requests, lengths, scaling, cap, cross, *_ = rest
    _decode(query, key_pool, value_pool, output, key, value, location, req_to_token, requests, lengths, scaling, cap, cross)


def extend_attention_cpu(query, key, value, output, key_pool, value_pool, *rest):
    """sgl_kernel.extend_attention_cpu; key and value are in the pools already. Scales as above."""
    if not torch.is_tensor(rest[0]):
        rest = rest[2:]
    req_to_token, requests, lengths, counts, starts, _, scaling, cap, _, _, _, _, *last = rest
    tree = last[0].reshape(-1).bool() if last and last[0] is not None else None
    causal = last[1] if len(last) > 1 else True
    _extend(query, output, key_pool, value_pool, req_to_token, requests, lengths, counts, starts, scaling, cap, tree, causal)
