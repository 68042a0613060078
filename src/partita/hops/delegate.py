"""`partita::delegate`, the operator that runs a stored function of a backend.

It is defined when Partita is imported, so that torch.export.load knows it; what it does is imported at its first call.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from partita._torch.operator_schemas import TEXT_CHECKS


def _implementation() -> Any:
    # Backends know operators, so that this one cannot import them from above.
    return import_module("partita.backends.delegates")


def _run(*arguments: Any) -> Any:
    return _implementation().run(*arguments)


def _fake(*arguments: Any) -> Any:
    return _implementation().run_fake(*arguments)


def _keep_spec(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.spec = inputs[1]


def _backward(ctx: Any, *gradients: Any) -> Any:
    _implementation().refuse_gradients(ctx.spec)


_LIBRARY = torch.library.Library("partita", "DEF")
_LIBRARY.define("delegate(Tensor blob, str spec, Tensor[] tensors, SymInt[] numbers) -> Tensor[]")
_LIBRARY.impl("delegate", _run, "CompositeExplicitAutograd")
torch.library.register_fake("partita::delegate", _fake, lib=_LIBRARY)
torch.library.register_autograd("partita::delegate", _backward, setup_context=_keep_spec, lib=_LIBRARY)

TEXT_CHECKS["partita::delegate", "spec"] = lambda text: _implementation().refusal_of_spec(text)
#: `delegate(blob, spec, tensors, numbers)` calls the function that is stored in `blob`, and that `spec` describes.
DELEGATE = torch.ops.partita.delegate.default
