"""The law for recomputed programs that are compiled: they are equivalent to the original, compiled the same way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from partita._torch.pytrees import flatten
from partita.analysis.op_effects.calls import tensors_of
from partita.backends import find_backend
from partita.backends.backend import tolerance_of
from partita.equivalence import Comparison, Difference, compare
from partita.equivalence.state import storage_key
from partita.errors import TreatmentError
from partita.program.program import Program
from partita.program.reordering import summation_tolerance
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import ALL
from partita.testing.laws.core import LawError
from partita.testing.laws.recompute import recomputed

#: What torch.compile takes in one graph, most of the time: no lists that are written, no numbers read from tensors (an
#: operator's body cannot give them to others), no inference mode (torch fails at views there), nothing unknown.
COMPILABLE = replace(ALL, containers=False, lists=False, items=False, inference=False, unknown=False, hooks=False)

#: A graph with inputs to train and no result to train with has no backward, and torch takes no random numbers there.
_WITHOUT_BACKWARD = "does not support RNG ops in recompute regions"


def check_compiled_recompute_law(case: Case, compiler: str, seed: int) -> str | None:
    """Raises where the compiled program differs from the compiled original and from the original itself.

    Where the law says nothing, the reason: the plan was refused, or `torch.compile` does not take the original.
    """
    program = Program.of(case.graph_module)
    try:
        after = recomputed(program, seed)
    except TreatmentError as refusal:
        return str(refusal)
    plain, found = _Compiled(program.module(), compiler), _Compiled(after.module(), compiler)
    tolerance = tolerance_of(find_backend(compiler)) | after.tolerance | summation_tolerance(program)
    own = case.copy()

    def compared(one: Any) -> Comparison:
        torch.compiler.reset()
        return compare(one, found, own.args, own.kwargs, tolerance=tolerance, other_shapes=False)

    comparison = compared(plain)
    if plain.failure is not None:
        return f"torch.compile does not take the original: {plain.failure}"
    if comparison.equal or _WITHOUT_BACKWARD in str(found.failure):
        return None
    # Where the compiled original is wrong itself, it is enough to be like the original.
    found_in = _places(comparison.differences) & _places(compared(program).differences)
    if not found_in:
        return None
    if _share_memory(own) and found_in <= _places(filter(_is_view_of_parameter, comparison.differences)):
        return "torch gives a view of a parameter in its place, by the order of inputs, where some share memory"
    title = f"compiled by {compiler}, a recomputed program is equivalent to the original"
    raise LawError(f"{title}\n{case!r}\n{comparison}\n{found.failure or ''}")


def _places(differences: Iterable[Difference]) -> set[tuple[str, str, str]]:
    """What differs where and when; only graphs tell the nodes that give their outputs."""
    return {(found.kind, found.where.partition(" (node ")[0], found.when) for found in differences}


def _share_memory(case: Case) -> bool:
    """Whether two tensors among arguments and state are one memory: AOTAutograd makes one input of them (2.13)."""
    tensors = {id(leaf): leaf for leaf in flatten((case.args, case.kwargs)).leaves if isinstance(leaf, Tensor)}
    tensors |= {id(tensor): tensor for tensor in tensors_of(case.graph_module)}
    return len({storage_key(tensor) for tensor in tensors.values()}) < len(tensors)


def _is_view_of_parameter(difference: Difference) -> bool:
    return difference.kind == "type" and difference.detail == "Parameter != Tensor"


@final
class _Compiled:
    """A compiled module, with the state of the module itself, and what was wrong when a call failed."""

    def __init__(self, module: nn.Module, compiler: str) -> None:
        self.__self__ = module
        self.failure: Exception | None = None
        self._call = torch.compile(module, backend=compiler, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except Exception as error:
            self.failure = error
            raise
