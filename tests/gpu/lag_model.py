"""Write a small Llama and an EAGLE3 draft whose acceptance depends on the draft's KV cache having no holes.

The target's next token is a fixed permutation of the last one, disturbed by its (random) layers as much as `noise`
says. The draft finds the next token in one of two ways, depending on the token: by looking up, through attention,
what stood `LAG` tokens before (so an entry that was not written, or written wrongly, makes it fail `LAG` steps later),
or by reading the target's hidden state (so one that was not handed over makes it fail at once; later tokens of a draft
then are misses, which exercises rejection).

Run with the interpreter that has torch and safetensors: `python lag_model.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 512
HIDDEN = 512
LAG = 64
HEAD = 128  # of the draft; its 8 heads do not fill HIDDEN, they exceed it
HEADS = 8
LAYERS = 8
CLEAN, NOISY = 0.02, 0.06


def successors() -> list[int]:
    """The permutation as a list, one cycle over the whole vocabulary; the same on every machine."""
    order = [(index * 203 + 77) % VOCABULARY for index in range(VOCABULARY)]
    following = [0] * VOCABULARY
    for index, token in enumerate(order):
        following[token] = order[(index + 1) % VOCABULARY]
    return following


def orbit(start: int, length: int) -> list[int]:
    """`length` tokens as the clean target would write them, beginning with `start`."""
    following = successors()
    tokens = [start]
    while len(tokens) < length:
        tokens.append(following[tokens[-1]])
    return tokens


def write(folder: Path) -> None:
    """Write `clean`, `noisy` (targets) and `draft` below `folder`."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(20)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * std

    def orthogonal() -> torch.Tensor:
        return torch.linalg.qr(normal(HIDDEN, HIDDEN))[0]

    def save(name: str, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        shared = {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (path / "config.json").write_text(json.dumps(shared | config, indent=1) + "\n")
        kept = {key: value.to(torch.bfloat16).contiguous() for key, value in tensors.items()}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})

    following = torch.tensor(successors())
    before = torch.empty_like(following)
    before[following] = torch.arange(VOCABULARY)

    def back(steps: int) -> torch.Tensor:
        tokens = torch.arange(VOCABULARY)
        for _ in range(steps):
            tokens = before[tokens]
        return tokens

    embedding = orthogonal()
    ones = torch.ones(HIDDEN)
    layers: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        layers[name + "self_attn.q_proj.weight"] = normal(512, HIDDEN, std=0.1)
        layers[name + "self_attn.k_proj.weight"] = normal(256, HIDDEN, std=0.1)
        layers[name + "self_attn.v_proj.weight"] = normal(256, HIDDEN, std=0.05)
        layers[name + "self_attn.o_proj.weight"] = normal(HIDDEN, 512, std=0.05)
        layers[name + "mlp.gate_proj.weight"] = normal(1024, HIDDEN, std=0.05)
        layers[name + "mlp.up_proj.weight"] = normal(1024, HIDDEN, std=0.05)
        layers[name + "mlp.down_proj.weight"] = normal(HIDDEN, 1024, std=0.03)
        layers[name + "input_layernorm.weight"] = ones
        layers[name + "post_attention_layernorm.weight"] = ones
    target = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1024,
        "rope_theta": 10000.0,
    }
    for name, noise in (("clean", CLEAN), ("noisy", NOISY)):
        tensors = {
            key: value * noise if key.endswith(("o_proj.weight", "down_proj.weight")) else value
            for key, value in layers.items()
        }
        tensors["model.embed_tokens.weight"] = embedding
        tensors["lm_head.weight"] = embedding[before]
        tensors["model.norm.weight"] = ones
        save(name, target, tensors)

    # Draft. A position holds the token after it; a query asks for the position whose token stood LAG (first half of
    # the heads) or LAG + 1 tokens before (second half, subtracted: it cancels what the step before left behind).
    turned = orthogonal()
    slow = torch.cat([torch.arange(HEAD // 4, HEAD // 2), torch.arange(3 * HEAD // 4, HEAD)])
    query, key = torch.zeros(HEADS * HEAD, 2 * HIDDEN), torch.zeros(HEADS * HEAD, 2 * HIDDEN)
    value = torch.zeros(HEADS * HEAD, 2 * HIDDEN)
    output = torch.zeros(HIDDEN, HEADS * HEAD)
    unit = HIDDEN**-0.5  # the norm before the projections scales an embedding to length sqrt(HIDDEN)
    for head in range(HEADS):
        code = normal(len(slow), HIDDEN, std=17.0 * len(slow) ** -0.5)
        steps = LAG if head < HEADS // 2 else LAG + 1
        rows = (
            head * HEAD + slow
        )  # only the slowly rotating dimensions: the match must not depend on the distance
        key[rows, :HIDDEN] = code * unit
        query[rows, :HIDDEN] = code @ embedding[back(steps)].T @ embedding * unit
        part = head % (HEADS // 2)
        columns = slice(part * HEAD, (part + 1) * HEAD)
        value[head * HEAD : (head + 1) * HEAD, columns] = torch.eye(HEAD) * unit
        sign = 2.0 if head < HEADS // 2 else -2.0
        output[columns, head * HEAD : (head + 1) * HEAD] = sign * torch.eye(HEAD)
    by_hidden = torch.arange(VOCABULARY) % 3 == 0
    head_rows = torch.where(by_hidden[:, None], embedding[back(2)] @ turned.T, embedding[back(LAG + 1)])
    fc = torch.zeros(HIDDEN, 3 * HIDDEN)
    fc[:, :HIDDEN] = turned
    save(
        "draft",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD,
            "intermediate_size": 512,
            "draft_vocab_size": VOCABULARY,
            "rope_theta": 1e8,
        },
        {
            "fc.weight": fc,
            "midlayer.self_attn.q_proj.weight": query,
            "midlayer.self_attn.k_proj.weight": key,
            "midlayer.self_attn.v_proj.weight": value,
            "midlayer.self_attn.o_proj.weight": output,
            "midlayer.mlp.gate_proj.weight": torch.zeros(512, HIDDEN),
            "midlayer.mlp.up_proj.weight": torch.zeros(512, HIDDEN),
            "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 512),
            "midlayer.input_layernorm.weight": ones,
            "midlayer.hidden_norm.weight": ones,
            "midlayer.post_attention_layernorm.weight": ones,
            "norm.weight": ones,
            "lm_head.weight": head_rows,
        },
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
