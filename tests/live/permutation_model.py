"""A tiny target model and an EAGLE3 draft whose guesses are really accepted, for tests without downloads.

The target follows a permutation: after token t comes ``first[t]``, or ``second[t]`` when its attention over
all that came before tips the scales. So its greedy tokens depend on the keys and values in its cache.

The draft guesses ``first[first[t]]`` and is right for its first token most of the time. It also looks at its
own KV cache: attending evenly to all positions, it checks that each of them was written, and guesses a token
that never comes when a tenth or more are empty. So holes in its KV cache show in the accept length.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 512, 256, 8, 4, 2, 64
MLP = 256
WORDS = 240  # dimensions that hold the token; MARK is the same for all tokens, ALARM is empty in all of them
MARK, ALARM = 240, 241
MARK_SIZE, ALARM_SIZE = 8.0, 10.0
NEVER = VOCABULARY - 1  # the token that the draft guesses when its cache has holes


def write_models(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """Write both models below ``folder``, with ``first.json``; return the target's and the draft's folder."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int, size: float) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * size / shape[-1] ** 0.5

    words = torch.randn(VOCABULARY, HIDDEN, generator=random)
    words[:, WORDS:] = 0
    words[:, MARK] = MARK_SIZE
    # NEVER follows nothing but itself
    first, second = (
        torch.cat([torch.randperm(NEVER, generator=random), torch.tensor([NEVER])]) for _ in range(2)
    )
    letters = words.clone()
    letters[:, WORDS:] = 0

    head = torch.zeros(VOCABULARY, HIDDEN)
    head[first] += letters
    head[second] += 0.88 * letters
    head[NEVER] = 0
    target = {
        "model.embed_tokens.weight": words,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        target |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": noise(HEADS * HEAD, HIDDEN, size=1.5),
            f"{name}.self_attn.k_proj.weight": noise(KV_HEADS * HEAD, HIDDEN, size=1.5),
            f"{name}.self_attn.v_proj.weight": noise(KV_HEADS * HEAD, HIDDEN, size=1.0),
            f"{name}.self_attn.o_proj.weight": noise(HIDDEN, HEADS * HEAD, size=0.35),
            f"{name}.mlp.gate_proj.weight": noise(MLP, HIDDEN, size=1.0),
            f"{name}.mlp.up_proj.weight": noise(MLP, HIDDEN, size=1.0),
            f"{name}.mlp.down_proj.weight": noise(HIDDEN, MLP, size=0.05),
        }

    # the token's hidden states pass through, and its mark raises the alarm ...
    fc = torch.zeros(HIDDEN, 3 * HIDDEN)
    fc[:WORDS, :WORDS] = torch.eye(WORDS)
    fc[ALARM, MARK] = ALARM_SIZE / MARK_SIZE
    # ... which the marks in the cache, averaged over all positions, put off again
    marks_seen = MARK_SIZE / ((WORDS + MARK_SIZE**2) / HIDDEN) ** 0.5
    value = torch.zeros(KV_HEADS * HEAD, 2 * HIDDEN)
    value[0, MARK] = 1.0
    output = torch.zeros(HIDDEN, HEADS * HEAD)
    output[ALARM, 0] = -ALARM_SIZE / marks_seen
    guess = torch.zeros(VOCABULARY, HIDDEN)
    guess[first[first]] += letters
    guess[NEVER] = 0
    guess[NEVER, ALARM] = float(WORDS)
    draft = {
        "fc.weight": fc,
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": torch.zeros(HEADS * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": torch.zeros(KV_HEADS * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.mlp.gate_proj.weight": torch.zeros(MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, MLP),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": guess,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    of_draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
    }
    models = {"target": (target, config), "draft": (draft, config | of_draft)}
    for name, (weights, settings) in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        contiguous = {key: weight.to(dtype).contiguous() for key, weight in weights.items()}
        save_file(contiguous, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(settings, indent=1))
    (folder / "first.json").write_text(json.dumps(first.tolist()))
    return folder / "target", folder / "draft"


if __name__ == "__main__":
    import sys

    print(*write_models(Path(sys.argv[1]), dtype=getattr(torch, sys.argv[2])))
