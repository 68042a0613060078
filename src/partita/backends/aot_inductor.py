"""AOTInductor: a body as native code that can be stored, moved to another process and run there without a compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch.fx import GraphModule, Node

from partita._torch.backend_aoti import function_of_package, package_of
from partita._torch.backend_draws import check_draws
from partita._torch.processor import vectors
from partita.backends.adapting import adapt_to_tensors
from partita.backends.backend import Compiled
from partita.backends.calling import CompiledBody
from partita.backends.inductor import INDUCTOR_TOLERANCE
from partita.backends.options import Options, checked_options, options_for_inductor
from partita.backends.refusals import refusal_by_inductor
from partita.backends.storing import restored, stored
from partita.errors import BackendError
from partita.graphs.tolerance import Tolerance

__all__ = ["AotInductor"]


@final
@dataclass(frozen=True, slots=True, init=False)
class AotInductor:
    """Compiles for inference, into a library that needs neither Python nor a compiler; `options` are Inductor's.

    Compiling takes longer than with `Inductor`, since all of it goes through a C++ compiler. A view of an input that
    the body writes comes out as a copy: `Lower` makes views itself and asks no backend for them.
    """

    options: Options

    name: ClassVar[str] = "aot_inductor"
    tolerance: ClassVar[Tolerance] = INDUCTOR_TOLERANCE
    trains: ClassVar[bool] = False
    takes_symbols: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, object] | Options = ()) -> None:
        object.__setattr__(self, "options", checked_options(options))

    def refusal(self, node: Node) -> str | None:
        """Why AOTInductor does not take `node`."""
        return refusal_by_inductor(node)

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The function in the package that AOTInductor makes of the body."""
        check_draws(body, inputs)
        adapted = adapt_to_tensors(body, inputs)
        package = package_of(body, adapted.inputs, options_for_inductor(self.options))
        return CompiledBody(function_of_package(package), adapted.calling(), stored=package, vectors=vectors())

    def save(self, compiled: Compiled) -> bytes:
        """The package with what is needed to call it."""
        if not isinstance(compiled, CompiledBody) or compiled.stored is None:
            raise BackendError(f"aot_inductor stores what it has compiled itself, not a {type(compiled).__name__}")
        return stored(self.name, compiled.calling, compiled.stored, vectors=compiled.vectors)

    def load(self, data: bytes) -> Compiled:
        """What was stored; it runs native code, so load nothing that you do not trust."""
        calling, package = restored(self.name, data, vectors=vectors())
        return CompiledBody(function_of_package(package), calling, stored=package, vectors=vectors())
