"""The frames of a model inside torch.compile: where each is in the model, and what was planned for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule

from partita._plain_help import PlainHelp
from partita._torch.modes import read_ambient
from partita.analysis.modes import Autocast
from partita.plans import Plan
from partita.plans.plan import Policy
from partita.program.program import Frame

#: Components of paths that wrappers of torch add: torch.compile, checkpoint wrappers, the first FSDP.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@final
@dataclass(frozen=True, slots=True, eq=False)
class FramePlan(metaclass=PlainHelp):
    """What the backend did with one frame of a model; `on_plan` gets it, and `plans` lists all of a model."""

    plan: Plan
    #: The path of the frame's module in the outermost module that was running; empty for that itself.
    path: str
    policy: Policy
    #: What planning and the inner backend took.
    inner_seconds: float
    #: How many different bodies the inner backend compiled.
    inner_bodies: int

    @property
    def seconds(self) -> float:
        """How long compiling it took, with what `Lower` has compiled so far, without backward graphs compiled later."""
        return self.inner_seconds + self.plan.compilations.seconds

    @property
    def bodies(self) -> int:
        """How many different bodies were compiled, by the inner backend and so far by `Lower`."""
        lowered = {compiled.region for compiled in self.plan.compilations if compiled.is_new}
        return self.inner_bodies + sum(not lowered.isdisjoint(body.regions) for body in self.plan.bodies())

    def __repr__(self) -> str:
        where = repr(self.path) if self.path else "the model"
        nodes, regions = len(self.plan.program.operators()), len(self.plan.partition)
        counts = ((nodes, "operator", "operators"), (regions, "region", "regions"), (self.bodies, "body", "bodies"))
        shown = ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts)
        return f"FramePlan({where}: {shown}, {self.seconds:.1f} s)"


def plans(model: nn.Module) -> tuple[FramePlan, ...]:
    """The plans for the frames of `model` that the backend has compiled, in the order of compilation.

    Dynamo compiles equal modules once, so a frame may serve several of them. `torch.compiler.reset()` forgets them.
    """
    return tuple(_PLANS.get(unwrapped(model), ()))


def forget_plans() -> None:
    """Forgets the plans of all models, whose compiled frames are gone after a reset of Dynamo."""
    _PLANS.clear()


_PLANS: WeakKeyDictionary[nn.Module, list[FramePlan]] = WeakKeyDictionary()


@final
class RunningModel:
    """The modules that are running while Dynamo compiles a frame of one of them, read from the stack of Python."""

    def __init__(self, graph_module: GraphModule) -> None:
        running = _running_modules()
        own = running[0] if running else None
        roots = [] if own is None else [module for module in reversed(running) if _path_in(module, own) is not None]
        #: The outermost module that contains that of the frame.
        self.root = roots[0] if roots else None
        paths = (
            [_path_in(root, own) for root in roots]
            if own is not None and _has_traced_modules(own, graph_module)
            else []
        )
        self.frame = Frame(
            None if own is None else type(own),
            tuple(dict.fromkeys(path for path in paths if path)),
            tuple(_ambient_autocast()),
        )

    def record(self, plan: FramePlan) -> None:
        """Adds a plan to those of the model."""
        if self.root is not None:
            _PLANS.setdefault(self.root, []).append(plan)


@final
@dataclass(frozen=True, slots=True)
class PlaceInStep:
    """Whether a graph that is compiled now is a part of the model that runs, and where."""

    is_part: bool
    #: The path of the frame's module in the outermost module that is running; for the model itself, of modules in it.
    name: str
    #: The outermost module that is running.
    model: weakref.ref[nn.Module] | None

    @classmethod
    def of(cls, graph_module: GraphModule) -> PlaceInStep:
        """It is a part if a graph break ends it, or if the modules around that of its frame have other parameters."""
        running = RunningModel(graph_module)
        own, root = running_module(), running.root
        inside = set() if own is None else set(own.parameters())
        is_inner = root is not None and any(one not in inside for one in root.parameters())
        name = next(iter(running.frame.paths), "") if is_inner else ""
        ends_at_break = getattr(getattr(graph_module, "compile_subgraph_reason", None), "graph_break", False)
        model = None if root is None else weakref.ref(root)
        return cls(is_inner or ends_at_break, name or _modules_in(graph_module), model)


def _ambient_autocast() -> Iterator[Autocast]:
    """The autocast that is on now, by device; Dynamo compiles a frame under the modes that it is called under."""
    ambient = read_ambient()
    for device, is_enabled, dtype in ambient.autocast:
        if is_enabled:
            yield Autocast(device, dtype, cache=ambient.autocast_cache)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile wraps, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def running_module() -> nn.Module | None:
    """The innermost module whose method is on the stack."""
    return next(iter(_running_modules()), None)


def _running_modules() -> list[nn.Module]:
    """The modules whose methods are on the stack, each once, innermost first."""
    return list(dict.fromkeys(map(unwrapped, _selves_on_stack())))


def _selves_on_stack() -> Iterator[nn.Module]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            running = frame.f_locals.get("self")
            if isinstance(running, nn.Module):
                yield running
        frame = frame.f_back


def _path_in(root: nn.Module, module: nn.Module) -> str | None:
    """The path of a module in another, without what wrappers add; None if it is not in it."""
    for name, found in root.named_modules():
        if found is module:
            return plain_path(name)
    return None


def plain_path(path: str) -> str:
    """A path without what wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _modules_in(graph_module: GraphModule) -> str:
    """The path of the module whose operators a graph has, or of the first and the last one of several."""
    paths: dict[str, None] = {}
    for node in graph_module.graph.nodes:
        recorded = [plain_path(path) for path, _ in _recorded(node.meta.get("nn_module_stack"))]
        paths.update(dict.fromkeys(recorded[:1]))
    names = list(paths)
    return "" if not names else names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _has_traced_modules(module: nn.Module, graph_module: GraphModule) -> bool:
    """Whether the modules that the trace recorded are those of `module`: the frame may belong to another one."""
    for node in graph_module.graph.nodes:
        for path, kind in _recorded(node.meta.get("nn_module_stack")):
            try:
                found = module.get_submodule(path)
            except AttributeError:
                return False
            return type(unwrapped(found)) is kind or isinstance(found, kind)
    return True


def _recorded(stack: Any) -> Iterator[tuple[str, type]]:
    for path, kind in dict(stack or {}).values():
        if isinstance(path, str) and path.startswith("L['self'].") and isinstance(kind, type):
            yield path.removeprefix("L['self']."), kind
