"""Models of the transformers library: what is predicted to be held, layer by layer, is what is held, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.plans.helpers import (
    Checkpoint,
    backward_flops,
    bytes_alive,
    bytes_really_held,
    predicted_when_recomputed,
    training_flops,
)
from torch import Tensor, nn

import partita
from partita.plans.memory import saved_memory
from partita.policies import ByModule
from partita.program.saved_tensors import saved_tensors_of
from partita.recompute.keep import Keep
from partita.treatments import KeepEverything, KeepNothing, KeepOperators, Recompute

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **_WORDS)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, **_SMALL))


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **_WORDS, **_SMALL)
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL))


_IDS = {"input_ids": torch.arange(16).reshape(2, 8)}

#: How to make each model, what it is called with, and where its layers are.
_MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "GPT-2": (_gpt2, _IDS, "transformer.h.?"),
    "BERT": (_bert, _IDS, "bert.encoder.layer.?"),
    "Llama": (_llama, _IDS, "model.layers.?"),
    "T5": (_t5, {**_IDS, "decoder_input_ids": torch.arange(16).reshape(2, 8)}, "*coder.block.?"),
    "ViT": (_vit, {"pixel_values": torch.ones(2, 3, 32, 32)}, "*.layers.?"),
}


@cache
def _captured(name: str) -> tuple[partita.Program, dict[str, Tensor], ByModule]:
    build, inputs, layers = _MODELS[name]
    torch.manual_seed(0)
    # With dropout, where the model has any.
    return partita.capture(build().train(), (), inputs), inputs, ByModule(layers)


@pytest.mark.parametrize("name", slow_but(_MODELS, "GPT-2", "Llama"))
def test_a_model_holds_and_computes_again_what_was_predicted(name: str) -> None:
    program, inputs, layers = _captured(name)
    plan = partita.plan(program, layers, Checkpoint())
    found = saved_memory(plan.partition, plan.treatments)
    assert len(plan.partition) == (4 if name == "T5" else 2)
    assert found.total is not None
    plain, treated = program.module(), plan.apply().module()
    assert found.total.plain_bytes == bytes_really_held(plain, lambda: plain(**inputs)) == bytes_alive(plain, inputs)
    assert found.total.treated_bytes == bytes_really_held(treated, lambda: treated(**inputs))
    more = backward_flops(lambda: treated(**inputs)) - backward_flops(lambda: plain(**inputs))
    assert found.total.extra_flops == more
    assert all(holding is not None and holding.extra_flops > 0 for holding in found.regions)


_KEEPS = (
    KeepNothing(),
    KeepOperators(nn.functional.linear, torch.addmm),
    KeepOperators(nn.functional.scaled_dot_product_attention, nn.functional.dropout),
    KeepEverything(),
)


@pytest.mark.parametrize("name", slow_but(_MODELS, "GPT-2"))
def test_with_something_kept_memory_and_flops_are_what_was_predicted(name: str) -> None:
    program, inputs, layers = _captured(name)
    saved, plain = saved_tensors_of(program), program.module()
    plain_flops = training_flops(lambda: plain(**inputs))
    seen = []
    for keep in _KEEPS:
        plan = partita.plan(program, layers, Recompute(keep))
        treated = plan.apply().module()
        memory, flops = predicted_when_recomputed(plan, saved)
        assert memory == bytes_alive(treated, inputs), keep
        assert flops == training_flops(lambda: treated(**inputs)) - plain_flops, keep  # noqa: B023
        seen.append((memory, flops))
    assert seen[0][0] < min(memory for memory, _ in seen[2:])
    assert seen[-1][1] == 0 < seen[0][1]


class _UnderAutocast(nn.Module):
    """Calls a module as a training loop does that has autocast around the call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(**inputs)


#: The norm before the head has bfloat16 inputs and float32 weights. Its mean and deviation of 16 rows are float32 on
#: the CPU, but bfloat16 by torch's fake kernel (2.13).
_TOO_LITTLE = {"BERT": 2 * 16 * 2}


@pytest.mark.parametrize("keep", _KEEPS, ids=str)
@pytest.mark.parametrize("name", slow_but(_MODELS, "GPT-2"))
def test_under_the_autocast_of_the_caller_a_model_saves_what_was_predicted_for_it(name: str, keep: Keep) -> None:
    program, inputs, layers = _captured(name)
    plan = partita.plan(program, layers, Recompute(keep))
    found = plan.saved_memory(under=torch.autocast("cpu", torch.bfloat16)).total
    assert found is not None
    plain, treated = _UnderAutocast(program.module()), _UnderAutocast(plan.apply().module())
    less = _TOO_LITTLE.get(name, 0)
    held = bytes_really_held(plain, lambda: plain(**inputs))
    assert (found.plain_bytes or 0) + less == held == bytes_alive(plain, inputs)
    assert (found.treated_bytes or 0) + less == bytes_alive(treated, inputs)
    without = plan.saved_memory().total
    assert without is not None
    assert without.plain_bytes != found.plain_bytes
