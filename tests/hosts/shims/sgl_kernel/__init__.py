"""A stand-in for the CPU build of sgl-kernel, which PyPI does not have.

The operations that SGLang calls for a small Llama and EAGLE-3 on the CPU, in plain PyTorch (`ops`,
`attention`). Every other name can be imported and raises when it is called.
"""

import importlib.machinery
import sys
import types

import torch

from . import attention
from .ops import *  # noqa: F403

__version__ = "0.0.0+cpu"

SUBMODULES = (
    "allreduce", "elementwise", "flash_attn", "flash_mla", "gemm", "kvcacheio", "mamba", "memory", "moe",
    "quantization", "sampling", "scalar_type", "sparse_flash_attn", "speculative", "top_k", "utils",
)  # fmt: skip


class Absent:
    """Something of sgl-kernel that this stand-in lacks: SGLang may import it, but not call it."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.name}.{attribute}")

    def __call__(self, *arguments, **named):
        raise NotImplementedError(f"sgl_kernel.{self.name} does not exist in the CPU stand-in")


def _absent_in(module):
    def attribute(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}" if module else name)

    return attribute


__getattr__ = _absent_in("")
for _name in SUBMODULES:
    _module = types.ModuleType(f"{__name__}.{_name}")
    _module.__path__ = []
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    _module.__getattr__ = _absent_in(_name)
    sys.modules[_module.__name__] = globals()[_name] = _module

torch.ops.sgl_kernel.decode_attention_cpu = attention.decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = attention.extend_attention_cpu

if not torch.cuda.is_available():  # SGLang calls these without asking (models/llama.py, up to 0.5.15)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *arguments, **named: None
