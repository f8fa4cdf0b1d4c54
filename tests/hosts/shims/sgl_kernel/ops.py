"""sgl-kernel's small CPU operations for the KV cache and for EAGLE trees. Each writes into its arguments."""

import ctypes

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu", "assign_extend_cache_locs_cpu", "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu", "build_tree_kernel_efficient_cpu", "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu", "fill_bonus_tokens_cpu", "verify_tree_greedy_cpu",
]  # fmt: skip


def _spans(requests, starts, ends):
    """Yield (request, start, end, offset of its first element in the flat list of all spans)."""
    offset = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield request, start, end, offset
        offset += end - start


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, slots, _pool_len):
    for request, start, end, offset in _spans(requests, starts, ends):
        req_to_token[request, start:end] = slots[offset : offset + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, slots, *_):
    for request, start, end, offset in _spans(requests, starts, ends):
        slots[offset : offset + end - start] = req_to_token[request, start:end].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, lengths, slots, _pool_len, topk, steps):
    width, flat = topk * steps, slots.view(-1)
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        flat[row * width : (row + 1) * width] = req_to_token[request, length : length + width].to(flat.dtype)


def fill_bonus_tokens_cpu(accepted, accept_lens, bonus, stride):
    rows = accept_lens.numel()
    last = torch.arange(rows) * stride + accept_lens.long() - 1
    bonus[:rows] = accepted.reshape(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, slots, target):
    kept = accept_index[accept_index > -1]
    target[: kept.numel()] = slots[kept.long()]


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def build_draft_decode_metadata_cpu(req_to_token, requests, lengths, topk, steps, pool_len):
    table = torch.zeros(lengths.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            own = length + branch * steps
            table[row * topk + branch, :length] = req_to_token[request, :length]
            table[row * topk + branch, length : length + steps] = req_to_token[request, own : own + steps]
    return table


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each request's tree while a child holds the target's token; its next one is the bonus. Called by keyword."""
    predicted, target = predicts.view(-1), target_predict.reshape(-1)
    for row in range(candidates.shape[0]):
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        accepted = node = 0
        while accepted + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[row, node])
            while node != -1 and int(candidates[row, node]) != int(target[last]):
                node = int(retrive_next_sibling[row, node])
            if node == -1:
                break
            predicted[last] = target[last].to(predicted.dtype)
            accepted += 1
            last = int(retrive_index[row, node])
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicted[last] = target[last].to(predicted.dtype)


def build_tree_kernel_efficient_cpu(
    parents,
    selected,
    lengths,
    tree_mask,
    positions,
    index,
    next_token,
    next_sibling,
    topk,
    _depth,
    width,
    mode=0,
):
    """Lay out each request's draft tree: mask, positions, and for each node its first child and next sibling.

    ``mode`` 0 writes a mask over the whole context, any other over the draft tokens alone.
    """
    mask, place, offset = tree_mask.view(-1), positions.view(-1), 0
    for row, length in enumerate(lengths.tolist()):
        parent = _parents(selected[row].tolist(), parents[row].tolist(), topk, width)
        seen = torch.zeros(width, width, dtype=torch.bool)
        seen[:, 0] = True
        for node in range(width):
            depth, ancestor = 0, node
            while ancestor > 0:
                seen[node, ancestor] = True
                ancestor, depth = parent[ancestor], depth + 1
            place[row * width + node] = length + depth
        child, sibling = [-1] * width, [-1] * width
        for node in range(width - 1, 0, -1):
            child[parent[node]], sibling[node] = node, child[parent[node]]
        index[row] = torch.arange(row * width, (row + 1) * width, dtype=index.dtype)
        next_token[row] = torch.tensor(child, dtype=next_token.dtype)
        next_sibling[row] = torch.tensor(sibling, dtype=next_sibling.dtype)
        if mode == 0:
            seen = torch.cat([torch.ones(width, length, dtype=torch.bool), seen], 1)
        mask[offset : offset + seen.numel()] = seen.reshape(-1).to(mask.dtype)
        offset += seen.numel()


def _parents(selected, parents, topk, width):
    """Return the parent node of every node; node 0 is the root."""
    parent = [-1] * width
    for node in range(1, width):
        group = selected[node - 1] // topk
        parent[node] = 0 if group == 0 else selected.index(parents[group]) + 1
    return parent
