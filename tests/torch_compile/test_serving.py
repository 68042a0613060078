"""The serving path inside torch.compile: attention left eager, the pieces between compiled once for all sizes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from torch import nn

from partita.policies import AroundOperators
from partita.torch_compile import backend, plans
from partita.treatments import LeaveEager, Lower

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.models

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


#: Which pieces are compiled, in order: the first one, those between two calls of attention, and the last one. The
#: second layer of a Mixtral gets sizes that the first one has computed, and so do the later ones.
_LLAMA = ("llama", (True, True, False, True))
_MIXTRAL = ("mixtral", (True, True, True, False, True))


def _model(name: str) -> nn.Module:
    if name == "mixtral":
        config = transformers.MixtralConfig(**_SMALL, num_hidden_layers=4, num_local_experts=4)
        return transformers.MixtralForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, num_hidden_layers=3)).eval()


def _served(model: nn.Module) -> Any:
    torch.compiler.reset()
    gc.collect()  # The functions of another test, which has the same first piece, are gone.
    piece = Lower("aot_eager", strict=True)
    return torch.compile(
        model,
        backend=backend,
        dynamic=True,
        options={
            "policy": AroundOperators(nn.functional.scaled_dot_product_attention),
            "treatment": lambda region: LeaveEager() if region.label == "chosen" else piece,
        },
    )


@pytest.mark.parametrize(("name", "new"), slow_but([_LLAMA, _MIXTRAL], _LLAMA))
@torch.no_grad()
def test_pieces_are_compiled_once_for_all_sizes(name: str, new: tuple[bool, ...]) -> None:
    model = _model(name)
    served = _served(model)
    for shape in ((2, 8), (3, 5), (4, 9)):
        ids = torch.randint(96, shape)
        torch.testing.assert_close(served(input_ids=ids).logits, model(input_ids=ids).logits)
    (frame,) = plans(model)
    labels = [region.label for region in frame.plan.partition]
    assert labels == ["between", "chosen"] * (len(new) - 1) + ["between"]
    assert tuple(one.is_new for one in frame.plan.compilations) == new
    assert not frame.plan.failures
