"""Inductor: torch's own compiler, called without Dynamo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch.fx import GraphModule, Node

from partita._torch.backend_draws import check_draws
from partita._torch.backend_inductor import (
    compile_with_inductor,
    function_from_bytes,
    function_to_bytes,
    vectors_of_inductor,
)
from partita.backends.adapting import adapt
from partita.backends.backend import Compiled
from partita.backends.calling import CompiledBody
from partita.backends.options import Options, checked_options, options_for_inductor
from partita.backends.refusals import refusal_by_inductor
from partita.backends.storing import restored, stored
from partita.errors import BackendError
from partita.graphs.tolerance import Tolerance

__all__ = ["INDUCTOR_TOLERANCE", "Inductor"]


#: Inductor adds in other orders and has its own elementary functions: blocks of transformers in float32 are off by 3e-6
#: at most, and by 1e-5 of what is not tiny.
INDUCTOR_TOLERANCE = Tolerance(relative=1e-4, absolute=1e-5, rounding=torch.finfo(torch.float32).eps)


@final
@dataclass(frozen=True, slots=True, init=False)
class Inductor:
    """Compiles forward and backward; `options` are those of `torch.compile(options=...)`.

    Random numbers are eager's own unless the option `fallback_random` is switched off.
    """

    options: Options

    name: ClassVar[str] = "inductor"
    tolerance: ClassVar[Tolerance] = INDUCTOR_TOLERANCE
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, object] | Options = ()) -> None:
        object.__setattr__(self, "options", checked_options(options))

    def refusal(self, node: Node) -> str | None:
        """Why Inductor does not take `node`."""
        return refusal_by_inductor(node)

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """What Inductor makes of the body."""
        check_draws(body, inputs)
        adapted = adapt(body, inputs)
        options = options_for_inductor(self.options)
        function = compile_with_inductor(body, adapted.inputs, options)
        return CompiledBody(function, adapted.calling(), vectors=vectors_of_inductor(options))

    def save(self, compiled: Compiled) -> bytes:
        """What Inductor made, for another process that has a C++ compiler or Inductor's caches."""
        if not isinstance(compiled, CompiledBody):
            raise BackendError(f"inductor stores what it has compiled itself, not a {type(compiled).__name__}")
        code = compiled.stored or function_to_bytes(compiled.function)
        if code is None:
            raise BackendError(
                "inductor can only store bodies whose calls torch has lasting names for, and which give no sizes of "
                "what they compute; compile it again where it is needed, or capture the program with partita.capture, "
                "which leaves nothing but operators in it"
            )
        return stored(self.name, compiled.calling, code, vectors=compiled.vectors)

    def load(self, data: bytes) -> Compiled:
        """What was stored; it runs code, so load nothing that you do not trust."""
        options = options_for_inductor(self.options)
        vectors = vectors_of_inductor(options)
        calling, code = restored(self.name, data, vectors=vectors)
        return CompiledBody(function_from_bytes(code, options), calling, stored=code, vectors=vectors)
