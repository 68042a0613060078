"""Mode queries of the model, and what depends on the caller."""

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

__all__ = ["GradSwitch", "GradTrace", "ask_for_callers_grad", "mode_query_patches"]


# The caller's grad mode, where a model has read it and sets it again later.
#
# A trace has only the value in its hands, a plain True. What is off in a trace with gradients off is the caller's.


@final
@dataclass(frozen=True, slots=True)
class GradSwitch:
    """A toggle that switches gradients on: where its graph is in the module, and which node it is there."""

    path: str
    place: int


@final
@dataclass(slots=True)
class GradTrace:
    """Whether gradients were on at each operator of a traced graph and of its bodies."""

    grads: list[bool | None] = field(default_factory=list)
    #: By switch: the number of the first operator that it holds for.
    holds_for: dict[GradSwitch, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph_module: GraphModule, seen: Mapping[Node, Seen]) -> GradTrace:
        """What a trace has shown; operators that torch has added afterwards were not seen."""
        trace = cls()
        for path, graph in _graphs(graph_module):
            in_force = _InForce(path)
            for place, node in enumerate(graph.nodes):
                if not in_force.take(node, place) and node in seen:
                    if in_force.switch is not None:
                        trace.holds_for.setdefault(in_force.switch, len(trace.grads))
                    trace.grads.append(seen[node].grad)
        return trace


class _InForce:
    """The switch that a place of a graph owes it to that gradients are on, also by way of blocks that put them back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.switch: GradSwitch | None = None
        self.before: dict[Any, GradSwitch | None] = {}

    def take(self, node: Node, place: int) -> bool:
        """Takes note of a node; whether it is a toggle."""
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


def ask_for_callers_grad(graph_module: GraphModule, switches: Iterable[GradSwitch]) -> None:
    """Makes toggles set what the grad mode was at the start of their graph, in place of a constant."""
    graphs = dict(_graphs(graph_module))
    nodes = {path: list(graph.nodes) for path, graph in graphs.items()}
    asked: dict[str, Node] = {}
    for switch in switches:
        if switch.path not in asked:
            asked[switch.path] = _ask_first(graphs[switch.path])
        nodes[switch.path][switch.place].args = (asked[switch.path],)


def _graphs(graph_module: GraphModule) -> list[tuple[str, Graph]]:
    modules = graph_module.named_modules()
    return [(path, module.graph) for path, module in modules if isinstance(module, GraphModule)]


def _ask_first(graph: Graph) -> Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        asked = graph.call_function(toggles.IS_GRAD_ENABLED)
    asked.meta["val"] = None
    return asked


# Questions for the modes in force that a model asks while it is traced, which it may be told one thing or another on.
#
# Torch's own code asks as well, all the time, and gets the plain truth.


#: From the recorder, what is true, and the arguments of the question, to what the model is told.
_Answer: TypeAlias = Callable[..., Any]

#: The names of devices in questions that are for one device only.
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "ipu": "ipu", "xla": "xla"}


#: Where Dynamo calls functions in the place of a model, the body of an operator, that it traces.
_ASKS_FOR_A_MODEL = "torch._dynamo.variables.functions"


def mode_query_patches() -> list[Patch]:
    """The functions that a model asks for modes by: in torch, and under whatever name a module has imported them."""
    asked = {id(original): _asked(original, answer) for original, answer in _questions()}
    patches: list[Patch] = []
    for module in _who_may_ask():
        names = dict(getattr(module, "__dict__", {}))
        if not asked.keys().isdisjoint(map(id, names.values())):
            patches += [Patch(module, name, asked[id(value)]) for name, value in names.items() if id(value) in asked]
    return patches


def _who_may_ask() -> Iterator[Any]:
    """The modules in whose names a model finds a question. Torch's other modules ask for themselves."""
    yield from (torch, torch._C)
    yield from (module for name, module in [*sys.modules.items()] if not _is_torchs_own(name))


def _questions() -> Iterator[tuple[Callable[..., Any], _Answer]]:
    for name, answer in _ANSWERS.items():
        yield getattr(torch._C, name), answer
    for name, device in _DEVICES.items():
        for question, answer in (
            (f"is_autocast_{name}_enabled", _answer_autocast),
            (f"get_autocast_{name}_dtype", _answer_dtype),
        ):
            if hasattr(torch._C, question):
                yield getattr(torch._C, question), _for_device(answer, device)


def _for_device(answer: _Answer, device: str) -> _Answer:
    return lambda recorder, truth: answer(recorder, truth, device)


def _asked(original: Callable[..., Any], answer: _Answer) -> Callable[..., Any]:
    @wraps(original)
    def question(*args: Any, **kwargs: Any) -> Any:
        truth = original(*args, **kwargs)
        recorder = _recorder_for(sys._getframe(1).f_globals.get("__name__"))
        return truth if recorder is None else answer(recorder, truth, *args, **kwargs)

    # Dynamo, which traces the bodies of some operators, calls it then and there, as it does with torch's own.
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return question


def _recorder_for(asker: object) -> Recorder | None:
    """The recorder that answers a module of this name; None if the answer is the plain truth."""
    if asker == _ASKS_FOR_A_MODEL:
        return current_recorder()
    return None if _is_torchs_own(asker) else listening_recorder()


def _is_torchs_own(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "partita")


def _answer_grad(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    recorder.asks_for_grad = True
    return truth


def _answer_inference(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    return recorder.open_inference[-1] if recorder.open_inference else truth


def _answer_autocast(recorder: Recorder, truth: bool, device_type: str = "cuda") -> bool:  # noqa: FBT001
    # A trace begins without autocast: where it is on, a block of the model has switched it on.
    if truth or recorder.open_autocasts[torch.device(device_type).type]:
        return truth
    recorder.asks_for_autocast = True
    return recorder.says_autocast


def _answer_any_autocast(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    if truth:
        return truth
    recorder.asks_for_autocast = True
    return recorder.says_autocast


def _answer_dtype(recorder: Recorder, truth: torch.dtype, device_type: str) -> torch.dtype:
    if recorder.open_autocasts[torch.device(device_type).type]:
        return truth
    recorder.asks_for_autocast = True
    if not recorder.says_autocast:
        return truth
    return torch.float16 if truth is torch.bfloat16 else torch.bfloat16


def _answer_cache(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    # What is true is what the tracer has set. A caller who has switched nothing has the cache on.
    recorder.asks_for_autocast = True
    return not recorder.says_autocast


_ANSWERS: Mapping[str, _Answer] = {
    "is_grad_enabled": _answer_grad,
    "is_inference_mode_enabled": _answer_inference,
    "is_autocast_enabled": _answer_autocast,
    "_is_any_autocast_enabled": _answer_any_autocast,
    "get_autocast_dtype": _answer_dtype,
    "is_autocast_cache_enabled": _answer_cache,
}
