"""The frames of a model inside torch.compile: where each is in the model, and what was planned for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule

from partita._torch.modes import read_ambient
from partita.analysis.mode import Autocast
from partita.plans import Plan
from partita.plans.plan import Policy
from partita.program.frame import Frame

log = logging.getLogger(__name__)

#: Components of paths that wrappers of torch add: torch.compile, checkpoint wrappers, the first FSDP.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@final
@dataclass(frozen=True, slots=True, eq=False)
class FramePlan:
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
        told = ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts)
        return f"FramePlan({where}: {told}, {self.seconds:.1f} s)"


def plans(model: nn.Module) -> tuple[FramePlan, ...]:
    """The plans for the frames of `model` that the backend has compiled, in the order of compilation.

    Dynamo compiles equal modules once, so a frame may serve several of them. `torch.compiler.reset()` forgets them.
    """
    return tuple(_PLANS.get(unwrapped(model), ()))


def forget_plans() -> None:
    """Forgets the plans of all models, whose compiled frames are gone after a reset of Dynamo."""
    _PLANS.clear()
    _WARNED.clear()


_PLANS: WeakKeyDictionary[nn.Module, list[FramePlan]] = WeakKeyDictionary()
#: The policies that are known to match nothing in a model.
_WARNED: WeakKeyDictionary[nn.Module, list[Policy]] = WeakKeyDictionary()


@final
class RunningModel:
    """The modules that are running while Dynamo compiles a frame of one of them, read from the stack of Python."""

    def __init__(self, graph_module: GraphModule) -> None:
        running = list(dict.fromkeys(unwrapped(module) for module in _running_modules()))
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

    def warning_if_unmatched(self, function: Callable[..., Any], plan: FramePlan) -> Callable[..., Any]:
        """The function of a frame without a region, which warns if no frame of the model has one.

        At its second call all frames that ran in the first one are known.
        """
        if len(plan.plan.partition) or not plan.plan.program.operators():
            return function
        return _WarnsAtSecondCall(function, self.root, plan)


@final
class _WarnsAtSecondCall:
    """A function that at its second call warns where a policy has matched nothing in a model."""

    def __init__(self, function: Callable[..., Any], root: nn.Module | None, plan: FramePlan) -> None:
        self._function, self._root, self._plan = function, root, plan
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        if self._calls < 2:
            self._calls += 1
            if self._calls == 2:
                self._check()
        return self._function(*args)

    def _check(self) -> None:
        frames = [self._plan] if self._root is None else _PLANS.get(self._root, [self._plan])
        policy = self._plan.policy
        known = _WARNED.setdefault(self._root, []) if self._root is not None else []
        is_matched = any(len(frame.plan.partition) for frame in frames if frame.policy is policy)
        if not is_matched and not any(one is policy for one in known):
            known.append(policy)
            log.warning(
                "%r matches nothing in any of the %d frames of the model that torch.compile has traced, so nothing is "
                "cut or treated",
                policy,
                len(frames),
            )


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


def _running_modules() -> Iterator[nn.Module]:
    """The modules whose methods are on the stack, innermost first."""
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
            return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return None


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
