"""Runs a body on fake inputs and records the result of each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from partita.analysis.op_effects.calls import op_effects_of
from partita.analysis.op_effects.terms import nodes_in_slots
from partita.lowering._torch.containers import read_leaves


@final
class BodyRun(NamedTuple):
    """The result of each node of a body; `fresh` are its leaves before any mutation, with the keys that read them."""

    results: dict[Node, Any]
    fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]]
    #: Whether the body left gradients enabled or disabled otherwise than it found them.
    switched_gradients: bool
    #: The ids of tensors that a later node reshapes in place: `v.t_()`, `v.unsqueeze_(0)`.
    reshaped: frozenset[int] = frozenset()

    def has_changed(self, node: Node) -> bool:
        """Whether a list or dict among the results of the node was mutated since."""
        now = list(read_leaves(self.results[node]))
        then = self.fresh[node]
        return len(now) != len(then) or any(
            old_keys != keys or old is not leaf for (old_keys, old), (keys, leaf) in zip(then, now, strict=True)
        )


class InvalidCallError(Exception):
    """The body raises for such a call, or may do so, so that it must run eagerly."""


def run_on_fakes(body: GraphModule, inputs: Sequence[Any], mode: Any) -> BodyRun:
    """The result of each node of `body` for fake inputs."""
    from torch._guards import TracingContext, tracing

    # Without the Python dispatcher: its decompositions copy where eager mode returns its input.
    found = torch.is_grad_enabled()
    with (
        tracing(TracingContext(mode)),
        mode.shape_env.ignore_fresh_unbacked_symbols(),
        mode,
        torch.set_grad_enabled(found),
    ):
        interpreter = _RecordingInterpreter(body, garbage_collect_values=False)
        try:
            interpreter.run(*inputs)
        except Exception as error:
            if _is_unsupported(error) or isinstance(error, InvalidCallError):
                raise
            raise InvalidCallError(f"the body raises {type(error).__name__}: {error}") from error
        left = torch.is_grad_enabled()
    return BodyRun(interpreter.env, interpreter.fresh, found is not left, frozenset(interpreter.reshaped))


class _RecordingInterpreter(Interpreter):
    """Records the leaves of each result before any mutation, and which tensors are reshaped in place."""

    def __init__(self, body: GraphModule, *, garbage_collect_values: bool) -> None:
        super().__init__(body, garbage_collect_values=garbage_collect_values)
        self.fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]] = {}
        self.reshaped: set[int] = set()

    def run_node(self, n: Node) -> Any:
        arguments = [leaf for read in n.all_input_nodes for _, leaf in read_leaves(self.env[read])]
        before = list(map(_layout, arguments))
        self._check_mutated(n)
        result = super().run_node(n)
        self.fresh[n] = list(read_leaves(result))
        self.reshaped.update(id(leaf) for leaf, then in zip(arguments, before, strict=True) if _layout(leaf) != then)
        return result

    def _check_mutated(self, node: Node) -> None:
        """Raises where a call mutates an expanded tensor: eager mode refuses that, and fake tensors do not."""
        assert isinstance(self.module, GraphModule)
        for read in nodes_in_slots(node, op_effects_of(node, self.module).mutates):
            for _, leaf in read_leaves(self.env[read]):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and _shares_elements(leaf):
                    raise InvalidCallError(f"{node.name!r} mutates a tensor whose elements share memory")


def _shares_elements(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(
        isinstance(stride, int) and stride == 0 and not (type(size) is int and size < 2) for size, stride in pairs
    )


def _is_unsupported(error: Exception) -> bool:
    """Whether an operator cannot run on fake tensors, or only for known values; the body itself may be able to run."""
    homes = ("torch._subclasses", "torch.fx.experimental.symbolic_shapes")
    return isinstance(error, NotImplementedError) or type(error).__module__.startswith(homes)


def _layout(value: Any) -> object:
    """The layout of a tensor in memory, as text: a comparison of symbols would add guards."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return str((value.shape, value.stride(), value.storage_offset()))
