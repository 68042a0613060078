"""What tests of the torch.compile backend share: an inner backend that remembers, and training beside eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from partita.torch_compile import backend


@dataclass
class Recorder:
    """An inner backend that remembers what it was given and leaves the work to another one."""

    name: str = "aot_eager"

    def __post_init__(self) -> None:
        self.parts: list[GraphModule] = []
        self.inputs: list[list[Any]] = []
        self.wants_gradients: list[list[bool]] = []

    def __call__(self, part: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.parts.append(part)
        self.inputs.append(list(example_inputs))
        self.wants_gradients.append([getattr(value, "requires_grad", False) for value in example_inputs])
        return lookup_backend(self.name)(part, list(example_inputs))


def compiled(model: Any, **options: Any) -> Any:
    dynamic = options.pop("dynamic", False)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic, options=options)


def train(call: Callable[..., Any], model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a few steps, then the gradients and the whole state at the end."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if list(model.parameters()) else None
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        outputs = call(batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seen += [output.detach().clone() for output in outputs]
        if optimizer is not None:
            optimizer.zero_grad()
            sum(output.float().square().mean() for output in outputs).backward()
            optimizer.step()
    seen += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*seen, *model.parameters(), *model.buffers()]


def assert_trains_like_eager(
    model: nn.Module, *, sizes: Sequence[int] = (4, 4, 4), exact: bool = True, **options: Any
) -> None:
    twin = copy.deepcopy(model)
    batches = [torch.randn(size, 6) for size in sizes]
    found = train(compiled(model, **options), model, batches)
    expected = train(twin, twin, batches)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}))
