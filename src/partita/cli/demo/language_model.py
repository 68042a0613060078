"""The model of the chapter on lowering, and a chip that supports only a part of it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn
from torch.fx import Node

from partita.backends import Inductor
from partita.cli.demo.model import WORDS, Decoder

#: Operators without a kernel on the chip.
_MISSING = {"scaled_dot_product_attention": "no kernel for attention", "rsqrt": "no table of roots"}
_COMPILER = Inductor()


def seeded() -> tuple[str, nn.Module, tuple[torch.Tensor, ...]]:
    """A description, the model and its arguments, the same in every process."""
    torch.manual_seed(0)
    name, model = ("Llama, from a configuration", _llama()) if find_spec("transformers") else ("decoder", Decoder())
    return f"a small {name}", model.eval(), (torch.randint(WORDS, (2, 16)),)


def small_chip(node: Node) -> str | None:
    """Why the chip does not support a node; None if it does. Inductor plays its compiler."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return _MISSING.get(name) or _COMPILER.refusal(node)


def _llama() -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    llama: nn.Module = transformers.LlamaForCausalLM(config)
    return llama
