"""Names are looked up among what is imported, and the lookup runs no code: they may come from a file."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from partita.analysis import imported_names
from partita.analysis.imported_names import imported, imported_class


class _Lazy(ModuleType):
    """A module that loads on attribute access, as those of large packages do."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was accessed")


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was accessed")


class _Holder(metaclass=_Meta):
    @property
    def computed(self) -> Any:
        raise AssertionError("a property was read")

    @staticmethod
    def called(x: int) -> int:
        return x


_INSTANCE = _Holder()


def test_functions_classes_and_methods_are_found() -> None:
    assert imported("torch.relu") is torch.relu
    assert imported("torch.nn.functional.relu") is torch.nn.functional.relu
    assert imported("torch.nn.ReLU") is imported_class("torch.nn.ReLU") is torch.nn.ReLU
    assert imported("torch.Tensor.add") is torch.Tensor.add  # of a base class
    assert imported("torch.nn.Linear.in_features.x") is None
    assert imported("torch.pi") is None
    assert imported_class("torch.relu") is None
    assert imported("nowhere.at.all") is None


@pytest.mark.parametrize("name", ["lazy.submodule", "lazy.submodule.function", "lazy.Holder.missing"])
def test_no_attribute_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = _Lazy("lazy")
    lazy.__dict__["Holder"] = _Holder
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert imported(name) is None
    assert imported_class(name) is None


def test_nothing_is_read_from_instances() -> None:
    assert imported(f"{__name__}._INSTANCE.computed") is None


def test_static_methods_are_found_as_they_are_called() -> None:
    assert imported(f"{__name__}._Holder.called") is _Holder.called


def test_names_that_nothing_has_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_names, "_module_and_names", None)
    assert imported("torch." * 200 + "relu") is None
    assert imported_class("a." * 50_000 + "b") is None
