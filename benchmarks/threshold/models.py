"""Configuration-only models for timing: a Llama-8B-shaped target and its one-layer EAGLE3 draft.

SGLang fills them with `--load-format dummy`. Their logits are near flat, so they serve timing and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}

# 32000 is what the published EAGLE3 draft of Llama-3.1-8B uses (a reduced vocabulary).
DRAFT_VOCAB = 32000


def write(folder: Path, draft_vocab: int = DRAFT_VOCAB) -> tuple[Path, Path]:
    """Write both `config.json` files below `folder` and return the target's and the draft's folder.

    `draft_vocab` is the number of rows of the draft's output layer.
    """
    draft = LLAMA_8B | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
    }
    folders = []
    for name, config in (("target-8b", LLAMA_8B), (f"draft-8b-{draft_vocab}", draft)):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        folders.append(path)
    return folders[0], folders[1]
