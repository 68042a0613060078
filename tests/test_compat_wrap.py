"""`compat.wrap`: torch's operators under torch's names, the same result, and the mode restored where torch leaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import wrap as theirs

from partita import hops
from partita.compat import wrap as ours

CALLS = {
    "wrap": (),
    "wrap_with_set_grad_enabled": (False,),
    "wrap_with_autocast": ("cpu", torch.bfloat16, True, None),
}


@pytest.fixture
def _grad_mode_kept() -> Iterator[None]:
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_torch(name: str) -> None:
    body, x = nn.Linear(2, 2), torch.randn(1, 2)
    found, expected = (getattr(module, name)(*CALLS[name], body, input=x) for module in (ours, theirs))
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)


CHECKPOINTS = ("wrap_activation_checkpoint", "tag_activation_checkpoint")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_give_the_result_and_the_gradients_of_torch(name: str) -> None:
    body, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), torch.randn(1, 2)
    found, expected = (getattr(module, name)(body, x) for module in (ours, theirs))
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(result.sum(), list(body.parameters())) for result in (found, expected))
    assert all(map(torch.equal, *gradients))


def test_keywords_of_checkpoints_are_divided_as_torch_does() -> None:
    given = {"x": 1, "use_reentrant": False, "preserve_rng_state": True, "context_fn": None, "debug": False}
    for module in (ours, theirs):
        own, rest = module.tag_activation_checkpoint.divide_kwargs(dict(given))
        assert (set(own), rest) == (set(given) - {"x"}, {"x": 1})


@pytest.mark.parametrize("name", [*CALLS, *CHECKPOINTS])
def test_names_are_those_of_torch_and_objects_those_of_partita(name: str) -> None:
    assert getattr(ours, name) is getattr(hops, name)
    assert getattr(ours, name) is not getattr(theirs, name)
    assert isinstance(getattr(ours, name), torch._ops.HigherOrderOperator)
    assert getattr(torch.ops.higher_order, name) is getattr(theirs, name)


@pytest.mark.usefixtures("_grad_mode_kept")
def test_the_grad_mode_that_torch_leaks_is_restored() -> None:
    def body() -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        ours.wrap_with_set_grad_enabled(False, body)
    assert torch.is_grad_enabled()
    with pytest.raises(KeyError):
        theirs.wrap_with_set_grad_enabled(False, body)
    assert not torch.is_grad_enabled()
