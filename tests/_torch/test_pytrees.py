"""Leaves of nested containers, those that torch knows and those that were registered with it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.return_types import max as max_of
from torch.utils import _pytree as pytree

from partita._torch.pytrees import flatten, leaves_of, tensors_in

ONE, OTHER = torch.ones(1), torch.nn.Parameter(torch.ones(2))
Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        None,
        (),
        {"b": [ONE, None, 3], "a": (True, 2.5, "text", OTHER)},
        Pair(ONE, [Pair(1, OTHER)]),
        OrderedDict(second=ONE, first={"x": immutable_list([OTHER, immutable_dict(y=ONE)])}),
        [max_of((ONE, OTHER)), torch.Size([1, 2]), slice(0, 3), torch.float32, object],
    ],
)
def test_leaves_are_those_that_torch_finds(value: Any) -> None:
    found = leaves_of(value)
    assert list(map(id, found)) == list(map(id, pytree.tree_leaves(value))) == list(map(id, flatten(value).leaves))
    assert list(map(id, tensors_in(value))) == [id(leaf) for leaf in found if isinstance(leaf, torch.Tensor)]


def test_what_recorders_see_for_each_operator_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytree, "tree_flatten", None)
    assert len(leaves_of(((ONE, OTHER, [1, 2]), {"dtype": torch.float32, "device": ONE.device}))) == 6
