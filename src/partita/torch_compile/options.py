"""The options of the torch.compile backend, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, final

import torch
from torch.fx import GraphModule

from partita.errors import OptionError
from partita.memory import MemoryBudget, Rates
from partita.memory.budget import bytes_said
from partita.memory.optimizer_state import bytes_to_come
from partita.memory.segments import Checkpoints, checked_checkpoints
from partita.near_names import near_names
from partita.plans.plan import Policy
from partita.plans.treatment import Treatment, is_treatment
from partita.policies.repeats import Repeats
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.torch_compile._torch.backends import backend_names, find_backend
from partita.treatments import Call

#: Compiles one part: from its graph and fake example inputs to a function with the graph's inputs and outputs.
Inner: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def repeats_or_whole(program: Program) -> Partition:
    """The blocks that a model repeats, and what lies between; one region that holds every operator if none repeats."""
    repeats = Repeats(min_size=_MIN_SIZE, min_saved=_MIN_SAVED)(program)
    if len({region.label for region in repeats}) < len(repeats):
        return repeats
    operators = tuple(program.operators())
    return Partition(program, [Region("whole", operators)] if operators else [])


#: Backends of torch that make functions of their inputs alone.
_KEEP_NO_INPUTS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition")

#: A block is a region of its own if it has this many operators, and compiling it once saves this part of the work.
_MIN_SIZE, _MIN_SAVED = 6, 0.05


@final
@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The policy, the treatment, and the backend that compiles the regions that are still graphs after treatment."""

    policy: Policy = repeats_or_whole
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment] = field(default_factory=Call)
    inner: str | Inner = "inductor"
    #: Called with the `FramePlan` of each graph.
    on_plan: Callable[[Any], object] | None = None
    #: Whether regions with equal bodies share what `inner` makes of the first one; by default where that is known to
    #: keep nothing of its inputs, such as addresses of weights in a CUDA graph.
    share: bool | None = None
    #: The bytes that a training step may take at its peak: "11GB", a number, or a part of what the plain step takes.
    peak: str | int | float | None = None
    #: The bytes that communication between ranks takes during a step with `peak`, beside what is allocated before it.
    communication: str | int = 0
    #: The optimizer, or the bytes of its state, which count for `peak` where they are not allocated yet.
    optimizer: torch.optim.Optimizer | int = 0
    #: Whether calls of `torch.utils.checkpoint` are planned for `peak` like all else, or recomputed as the model says.
    checkpoints: Checkpoints = "replan"
    #: The speed of the device, by which recomputation for `peak` is chosen; measured if omitted.
    rates: Rates | None = None

    def __post_init__(self) -> None:
        if self.peak is not None:
            MemoryBudget(self.peak)
        bytes_said(self.communication, "communication")
        bytes_to_come(self.optimizer)
        checked_checkpoints(self.checkpoints)
        if not callable(self.policy):
            raise OptionError(f"the option 'policy' takes a policy such as ByLabel(...), not {self.policy!r}")
        if not (is_treatment(self.treatment) or isinstance(self.treatment, Mapping) or callable(self.treatment)):
            raise OptionError(f"the option 'treatment' takes a treatment such as Call(), not {self.treatment!r}")
        if not isinstance(self.inner, str) and not callable(self.inner):
            raise OptionError(f"the option 'inner' takes a backend's name or a function, not {self.inner!r}")
        if self.on_plan is not None and not callable(self.on_plan):
            raise OptionError(f"the option 'on_plan' takes a function of a FramePlan, not {self.on_plan!r}")
        if self.share is not None and not isinstance(self.share, bool):
            raise OptionError(f"the option 'share' is True, False or None, not {self.share!r}")

    @property
    def shares(self) -> bool:
        """Whether equal regions share a compiled function."""
        return self.inner in _KEEP_NO_INPUTS if self.share is None else self.share

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
        if passed.get("peak") is not None:
            for name in ("policy", "treatment", "share"):
                if name in passed:
                    raise OptionError(
                        f"the option 'peak' finds itself what is recomputed, so it does not go with {name!r}; omit one"
                    )
        else:
            for name in ("communication", "optimizer", "checkpoints"):
                if name in passed:
                    raise OptionError(f"the option {name!r} is for steps that fit a 'peak'; pass that too, or omit it")
        return cls(**passed)

    def inner_backend(self) -> Inner:
        """The function that compiles one part."""
        if not isinstance(self.inner, str):
            return self.inner
        backend = find_backend(self.inner)
        if backend is None:
            names = backend_names()
            near = near_names(self.inner, names) or names
            raise OptionError(
                f"torch.compile knows no backend {self.inner!r} for the option 'inner'; "
                f"try {', '.join(map(repr, near))}, or pass a function"
            )
        return backend
