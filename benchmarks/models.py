"""A real model to cut: Llama with tiny widths, exported, so that every node carries metadata."""

from __future__ import annotations

from functools import cache

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

__all__ = ["exported_large_llama", "exported_llama", "flat_inputs", "functional", "has_targets"]


@cache
def exported_llama(layers: int) -> ExportedProgram:
    """A Llama with random weights; exported without gradients, since `split_module_simple` takes no attributes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        return torch.export.export(model, (_tokens(),), strict=False)


def exported_large_llama(layers: int) -> ExportedProgram:
    """A Llama with the widths of Llama-3-70B, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(config).eval(), torch.zeros(1, 512, dtype=torch.long)
    with torch.no_grad():
        return torch.export.export(model, (tokens,), strict=False)


def functional(program: ExportedProgram) -> GraphModule:
    """The exported graph itself, whose inputs are the parameters, the buffers and the tokens."""
    module = program.graph_module
    assert isinstance(module, GraphModule)
    return module


def flat_inputs(program: ExportedProgram) -> tuple[torch.Tensor, ...]:
    """What the exported graph itself is called with."""
    state = {**program.state_dict, **program.constants}
    names = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    held = [state[names[node.name]] for node in program.graph.nodes if node.name in names]
    return (*held, _tokens())


def has_targets(layers: int) -> bool:
    """Whether a model is large enough for the targets, which are about 32 layers."""
    return layers >= 32


def _tokens() -> torch.Tensor:
    return torch.arange(8).reshape(1, 8)
