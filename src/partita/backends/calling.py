"""Calling: how a compiler's function is called in the place of a body that had to be changed for the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from partita._torch.backend_fakes import size_carrier

__all__ = ["Argument", "Calling", "Carrier", "CompiledBody", "Constant", "Input", "Number", "Output", "Result", "Size"]


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the body, passed on."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place]


@final
@dataclass(frozen=True, slots=True)
class Size:
    """A size of an input of the body."""

    place: int
    axis: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place].size(self.axis)


@final
@dataclass(frozen=True, slots=True)
class Carrier:
    """An integer that the body is given, as the size of an empty tensor, for a function that takes tensors only."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return size_carrier(given[self.place])


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What the function gives."""

    place: int

    def of(self, given: Sequence[Any]) -> Any:
        return given[self.place]


@final
@dataclass(frozen=True, slots=True)
class Number:
    """A number that the function gives as a tensor."""

    place: int
    kind: type[int] | type[float] | type[bool]

    def of(self, given: Sequence[Any]) -> Any:
        return self.kind(given[self.place].item())


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that was known before."""

    value: Any

    def of(self, given: Sequence[Any]) -> Any:
        return self.value


Input: TypeAlias = Argument | Size | Carrier
Output: TypeAlias = Result | Number | Constant


@final
@dataclass(frozen=True, slots=True)
class Calling:
    """What the function is given, and what the body gives, in order."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    #: How many inputs the body has.
    arity: int

    @property
    def passes_on(self) -> bool:
        """Whether the function is called just like the body."""
        return self.inputs == tuple(map(Argument, range(self.arity))) and self.gives_on

    @property
    def gives_on(self) -> bool:
        """Whether the function gives just what the body gives."""
        return self.outputs == tuple(map(Result, range(len(self.outputs))))


@final
class CompiledBody:
    """A compiler's function, called and giving like the body that it was made of.

    `stored` is the function as bytes, and `vectors` names the kind that it was compiled for.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        calling: Calling,
        *,
        stored: bytes | None = None,
        vectors: str = "",
    ) -> None:
        self.function, self.calling, self.stored, self.vectors = function, calling, stored, vectors
        self._inputs = None if calling.passes_on else [each.of for each in calling.inputs]
        self._outputs = None if calling.gives_on else [each.of for each in calling.outputs]

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self._inputs is None:
            return self.function(*given)
        results = self.function(*[taken(given) for taken in self._inputs])
        return results if self._outputs is None else tuple([made(results) for made in self._outputs])
