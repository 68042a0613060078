"""Modules in a lowered region that are changed after it was compiled: the next call is as if nothing were compiled."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from tests.lowering.helpers import Counting, lowered, plan_of, region_of
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from partita.treatments import Lower


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.LeakyReLU(0.5), nn.Dropout(0.0))


def slope(model: nn.Sequential) -> None:
    model[1].negative_slope = 100.0


def probability(model: nn.Sequential) -> None:
    model[2].p = 1.0


def bias(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.full((4,), 10.0))


def kind(model: nn.Sequential) -> None:
    model[1].__class__ = nn.Tanh


def parametrization(model: nn.Sequential) -> None:
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())


def own_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda x: x * 0


def writes(model: nn.Sequential) -> None:
    model[1].inplace = True


def hook(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, result: result * 0)


@pytest.mark.parametrize("change", [slope, probability, bias, writes, kind, parametrization, own_forward, hook])
def test_a_change_shows_in_the_next_call(change: Callable[[nn.Sequential], None]) -> None:
    model = block()
    module = lowered(model, Lower(Counting()))
    x = torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(module(x), model(x))
    change(model)
    for _ in range(2):
        assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("name", ["tanh", "identity"])
def test_a_submodule_in_the_place_of_another_with_as_many_tensors_is_called(name: str) -> None:
    module = lowered(block(), Lower(Counting()))
    body = region_of(module).body
    x = torch.randn(3, 4)
    module(x)
    body._modules["1"] = {"tanh": nn.Tanh(), "identity": nn.LeakyReLU(1.0)}[name]
    assert torch.equal(module(x), body(x)[0])


def test_a_setting_that_is_put_back_is_not_compiled_for_again() -> None:
    backend, model = Counting(), block()
    module = lowered(model, Lower(backend))
    x = torch.randn(3, 4)
    for negative_slope in (0.5, 0.25, 0.5, 0.25):
        model[1].negative_slope = negative_slope
        assert torch.equal(module(x), model(x))
    assert len(backend.made) == 2


def test_a_setting_that_changes_in_every_call_runs_eagerly_in_the_end() -> None:
    backend, model = Counting(), block()
    decided = plan_of(model, Lower(backend, max_variants=1))
    module = decided.apply().module()
    for number in range(8):
        model[1].negative_slope = 0.1 * number
        x = torch.randn(3, 4)
        assert torch.equal(module(x), model(x))
    assert len(backend.made) == 4
    assert "settings of modules" in decided.failures[0].reason


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_that_is_set_to_write_its_input_writes_it(backend: str) -> None:
    model = nn.Sequential(nn.LeakyReLU(0.5))
    module = lowered(model, Lower(backend))
    module(torch.randn(3))
    model[0].inplace = True
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    for _ in range(2):
        x = leaf * 1
        result = module(x)
        assert torch.equal(x, torch.tensor([-0.5, 2.0]))
        assert result.data_ptr() == x.data_ptr()
        assert torch.equal(*torch.autograd.grad(x.sum(), leaf), torch.tensor([0.5, 1.0]))


def test_a_hook_is_run_where_an_equal_body_was_compiled_before() -> None:
    backend, x = Counting(), torch.randn(3, 4)
    lowered(block(), Lower(backend))(x)
    model = block()
    module = lowered(model, Lower(backend))
    model[0].register_forward_hook(lambda module, args, result: result * 0)
    assert torch.equal(module(x), torch.zeros(3, 4))


def test_a_region_is_compiled_when_the_hook_is_gone() -> None:
    backend, model, x = Counting(), block(), torch.randn(3, 4)
    decided = plan_of(model, Lower(backend))
    module = decided.apply().module()
    handle = model[0].register_forward_hook(lambda module, args, result: result * 0)
    module(x)
    assert not backend.made
    assert decided.failures[0].reason == "a Linear in it runs hooks, which a trace would lose"
    handle.remove()
    assert torch.equal(module(x), model(x))
    assert len(backend.made) == 1


def test_a_hook_of_all_modules_is_run() -> None:
    backend, model, x, called = Counting(), block(), torch.randn(3, 4), list[str]()
    module = lowered(model, Lower(backend))
    module(x)
    handle = register_module_forward_hook(lambda module, args, result: called.append(type(module).__name__))
    try:
        module(x)
    finally:
        handle.remove()
    assert {"Linear", "LeakyReLU", "Dropout"} <= set(called)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_copy_and_a_pickle_know_what_their_modules_are_set_to(backend: str) -> None:
    model, x = block(), torch.randn(3, 4)
    module = lowered(model, Lower(backend))
    with torch.no_grad():
        module(x)
        model[1].negative_slope = 100.0
        expected = model(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module):
            torch.testing.assert_close(other(x), expected)


def test_a_setting_in_a_list_that_is_changed_in_place_shows() -> None:
    class Padding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widths = [1, 1]

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x, self.widths)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return True

    model = nn.Sequential(Padding())
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    module: Any = Lower(Counting()).treat(traced)
    assert module(torch.ones(3)).shape == (5,)
    model[0].widths[1] = 4
    assert module(torch.ones(3)).shape == (8,)


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_that_equal_bodies_share_keep_no_weights_of_a_model_that_is_gone(backend: str) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).relu()

    first, second = Encoder(), Encoder()
    modules = [lowered(first, Lower(backend)), lowered(second, Lower(backend))]
    for module in modules:
        module(torch.randn(2, 3, 8))
    assert region_of(modules[0])._variants is region_of(modules[1])._variants
    weight = ref(first.layer.linear1.weight)
    del first, modules[0], module
    gc.collect()
    assert weight() is None
