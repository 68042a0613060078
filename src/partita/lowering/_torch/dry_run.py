"""Runs a body on fake inputs and records the result of each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

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
        interpreter.run(*inputs)
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
        result = super().run_node(n)
        self.fresh[n] = list(read_leaves(result))
        self.reshaped.update(id(leaf) for leaf, then in zip(arguments, before, strict=True) if _layout(leaf) != then)
        return result


def _layout(value: Any) -> object:
    """The layout of a tensor in memory, as text: a comparison of symbols would add guards."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return str((value.shape, value.stride(), value.storage_offset()))
