"""Running a body on fake inputs, and seeing what each of its nodes gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from partita.lowering._torch.containers import read_leaves

__all__ = ["BodyRun", "run_on_fakes"]


@final
class BodyRun(NamedTuple):
    """What each node of a body gave; `fresh` are its leaves when it was new, and the keys by which they were read."""

    results: dict[Node, Any]
    fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]]
    #: Whether gradients were on before and off after, or the other way round.
    switched_gradients: bool
    #: The ids of tensors that a later node gave another shape, in place: `v.t_()`, `v.unsqueeze_(0)`.
    reshaped: frozenset[int] = frozenset()

    def has_changed(self, node: Node) -> bool:
        """Whether a list or dict that the node gave holds something else now."""
        now = list(read_leaves(self.results[node]))
        then = self.fresh[node]
        return len(now) != len(then) or any(
            old_keys != keys or old is not leaf for (old_keys, old), (keys, leaf) in zip(then, now, strict=True)
        )


def run_on_fakes(body: GraphModule, inputs: Sequence[Any], mode: Any) -> BodyRun:
    """What each node of `body` gives for fake inputs."""
    from torch._guards import TracingContext, tracing

    # Python's versions of operators are left out: they copy where plain torch gives the same tensor back.
    found = torch.is_grad_enabled()
    with (
        tracing(TracingContext(mode)),
        mode.shape_env.ignore_fresh_unbacked_symbols(),
        mode,
        torch.set_grad_enabled(found),
    ):
        interpreter = _Noting(body, garbage_collect_values=False)
        interpreter.run(*inputs)
        left = torch.is_grad_enabled()
    return BodyRun(interpreter.env, interpreter.fresh, found is not left, frozenset(interpreter.reshaped))


class _Noting(Interpreter):
    """Runs a body and notes what is in each result before anybody changes it, and whose shape is changed."""

    def __init__(self, body: GraphModule, *, garbage_collect_values: bool) -> None:
        super().__init__(body, garbage_collect_values=garbage_collect_values)
        self.fresh: dict[Node, list[tuple[tuple[Any, ...], Any]]] = {}
        self.reshaped: set[int] = set()

    def run_node(self, n: Node) -> Any:
        given = [leaf for read in n.all_input_nodes for _, leaf in read_leaves(self.env[read])]
        before = list(map(_layout, given))
        result = super().run_node(n)
        self.fresh[n] = list(read_leaves(result))
        self.reshaped.update(id(leaf) for leaf, then in zip(given, before, strict=True) if _layout(leaf) != then)
        return result


def _layout(value: Any) -> object:
    """How a tensor lies in memory, as text: to compare symbols themselves would be to assume something of them."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return str((value.shape, value.stride(), value.storage_offset()))
