"""Tiny models for servers on the CPU: `llama` (8 layers, with a tokenizer) and `llama-eagle3`, an EAGLE-3 draft for it.

Random weights: the text is nonsense, but greedy and repeatable. Files are written by hand, not by `save_pretrained`,
so that every version of transformers reads them. Runs inside an SGLang environment, which has PyTorch:
`python models.py FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specgate" / "models"
HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 512, 4, 2, 64
# EAGLE-3 listens at layers 2, n/2 and n-3, which must be three different ones
LAYERS = 8


def build(environment: Path) -> Path:
    """Return the folder that holds the models, written with ``environment``'s PyTorch when it is not there yet."""
    folder = CACHE / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    if not folder.exists():
        new = folder.with_suffix(f".{os.getpid()}")
        subprocess.run([environment / "bin/python", __file__, str(new)], check=True, stdin=subprocess.DEVNULL)
        try:
            new.rename(folder)
        except OSError:  # someone else was faster
            subprocess.run(["rm", "-r", str(new)], check=True)
    return folder


def _config(**other: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **other,
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["A canary goes first; the others follow when it sings. " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _save(
    folder: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]], extra: dict[str, object]
) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {}
    for name, shape in shapes.items():
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.05
        weights[name] = tensor.to(torch.bfloat16)
    file = folder / "model.safetensors"
    save_file({**weights, **extra}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the server runs as a user of its own


def _mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _attention(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }


def write(folder: Path) -> None:
    """Write both models below ``folder``."""
    import torch

    torch.manual_seed(0)
    target = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        target |= _attention(f"model.layers.{layer}", HIDDEN) | _mlp(f"model.layers.{layer}")
    _save(folder / "llama", _config(), target, {})
    _write_tokenizer(folder / "llama")
    # the draft's layer reads the token's embedding beside the target's hidden state
    draft = _attention("midlayer", 2 * HIDDEN) | _mlp("midlayer")
    draft |= {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    draft |= {"lm_head.weight": (VOCABULARY, HIDDEN)}
    same_vocabulary = {
        "d2t": torch.zeros(VOCABULARY, dtype=torch.int64),
        "t2d": torch.ones(VOCABULARY, dtype=torch.bool),
    }
    config = _config(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=VOCABULARY
    )
    _save(folder / "llama-eagle3", config, draft, same_vocabulary)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
