"""Metadata: what nodes carry besides their call, as tracers leave it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from partita._torch.ambient import read_ambient, restore_autocast
from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE

__all__ = ["annotate"]

_EXITS: Mapping[object, Callable[[Any], object]] = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}


def annotate(graph_module: GraphModule, style: str, placed: Sequence[object]) -> bool:
    """Gives every node the metadata that `style` names; False where the values of this program cannot be faked."""
    if style == "none":
        return True
    for place, node in enumerate(graph_module.graph.nodes):
        node.meta["custom"] = {"place": place, "inner": {"tags": [node.op]}}
        node.meta["stack_trace"] = f'  File "model.py", line {place + 1}, in forward\n'
    return style == "custom" or _propagate(graph_module, style, placed)


def _propagate(graph_module: GraphModule, style: str, placed: Sequence[object]) -> bool:
    nodes: list[Node] = list(graph_module.graph.nodes)
    if any(str(node.target).startswith("**") for node in nodes if node.op == "placeholder"):
        return False
    if any(node.target == "*args" for node in nodes if node.op == "placeholder"):
        *placed, rest = placed
        placed = [*placed, *tuple(cast(Iterable[object], rest))]
    done = _run_fake(graph_module, placed)
    for node in nodes:
        value = node.meta.pop("val", None)
        if not done or value is None:
            continue
        for key in ("val", "example_value") if style == "both" else (style,):
            node.meta[key] = value
    return done


def _run_fake(graph_module: GraphModule, placed: Sequence[object]) -> bool:
    found = read_ambient()
    with torch.enable_grad():
        try:
            _FakeRun(graph_module).propagate(*placed)
        # Reading a number out of a fake tensor is refused, each kind of number with an error of its own.
        except Exception:
            return False
        finally:
            restore_autocast(found)
    return True


class _FakeRun(FakeTensorProp):
    """Runs a graph on fake tensors; where that fails, it leaves the modes that the graph has entered."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self._open: dict[Node, Callable[[], object]] = {}
        self._fake_mode: Any = None

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().placeholder(target, args, kwargs)
        if self._fake_mode is None:
            self._fake_mode = cast(Any, value).fake_mode
        # Tensors that were passed inside a container arrive here as they are, and a real one would be written.
        is_real = isinstance(value, Tensor) and not hasattr(value, "fake_mode")
        return self._fake_mode.from_tensor(value) if is_real else value

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._fake_mode.from_tensor(value) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module.get_submodule(target)
        state = [*module.named_parameters(), *module.named_buffers()]
        fake_state = {name: self._fake_mode.from_tensor(tensor) for name, tensor in state}
        return functional_call(module, fake_state, args, kwargs)

    def run_node(self, node: Node) -> Any:
        if node.target is ENTER_INFERENCE and not node.users:
            return None  # The block ends when its handle is dropped: at once, but an interpreter keeps it.
        try:
            result = super().run_node(node)
        except Exception:
            # An inference block restores the dispatch state it found, so it must be left before the fake mode is.
            for leave in reversed(self._open.values()):
                leave()
            raise
        if node.target in _EXITS:
            self._open[node] = partial(_EXITS[node.target], result)
        elif node.target in (EXIT_AUTOCAST, EXIT_INFERENCE):
            del self._open[node.all_input_nodes[0]]
        return result
