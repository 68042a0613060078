"""Mode queries of a traced model, such as torch.is_grad_enabled(), and what they reveal about its caller.

`capture` promises a program that follows the modes of its caller, so a query by the model must not return the modes of
the tracer. The queries are functions in C which no TorchFunctionMode sees (torch 2.13), so they have to be patched:
- In `torch` and `torch._C`, and in every module outside torch and partita that has imported one under any name
  (`from torch import is_grad_enabled`). That is why all of `sys.modules` is searched. A query that is stored elsewhere,
  as a default argument or in a closure, is not found, and returns the modes of the tracer.
- By the calling frame: the tracer calls `torch.is_grad_enabled()` through the same attributes, and must get the actual
  mode. Only a call from code outside torch and partita, in the thread that traces, counts as the model's.

The patches exist while `export_recorded` runs, under its lock, and `patched` undoes them whatever happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeAlias, final

import torch
from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita.capture._torch.patching import Patch
from partita.capture._torch.recorder import Recorder, Seen, current_recorder, listening_recorder

#: From the recorder, the actual mode and the arguments of the query, to the answer for the model.
_Answer: TypeAlias = Callable[..., Any]

#: The device types by their names in queries for a single device.
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "ipu": "ipu", "xla": "xla"}

#: The module of Dynamo that calls functions on behalf of a model, where it traces the body of an operator.
_DYNAMO_CALLS_FOR_MODEL = "torch._dynamo.variables.functions"


def mode_query_patches() -> list[Patch]:
    """Patches of all mode queries that a model may call: in torch, and under any name that a module has imported."""
    intercepted = {id(original): _intercepted(original, answer) for original, answer in _intercepted_queries()}
    patches: list[Patch] = []
    # Torch's other modules query for torch itself.
    others = [module for name, module in [*sys.modules.items()] if not _is_own_code(name)]
    for module in (torch, torch._C, *others):
        names = dict(getattr(module, "__dict__", {}))
        if not intercepted.keys().isdisjoint(map(id, names.values())):
            patches += [
                Patch(module, name, intercepted[id(value)]) for name, value in names.items() if id(value) in intercepted
            ]
    return patches


def _intercepted_queries() -> Iterator[tuple[Callable[..., Any], _Answer]]:
    for name, answer in _ANSWERS.items():
        yield getattr(torch._C, name), answer
    for name, device in _DEVICES.items():
        for query, answer in (
            (f"is_autocast_{name}_enabled", _answer_autocast),
            (f"get_autocast_{name}_dtype", _answer_dtype),
        ):
            if hasattr(torch._C, query):
                yield getattr(torch._C, query), _for_device(answer, device)


def _for_device(answer: _Answer, device: str) -> _Answer:
    return lambda recorder, actual: answer(recorder, actual, device)


def _intercepted(original: Callable[..., Any], answer: _Answer) -> Callable[..., Any]:
    @wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        actual = original(*args, **kwargs)
        recorder = _recorder_for(sys._getframe(1).f_globals.get("__name__"))
        return actual if recorder is None else answer(recorder, actual, *args, **kwargs)

    # Dynamo, which traces the bodies of some operators, then evaluates the query at once, as it does torch's own.
    marked: Callable[..., Any] = torch.compiler.assume_constant_result(query)
    return marked


def _recorder_for(calling_module: object) -> Recorder | None:
    """The recorder that answers a query from the module of this name; None if it gets the actual mode."""
    if calling_module == _DYNAMO_CALLS_FOR_MODEL:
        return current_recorder()
    return None if _is_own_code(calling_module) else listening_recorder()


def _is_own_code(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "partita")


def _answer_grad(recorder: Recorder, actual: bool) -> bool:  # noqa: FBT001
    recorder.queries_grad = True
    return actual


def _answer_inference(recorder: Recorder, actual: bool) -> bool:  # noqa: FBT001
    return recorder.open_inference[-1] if recorder.open_inference else actual


def _answer_autocast(recorder: Recorder, actual: bool, device_type: str = "cuda") -> bool:  # noqa: FBT001
    # A trace begins without autocast: where it is on, a block of the model has enabled it.
    if actual or recorder.open_autocasts[torch.device(device_type).type]:
        return actual
    recorder.queries_autocast = True
    return recorder.reports_autocast


def _answer_any_autocast(recorder: Recorder, actual: bool) -> bool:  # noqa: FBT001
    if actual:
        return actual
    recorder.queries_autocast = True
    return recorder.reports_autocast


def _answer_dtype(recorder: Recorder, actual: torch.dtype, device_type: str) -> torch.dtype:
    if recorder.open_autocasts[torch.device(device_type).type]:
        return actual
    recorder.queries_autocast = True
    if not recorder.reports_autocast:
        return actual
    return torch.float16 if actual is torch.bfloat16 else torch.bfloat16


def _answer_cache(recorder: Recorder, actual: bool) -> bool:  # noqa: FBT001
    # The actual value was set by the tracer. By default the cache is enabled.
    recorder.queries_autocast = True
    return not recorder.reports_autocast


_ANSWERS: Mapping[str, _Answer] = {
    "is_grad_enabled": _answer_grad,
    "is_inference_mode_enabled": _answer_inference,
    "is_autocast_enabled": _answer_autocast,
    "_is_any_autocast_enabled": _answer_any_autocast,
    "get_autocast_dtype": _answer_dtype,
    "is_autocast_cache_enabled": _answer_cache,
}


# The caller's grad mode, where a model queries it and sets it again later. A single trace records only the constant
# True. A toggle whose operators run without gradients in a second trace, with gradients off, depends on the caller.


@final
@dataclass(frozen=True, slots=True)
class GradSwitch:
    """A toggle that enables gradients: the path of its graph in the module, and the number of its node there."""

    path: str
    place: int


@final
@dataclass(slots=True)
class GradTrace:
    """Whether gradients were on at each operator of a traced graph and of its bodies."""

    grads: list[bool | None] = field(default_factory=list)
    #: By switch: the number of the first operator that it applies to.
    first_operator: dict[GradSwitch, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph_module: GraphModule, seen: Mapping[Node, Seen]) -> GradTrace:
        """The grad modes that a trace has recorded; operators that torch added afterwards have none."""
        trace = cls()
        for path, graph in _graphs(graph_module):
            active = _ActiveSwitch(path)
            for place, node in enumerate(graph.nodes):
                if not active.update(node, place) and node in seen:
                    if active.switch is not None:
                        trace.first_operator.setdefault(active.switch, len(trace.grads))
                    trace.grads.append(seen[node].grad)
        return trace


class _ActiveSwitch:
    """The switch that has enabled gradients at a place of a graph, directly or by a block that restores it on exit."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.switch: GradSwitch | None = None
        self.before: dict[Any, GradSwitch | None] = {}

    def update(self, node: Node, place: int) -> bool:
        """Steps over a node; returns whether it is a toggle or a query."""
        if node.target in (toggles.IS_GRAD_ENABLED, toggles.ENTER_INFERENCE):
            self.before[node] = self.switch
        if node.target is toggles.ENTER_INFERENCE:
            self.switch = None
        elif node.target is toggles.EXIT_INFERENCE:
            self.switch = self.before.get(node.args[0])
        elif node.target is toggles.SET_GRAD:
            is_literal = node.args[0] is True
            self.switch = GradSwitch(self.path, place) if is_literal else self.before.get(node.args[0])
        return node.target in toggles.TOGGLES or node.target is toggles.IS_GRAD_ENABLED


def follow_callers_grad(graph_module: GraphModule, switches: Iterable[GradSwitch]) -> None:
    """Makes these toggles restore the grad mode at the start of their graph instead of setting a constant."""
    graphs = dict(_graphs(graph_module))
    nodes = {path: list(graph.nodes) for path, graph in graphs.items()}
    queries: dict[str, Node] = {}
    for switch in switches:
        if switch.path not in queries:
            queries[switch.path] = _query_at_start(graphs[switch.path])
        nodes[switch.path][switch.place].args = (queries[switch.path],)


def _graphs(graph_module: GraphModule) -> list[tuple[str, Graph]]:
    modules = graph_module.named_modules()
    return [(path, module.graph) for path, module in modules if isinstance(module, GraphModule)]


def _query_at_start(graph: Graph) -> Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        query = graph.call_function(toggles.IS_GRAD_ENABLED)
    query.meta["val"] = None
    return query
