"""Warnings about a policy that matches nothing in the frames of a model, or not what it names.

Dynamo compiles equal modules once: the frame that was compiled for `blocks.0` runs for `blocks.1` too, so a pattern
that names one of them treats both or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn

from partita.plans import Policy
from partita.policies import ByModule
from partita.policies.matching import SelectsByName
from partita.torch_compile.frames import FramePlan, RunningModel, plain_path, plans, running_module

log = logging.getLogger(__name__)

#: The policies that were warned about in a model.
_WARNED: WeakKeyDictionary[nn.Module, list[Policy]] = WeakKeyDictionary()


def forget_warnings() -> None:
    """Forgets what was warned about."""
    _WARNED.clear()


def warning_of_mismatches(function: Callable[..., Any], model: RunningModel, plan: FramePlan) -> Callable[..., Any]:
    """The function of a frame, which warns if the policy matches nothing in all frames of the model.

    It also warns when it runs for a module that the policy treats differently from the one that it was compiled for.
    """
    if getattr(plan.policy, "allow_empty", False) or not plan.plan.program.operators():
        return function
    equal = _EqualModules(model.root, plan)
    return function if _has_match(plan) and not equal.different else _Watched(function, model.root, plan, equal)


@final
class _Watched:
    """The function of a frame, whose first calls are looked at."""

    def __init__(
        self, function: Callable[..., Any], root: nn.Module | None, plan: FramePlan, equal: _EqualModules
    ) -> None:
        self._function, self._plan = function, plan
        #: None when there is nothing more to see, so that the model is not kept alive.
        self._watched: tuple[nn.Module | None, _EqualModules] | None = (root, equal)
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        if self._watched is not None:
            self._calls += 1
            if self._calls > 1:
                self._check(*self._watched)
        return self._function(*args)

    def _check(self, root: nn.Module | None, equal: _EqualModules) -> None:
        """Looks at the module that runs: if it is the first one again, all frames of the model are known."""
        running = equal.running_now()
        if running is None or self._calls > 1 + len(equal.paths):
            self._check_all_frames(root, equal)
            self._watched = None
        elif running in equal.different:
            treated = "treated" if _has_match(self._plan) else "left untreated"
            _warn(root, self._plan.policy, f"{running!r} is {treated} like {self._plan.path!r}: {_COMPILED_ONCE}")

    def _check_all_frames(self, root: nn.Module | None, equal: _EqualModules) -> None:
        policy = self._plan.policy
        frames = (self._plan,) if root is None else plans(root) or (self._plan,)
        own = [frame for frame in frames if frame.policy is policy]
        if any(map(_has_match, own)):
            return
        hint = _near_matches(policy, own)
        if equal.different:
            hint = f"; {equal.different[0]!r} runs what was compiled for {self._plan.path!r}: {_COMPILED_ONCE}"
        _warn(
            root,
            policy,
            f"it matches nothing in any of the {len(frames)} frames of the model that torch.compile has traced, so "
            f"{'it cuts nothing' if len(self._plan.plan.partition) else 'nothing is cut or treated'}{hint}",
        )


_COMPILED_ONCE = "Dynamo compiles equal modules once, so a pattern treats all of them or none"


def _warn(root: nn.Module | None, policy: Policy, message: str) -> None:
    """Warns once for each policy and model."""
    known = [] if root is None else _WARNED.setdefault(root, [])
    if not any(one is policy for one in known):
        known.append(policy)
        log.warning("%r: %s", policy, message)


def _near_matches(policy: Policy, frames: Sequence[FramePlan]) -> str:
    if not isinstance(policy, SelectsByName) or not frames:
        return ""
    found = [policy.names(frame.plan.program) for frame in frames]
    names = found[0]._replace(present=tuple(name for one in found for name in one.present))
    return f"; {names.hint()}"


@final
class _EqualModules:
    """The other modules of the class that a frame was compiled for, by their paths in the model."""

    def __init__(self, root: nn.Module | None, plan: FramePlan) -> None:
        modules = {} if root is None else {plain_path(name): module for name, module in root.named_modules()}
        own = modules.get(plan.path) if plan.path else None
        self.paths = {path: one for path, one in modules.items() if type(one) is type(own) and one is not own}
        selected = tuple(_selected(modules, plan)) if self.paths else ()
        #: Those in which the policy selects other modules than in that of the frame.
        self.different = [path for path in self.paths if _below(path, selected) != _below(plan.path, selected)]

    def running_now(self) -> str | None:
        """The path of the one that runs now, if it is one of these."""
        running = running_module()
        return next((path for path, one in self.paths.items() if one is running), None)


def _selected(modules: dict[str, nn.Module], plan: FramePlan) -> Iterator[str]:
    """The paths of modules that a policy selects by patterns; these may begin at a module inside of the model."""
    policy, frame = plan.policy, plan.plan.program.frame
    if not isinstance(policy, ByModule) or callable(policy.paths) or frame is None:
        return
    outside = [plan.path.removesuffix(path) for path in frame.paths if plan.path.endswith(path)]
    for path, module in modules.items():
        if any(policy.selects(path.removeprefix(prefix), type(module)) for prefix in outside):
            yield path


def _below(top: str, paths: Sequence[str]) -> list[str]:
    """Those of the paths that are in `top`, as paths in that."""
    return [path.removeprefix(top) for path in paths if path == top or path.startswith(f"{top}.")]


def _has_match(frame: FramePlan) -> bool:
    """Whether the policy has found something that it names."""
    policy, partition = frame.policy, frame.plan.partition
    return policy.has_match(partition) if isinstance(policy, SelectsByName) else len(partition) > 0
