"""Joint graphs of models of the transformers library, dropout on: the bits of eager, and layers that can be found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.program.joint_helpers import assert_same_step, check_joint, eager_step, joint_step
from torch import Tensor, nn

import partita
from partita.policies import ByModule
from partita.treatments import Call

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.models]

IDS = torch.arange(14).reshape(2, 7)
LABELLED: dict[str, Any] = {"input_ids": IDS, "labels": IDS, "use_cache": False}


class Results(nn.Module):
    """A model of the library that gives a list of tensors."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        result = self.model(*args, **kwargs)
        return [result[name] for name in self.names]


def _case(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    """A small model that trains, its arguments, and a pattern for its layers."""
    import transformers as library

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 32}
    if name == "gpt2":
        config = library.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=32, n_positions=16)
        return Results(library.GPT2LMHeadModel(config), "loss", "logits"), (), LABELLED, "model.transformer.h.?"
    if name == "llama":
        config = library.LlamaConfig(**sizes, num_key_value_heads=2)
        return Results(library.LlamaForCausalLM(config), "loss", "logits"), (), LABELLED, "model.model.layers.?"
    if name == "bert":
        model = library.BertModel(library.BertConfig(**sizes))
        results = Results(model, "last_hidden_state", "pooler_output")
        return results, (), {"input_ids": IDS}, "model.encoder.layer.?"
    if name == "t5":
        config = library.T5Config(num_layers=2, d_model=32, num_heads=2, d_kv=16, d_ff=64, decoder_start_token_id=0)
        model = library.T5ForConditionalGeneration(config)
        return Results(model, "loss", "logits"), (), LABELLED, "model.*coder.block.?"
    model = library.ViTModel(library.ViTConfig(**sizes, image_size=32, patch_size=8))
    return Results(model, "last_hidden_state"), (torch.randn(2, 3, 32, 32),), {}, "*.layers.?"


@pytest.mark.parametrize("name", slow_but(["gpt2", "bert", "llama", "t5", "vit"], "gpt2"))
def test_models_have_joint_graphs_that_compute_what_eager_computes(name: str) -> None:
    model, args, kwargs, layers = _case(name)
    model.train()
    program = check_joint(model, args, kwargs)
    joint = program.joint
    assert joint is not None
    assert joint.saved_bytes
    plan = partita.plan(program, ByModule(layers), Call())
    assert len(plan.partition) == (4 if name == "t5" else 2)
    assert {node for region in plan.partition for node in region.nodes} <= set(joint.forward)
    assert_same_step(joint_step(plan.apply(), model, args, kwargs, seed=5), eager_step(model, args, kwargs, seed=5))
