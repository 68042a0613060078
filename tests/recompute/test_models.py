"""Models of the transformers library, each layer recomputed, trained for three steps: bit for bit as captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.plans.helpers import bytes_alive
from tests.recompute.operators.helpers import Counted, assert_bitwise
from torch import Tensor, nn

import partita
from partita import Plan, Program
from partita.policies import ByModule
from partita.treatments import Keep, KeepNothing, KeepOperators, Recompute

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.models

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, **_SMALL))


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, use_cache=False, **_SMALL)
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=96,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.1, **_SMALL)
    return transformers.ViTForImageClassification(config)


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(seed))


def _ids(seed: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(seed), "labels": _tokens(seed + 50)}


def _pixels(seed: int) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


#: How to make a model, what it is given, the path of its layers, and how many of them there are.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], tuple[str, ...], int]] = {
    "gpt2": (_gpt2, _ids, ("transformer.h.*",), 2),
    "bert": (_bert, _ids, ("bert.encoder.layer.*",), 2),
    "llama": (_llama, _ids, ("model.layers.*",), 2),
    "t5": (_t5, _ids, ("encoder.block.*", "decoder.block.*"), 4),
    "vit": (_vit, _pixels, ("vit.encoder.layer.*", "vit.layers.*"), 2),
}
every_model = pytest.mark.parametrize("name", slow_but(MODELS, "gpt2", "vit"))
PRODUCTS = KeepOperators("aten.linear", "aten.addmm", "aten.scaled_dot_product_attention")


def _program(name: str) -> Program:
    build, inputs, *_ = MODELS[name]
    torch.manual_seed(0)
    return partita.capture(build().train(), (), inputs(0))


def _plan(name: str, keep: Keep) -> Plan:
    *_, paths, count = MODELS[name]
    plan = partita.plan(_program(name), ByModule(paths), Recompute(keep))
    assert len(plan.partition) == count
    return plan


def _trained(name: str, module: nn.Module) -> list[Tensor]:
    """The losses of three steps, then the state."""
    inputs = MODELS[name][1]
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.05), []
    for step in range(3):
        optimizer.zero_grad()
        loss = module(**inputs(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.detach() for _, value in sorted(module.state_dict().items()))]


@cache
def _expected(name: str) -> list[Tensor]:
    return _trained(name, _program(name).module())


@every_model
@pytest.mark.parametrize(
    "keep", [pytest.param(KeepNothing(), id="nothing", marks=pytest.mark.slow), pytest.param(PRODUCTS, id="products")]
)
def test_training_is_that_of_the_captured_model_bit_for_bit(name: str, keep: Any) -> None:
    found = _trained(name, _plan(name, keep).apply(state_names="original").module())
    assert_bitwise(found, _expected(name))
    assert found[0] != found[1]


@every_model
def test_less_is_held_and_kept_products_do_not_run_again(name: str) -> None:
    inputs = MODELS[name][1](0)
    plain, nothing, products = (
        _program(name).module(),
        *(_plan(name, keep).apply().module() for keep in (KeepNothing(), PRODUCTS)),
    )
    held = [bytes_alive(module, inputs) for module in (plain, nothing, products)]
    # Attention with dropout keeps its mask as well, so that what is kept may be more than the plain program saves.
    assert held[1] < min(held[0], held[2])
    calls = []
    for module in (plain, nothing, products):
        torch.manual_seed(0)
        loss = module(**inputs)["loss"]
        with Counted() as counted:
            loss.backward()
        calls.append(counted.calls)
    for operator in ("addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu", "bmm"):
        assert calls[2][operator] <= calls[1][operator]
    assert calls[2]["addmm"] + calls[2]["mm"] < calls[1]["addmm"] + calls[1]["mm"]
