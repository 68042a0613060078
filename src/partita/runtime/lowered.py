"""A lowered region: a module that runs compiled code where its body was called, made when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita._torch.lazy_modules import make_lazy_again
from partita._torch.lowering_ambient import profiler_runs, watched
from partita._torch.standing_modules import StandsForBody
from partita.errors import BackendError
from partita.runtime.checked_outputs import WrongOutputsError
from partita.runtime.choice import Choice
from partita.runtime.lowering import Lowering
from partita.runtime.variants import Variants

__all__ = ["Lowered"]


@final
class Lowered(StandsForBody):
    """Calls compiled code, or the body itself where that is not possible, under the modes of the body."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        super().__init__()
        self.training = body.training
        self.body = body
        self.lowering = lowering
        self._variants = variants
        self._choice = Choice(body, lowering, variants)
        # `Graph.eliminate_dead_code` asks for this name.
        self._is_impure = getattr(body, "_is_impure", False)

    def forward(self, *inputs: Any, tag: str | None = None) -> Any:
        """What the body gives; a profiler shows the call under `tag`, or under that of the lowering."""
        if torch.compiler.is_dynamo_compiling():
            return self._traced(inputs)
        if profiler_runs():
            with torch.profiler.record_function(tag or self.lowering.tag):
                return self._in_scope(inputs)
        return self._in_scope(inputs)

    def compile_for(self, inputs: Sequence[Any]) -> None:
        """Compiles for calls with inputs that look like these, which may be fake, in the modes of now."""
        scope = self.lowering.scope
        if scope is None:
            self._choice.make_for(inputs)
        else:
            scope.call(self._choice.make_for, inputs)

    def _in_scope(self, inputs: Sequence[Any]) -> Any:
        scope = self.lowering.scope
        if scope is None:
            return self._called(inputs)
        return self._traced(inputs) if watched() else scope.call(self._called, inputs)

    def _called(self, inputs: Sequence[Any]) -> Any:
        chosen = self._choice.of(inputs)
        if chosen is None:
            return self._run_body(inputs)
        function, values = chosen
        try:
            return function(values)
        except WrongOutputsError as error:
            region, backend = self.lowering.region, self.lowering.backend
            raise BackendError(
                f"{region}: the function that {backend} made {error}; try the backend with check_backend"
            ) from error

    def _traced(self, inputs: Sequence[Any]) -> Any:
        """What the body gives, for somebody who watches every operator of it."""
        scope = self.lowering.scope
        return self._run_body(inputs) if scope is None else scope.as_traced.call(self._run_body, inputs)

    def _run_body(self, inputs: Sequence[Any]) -> Any:
        return self.body(*inputs)

    def __getstate__(self) -> dict[str, Any]:
        """What was seen so far stays behind; the variants know how they are copied and stored."""
        return {name: value for name, value in self.__dict__.items() if name != "_choice"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        make_lazy_again(self.body)
        self._choice = Choice(self.body, self.lowering, self._variants)
