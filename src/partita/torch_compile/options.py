"""The options of the torch.compile backend, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeAlias, final

from torch.fx import GraphModule

from partita.errors import OptionError
from partita.plans.plan import Policy
from partita.plans.treatment import Treatment, is_treatment
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.torch_compile._torch.backends import backend_names, find_backend
from partita.treatments import Call

#: Compiles one part: from its graph and fake example inputs to a function with the graph's inputs and outputs.
Inner: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def whole(program: Program) -> Partition:
    """One region that holds every operator."""
    operators = tuple(program.operators())
    return Partition(program, [Region("whole", operators)] if operators else [])


@final
@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The policy, the treatment, and the backend that compiles the regions that are still graphs after treatment."""

    policy: Policy = whole
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment] = field(default_factory=Call)
    inner: str | Inner = "inductor"
    #: Called with the `FramePlan` of each graph.
    on_plan: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if not callable(self.policy):
            raise OptionError(f"the option 'policy' takes a policy such as ByLabel(...), not {self.policy!r}")
        if not (is_treatment(self.treatment) or isinstance(self.treatment, Mapping) or callable(self.treatment)):
            raise OptionError(f"the option 'treatment' takes a treatment such as Call(), not {self.treatment!r}")
        if not isinstance(self.inner, str) and not callable(self.inner):
            raise OptionError(f"the option 'inner' takes a backend's name or a function, not {self.inner!r}")
        if self.on_plan is not None and not callable(self.on_plan):
            raise OptionError(f"the option 'on_plan' takes a function of a FramePlan, not {self.on_plan!r}")

    @classmethod
    def read(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """The options as torch.compile passes them."""
        passed = dict(options or {})
        known = [option.name for option in fields(cls)]
        unknown = [name for name in passed if name not in known]
        if unknown:
            raise OptionError(
                f"the backend 'partita' has no option {', '.join(map(repr, unknown))}; "
                f"its options are {', '.join(map(repr, known))}"
            )
        return cls(**passed)

    def inner_backend(self) -> Inner:
        """The function that compiles one part."""
        if not isinstance(self.inner, str):
            return self.inner
        backend = find_backend(self.inner)
        if backend is None:
            names = backend_names()
            near = get_close_matches(self.inner, names, n=3) or names
            raise OptionError(
                f"torch.compile knows no backend {self.inner!r} for the option 'inner'; "
                f"try {', '.join(map(repr, near))}, or pass a function"
            )
        return backend
