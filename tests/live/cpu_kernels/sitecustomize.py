"""Lets the EAGLE worker of SGLang 0.5.8 to 0.5.13 run on a CPU: with this folder on PYTHONPATH, plain PyTorch stands
in for its attention and its few CUDA and Triton kernels. Scheduler, workers and models stay SGLang's own.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

STAND_INS = {}


def after(name):
    """Call the decorated function with the module of this name when it was imported."""

    def register(function):
        STAND_INS[name] = function
        return function

    return register


class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        STAND_INS[module.__name__](module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in STAND_INS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())


class Kernel:
    """A function called as a Triton kernel is, with a grid."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


@after("torch")
def no_streams(torch):
    torch.Tensor.record_stream = lambda tensor, stream: None


@after("sglang.srt.mem_cache.memory_pool")
def no_warm_up(module):
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None


@after("sglang.srt.constrained.xgrammar_backend")
def grammar(module):
    from xgrammar import apply_token_bitmask_inplace

    def apply(_, logits, vocab_mask):
        apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")

    module.XGrammarGrammar.apply_vocab_mask = apply


@after("sglang.srt.speculative.spec_utils")
def write_slots(module):
    def assign(requests, table, start, end, slots, *_):
        at = 0
        for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
            table[row, first:last] = slots[at : at + last - first].to(table.dtype)
            at += last - first

    module.assign_req_to_token_pool_func = assign


@after("sglang.srt.speculative.eagle_info_v2")
def read_slots(module):
    import torch

    def extend(req_pool_indices, req_to_token, start_offset, end_offset, **_):
        bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
        return torch.cat([req_to_token[row, first:last] for row, first, last in bounds]).to(torch.int64)

    def draft(requests, table, lengths, slots, _, topk, steps):
        for i, (row, first) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
            slots[i * topk * steps : (i + 1) * topk * steps] = table[row, first : first + topk * steps]

    def last_accepted(accepted, counts, last, width):
        for i, count in enumerate(counts.tolist()):
            last[i] = accepted.reshape(-1)[width * i + count - 1]

    module.assign_extend_cache_locs_func = extend
    for name in ("assign_draft_cache_locs_page_size_1", "assign_draft_cache_locs_contiguous"):
        setattr(module, name, Kernel(draft))
    for name in ("fill_new_verified_id", "fill_bonus_tokens"):
        setattr(module, name, Kernel(last_accepted))


@after("sglang.srt.speculative.triton_ops.gather_spec_extras")
def gather(module):
    module.gather_spec_extras = lambda rows, *buffers: tuple(
        None if buffer is None else buffer[rows] for buffer in buffers
    )


@after("sglang.srt.speculative.eagle_utils")
def chains(module):
    """A tree with one branch is a chain: token j stands j places after the root, and j + 1 follows it."""

    def build(_, __, lengths, ___, positions, index, next_token, *____):
        requests, width = index.shape
        for i in range(requests):
            for j in range(width):
                index[i, j] = i * width + j
                positions[i * width + j] = lengths[i] + j
                next_token[i, j] = j + 1 if j + 1 < width else -1

    def verify(predicts, accept_index, accept_token_num, candidates, target_predict, **_):
        requests, width = candidates.shape
        for i in range(requests):
            accepted = 0
            accept_index[i, 0] = i * width
            while accepted + 1 < width and candidates[i, accepted + 1] == target_predict[i, accepted]:
                predicts[i * width + accepted] = target_predict[i, accepted]
                accepted += 1
                accept_index[i, accepted] = i * width + accepted
            predicts[i * width + accepted] = target_predict[i, accepted]
            accept_token_num[i] = accepted
        return predicts, accept_index, accept_token_num

    module.sgl_build_tree_kernel_efficient = build
    module.verify_tree_greedy_func = verify


def attention():
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Attention(AttentionBackend):
        """Causal attention of each request to its own slots, whatever the forward mode."""

        def __init__(self, runner, step=None):
            self.step = step  # of a draft that decodes several tokens
            self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool

        def init_forward_metadata(self, forward_batch):
            pass

        def spans(self, batch):
            """Return for each request how many tokens ask, and how many they see."""
            mode, lengths = batch.forward_mode, batch.seq_lens.tolist()
            if mode.is_decode():
                more = 0 if self.step is None else self.step + 1
                return [(1, length + more) for length in lengths]
            if mode.is_target_verify():
                width = batch.spec_info.draft_token_num
                return [(width, length + width) for length in lengths]
            return list(zip(batch.extend_seq_lens.tolist(), lengths, strict=True))

        def forward(self, q, k, v, layer, batch, save_kv_cache=True, **_):
            if batch.forward_mode.is_idle():
                return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
            pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
            if save_kv_cache:
                pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
            keys, values = pool.get_kv_buffer(layer.layer_id)
            heads = layer.tp_q_head_num // layer.tp_k_head_num
            q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            made, at = [], 0
            for row, (width, length) in zip(batch.req_pool_indices.tolist(), self.spans(batch), strict=True):
                slots = table[row, :length].long()
                seen_keys, seen_values = (part[slots].repeat_interleave(heads, 1) for part in (keys, values))
                scores = torch.einsum("qhd,khd->hqk", q[at : at + width], seen_keys) * layer.scaling
                future = torch.arange(length) > torch.arange(length - width, length)[:, None]
                weights = scores.masked_fill(future, float("-inf")).softmax(-1)
                made.append(torch.einsum("hqk,khd->qhd", weights, seen_values).reshape(width, -1))
                at += width
            return torch.cat(made)

    return Attention


@after("sglang.srt.layers.attention.attention_registry")
def target_attention(module):
    for name in ("torch_native", "intel_amx"):
        module.ATTENTION_BACKENDS[name] = lambda runner: attention()(runner)


@after("sglang.srt.speculative.draft_utils")
def draft_attention(module):
    class Steps:
        needs_cpu_seq_lens = True

        def __init__(self, factory):
            count = factory.speculative_num_steps
            self.attn_backends = [attention()(factory.draft_model_runner, step) for step in range(count)]

        def init_forward_metadata(self, forward_batch):
            pass

    module.DraftBackendFactory.create_decode_backend = lambda factory: Steps(factory)
    module.DraftBackendFactory.create_draft_extend_backend = lambda factory: attention()(
        factory.draft_model_runner
    )
