"""The halves of a joint graph: which nodes are forward and which backward, by what they depend on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from partita.errors import OptionError, SignatureError
from partita.graphs.index import Index
from partita.graphs.joint import Joint
from partita.graphs.joint_held import held_by

__all__ = ["checked_count", "joint_of"]


def joint_of(index: Index, root: GraphModule, forward_outputs: int) -> Joint:
    """The joint graph whose first so many outputs are those of the forward; raises where it cannot be one."""
    outputs = _returned(index.nodes[-1])
    _check_outputs(outputs, forward_outputs)
    placeholders = [node for node in index.nodes if node.op == "placeholder"]
    tangents = tuple(filter(_is_tangent, placeholders))
    given, gradients = outputs[:forward_outputs], outputs[forward_outputs:]
    backward = _backward(index, given)
    if not tangents and any(isinstance(node, Node) and not backward[index.number[node]] for node in gradients):
        raise SignatureError(
            f"none of the inputs {_listed(placeholders)} is a tangent: in a joint graph the inputs of the backward are "
            "called 'tangents_1' and so on, as AOTAutograd does; trace one with partita.capture_joint(model, args)"
        )
    inputs = tuple(node for node in placeholders if not _is_tangent(node))
    forward_part, backward_part = (
        tuple(
            node
            for number, node in enumerate(index.nodes)
            if backward[number] is part and node.op not in ("placeholder", "get_attr", "output")
        )
        for part in (False, True)
    )
    return Joint(
        inputs=inputs,
        tangents=tangents,
        forward_outputs=given,
        gradients=gradients,
        forward=forward_part,
        backward=backward_part,
        held=held_by(index, root, backward, gradients),
        state=tuple(name for node in inputs if (name := _state_name(node)) is not None),
        written=_written(index.nodes[-1], inputs),
    )


def checked_count(forward_outputs: object) -> int:
    """A number of outputs, if it can be one."""
    if type(forward_outputs) is not int or forward_outputs < 1:
        raise OptionError(
            f"forward_outputs is the number of outputs of the forward, at least 1, not {forward_outputs!r}; "
            "AOTAutograd calls it num_fwd_outputs"
        )
    return forward_outputs


def _returned(output: Node) -> tuple[Any, ...]:
    value = output.args[0] if output.args else ()
    return _flat(value)


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(leaf for item in value for leaf in _flat(item))
    return (value,)


def _check_outputs(outputs: Sequence[Any], forward_outputs: int) -> None:
    if forward_outputs > len(outputs):
        raise SignatureError(
            f"the graph has {len(outputs)} outputs, so that its forward cannot have {forward_outputs}; give the "
            "number of outputs before the first gradient"
        )
    if forward_outputs == len(outputs):
        raise SignatureError(
            f"all {forward_outputs} outputs of the graph would be those of its forward, and none a gradient; give the "
            "number of outputs before the first gradient"
        )


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def _backward(index: Index, forward_outputs: Sequence[Any]) -> list[bool]:
    """Whether each node belongs to the backward."""
    needed = _needed(index, forward_outputs)
    backward = _reached(index, _is_tangent)
    for number in range(len(index) - 1):
        if needed[number] and backward[number]:
            raise _mixed(index, forward_outputs)
    told = _reached(index, lambda node: _is_tangent(node) or node.meta.get("partitioner_tag") in _BACKWARD_TAGS)
    told[-1] = False  # The output node reads both halves.
    return [late and not early for late, early in zip(told, needed, strict=True)]


#: What AOTAutograd writes on nodes that it traced while gradients were computed.
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")


def _needed(index: Index, forward_outputs: Sequence[Any]) -> list[bool]:
    """Whether an output of the forward depends on each node."""
    needed = [False] * len(index)
    for value in forward_outputs:
        if isinstance(value, Node):
            needed[index.number[value]] = True
    for number in range(len(index) - 1, -1, -1):
        if needed[number]:
            for source in index.inputs(number):
                needed[source] = True
    return needed


def _reached(index: Index, starts: Callable[[Node], bool]) -> list[bool]:
    """Whether each node is a start or depends on one; an item of a container goes with the container."""
    reached = [False] * len(index)
    for number, node in enumerate(index.nodes):
        depends = any(map(reached.__getitem__, index.inputs(number)))
        reached[number] = depends or (node.target is not operator.getitem and starts(node))
    return reached


def _mixed(index: Index, forward_outputs: Sequence[Any]) -> SignatureError:
    """The error for an output of the forward that depends on a tangent."""
    for value in forward_outputs:
        above = _needed(index, (value,))
        named = [node for node, needed in zip(index.nodes, above, strict=True) if needed and _is_tangent(node)]
        if named:
            return SignatureError(
                f"output {value.name!r} of the forward depends on the tangent {named[0].name!r}; forward_outputs "
                "counts the outputs before the first gradient, and no region may hold nodes of both halves"
            )
    raise AssertionError("an output depends on a tangent but none was found")


def _state_name(node: Node) -> str | None:
    """The parameter or buffer that AOTAutograd has noted for an input."""
    name = getattr(node.meta.get("desc"), "target", None)
    return name if isinstance(name, str) else None


def _written(output: Node, inputs: Sequence[Node]) -> tuple[Node, ...]:
    """The inputs whose new values AOTAutograd has noted for outputs."""
    noted = [getattr(entry, "mutated_input", None) for entry in output.meta.get("desc") or ()]
    known: dict[Any, list[Node]] = {}
    for node in inputs:
        known.setdefault(node.meta.get("desc"), []).append(node)
    return tuple(node for entry in noted if entry is not None for node in known.get(entry, ()))


def _listed(nodes: Sequence[Node]) -> str:
    names = [repr(node.name) for node in nodes[:4]]
    return ", ".join(names) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
