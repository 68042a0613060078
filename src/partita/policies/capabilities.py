"""Capabilities: who takes a node, asked of a function, of torch's `OperatorSupport`, or of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torch import nn
from torch.fx import Node

from partita.backends.backend import Backend, is_backend
from partita.backends.finding import find_backend
from partita.errors import CallbackError, OptionError
from partita.graphs.program import Program
from partita.policies.asking import NO_REASON, asked
from partita.regions.reason import Reason

__all__ = ["Capability", "Refusal", "Takers", "checked_capabilities", "name_of"]


@runtime_checkable
class Supports(Protocol):
    """What torch calls an operator support."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool: ...


#: Who takes nodes: a function from a node to why it is refused (None if it is not), an operator support of torch's, a
#: backend, or the name of one.
Capability: TypeAlias = Callable[[Node], str | None] | Supports | Backend | str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that nobody takes, and why."""

    node: Node
    reason: Reason


def checked_capabilities(given: object) -> tuple[Capability, ...]:
    """One capability or several as a tuple, each of which can be asked."""
    several = given if isinstance(given, tuple | list) else (given,)
    if not several:
        raise OptionError("ByCapability asks at least one backend, function or OperatorSupport")
    for one in several:
        if isinstance(one, str):
            find_backend(one)
        elif isinstance(one, type) or not (is_backend(one) or isinstance(one, Supports) or callable(one)):
            raise OptionError(
                f"{one!r} cannot say what it takes; give a function from a node to a reason to refuse it (or None), "
                "an OperatorSupport, or a backend"
            )
    return tuple(several)


@final
class Takers:
    """Capabilities in order of preference, asked about the nodes of one program."""

    def __init__(self, program: Program, capabilities: Sequence[Capability]) -> None:
        submodules = dict(program.graph_module.named_modules(remove_duplicate=False))
        self._takers = [_Taker.of(one, submodules) for one in capabilities]

    def taker_of(self, nodes: Sequence[Node]) -> int | Refusal:
        """The place of the first that takes all of the nodes, or the first node that all refuse one of, and why."""
        refusals: list[tuple[str, str]] = []
        refused: Node | None = None
        for place, taker in enumerate(self._takers):
            for node in nodes:
                why = taker.refusal(node)
                if why is not None:
                    refused = refused or node
                    refusals.append((taker.name, why))
                    break
            else:
                return place
        assert refused is not None
        return Refusal(refused, _joined(refusals))


def _joined(refusals: Sequence[tuple[str, str]]) -> Reason:
    if len(refusals) == 1:
        return Reason.refused(*refusals[0])
    by = " and ".join(name for name, _ in refusals)
    why = "; ".join(f"{name}: {why}" for name, why in refusals)
    return Reason(f"refused by {why}", kind="refused", by=by, why=why)


@dataclass(frozen=True, slots=True)
class _Taker:
    """A capability with its name, asked with errors that name the node."""

    name: str
    function: Callable[[Node], Any]

    @classmethod
    def of(cls, capability: Capability, submodules: Mapping[str, nn.Module]) -> _Taker:
        if isinstance(capability, str) or is_backend(capability):
            backend = find_backend(capability)
            return cls(backend.name, backend.refusal)
        if isinstance(capability, Supports):
            support = capability
            return cls(type(support).__name__, lambda node: _not_supported(support, submodules, node))
        assert callable(capability)
        name = getattr(capability, "__name__", None) or type(capability).__name__
        return cls("taken" if name == "<lambda>" else name, capability)

    def refusal(self, node: Node) -> str | None:
        answer = asked(self.function, node, node=node, role=f"refusal function {self.name!r}")
        if answer is not None and not isinstance(answer, str):
            raise CallbackError(
                f"the refusal function {self.name!r} answered {answer!r} for node {node.name!r}; it answers with the "
                "reason to refuse the node, a text, or with None to take it"
            )
        return answer if answer is None or answer.strip() else NO_REASON


def _not_supported(support: Supports, submodules: Mapping[str, nn.Module], node: Node) -> str | None:
    return None if support.is_node_supported(submodules, node) else "not supported"


def name_of(capability: Capability) -> str:
    """What regions and reasons call whoever takes the nodes."""
    return _Taker.of(capability, {}).name
