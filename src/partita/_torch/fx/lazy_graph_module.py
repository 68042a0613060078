"""Graph modules that generate their Python code on the first call, and pickle as data."""

from __future__ import annotations

import copy
import copyreg
import functools
import importlib
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.fx.graph
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from partita._torch.functorch import Entered, close_dual_level, entered_by, entered_by_any, is_dual_level_open
from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.gc_pause import gc_paused
from partita._torch.modes import read_ambient, restore_after_error
from partita._torch.nn_modules import has_fleeting_hooks
from partita._torch.operator_schemas import WRAP_WITH_SET_GRAD_ENABLED, flattens_inputs
from partita.errors import CaptureError, MissingTargetError, NotPicklableError

# Boxed calls, as by AOTAutograd: a graph takes its inputs in one list, which it clears, so that each input can be freed
# after its last use.


#: torch 2.11 may not have it; graphs then take their inputs one by one, which AOTAutograd supports as well.
_BoxedCodeGen: Any = getattr(torch.fx.graph, "_BoxedCodeGen", None)


def take_inputs_in_a_list(graph: Graph) -> None:
    """Lets a plain graph be called with one list of its inputs, too; other graphs keep their calling convention."""
    inputs = graph.find_nodes(op="placeholder")
    is_plain = not flattens_inputs(graph)
    if _BoxedCodeGen is not None and is_plain and not any(node.args or str(node.target)[0] == "*" for node in inputs):
        graph.set_codegen(_ListOrInputs())


class _ListOrInputs(_BoxedCodeGen or torch.fx.graph.CodeGen):  # type: ignore[misc]
    """Unlike torch's boxed code, it also takes the inputs one by one, as in a call by hand."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [text.partition(":")[0].partition("=")[0].strip() for text in free_vars if text != "self"]
        lines = [f"def forward(self, *given_){maybe_return_annotation}:"]
        if names:
            lines += [
                "    given_ = given_[0] if len(given_) == 1 and type(given_[0]) is list else list(given_)",
                f"    [{', '.join(names)}] = given_",
                "    given_.clear()",
            ]
        return "\n".join(lines)


# Lazy graph modules.


# The specification of a leaf is an instance of a class that torch 2.13 deprecates, so that every copy and pickle of a
# module with one would warn. Reduced to a call of `treespec_leaf`, it is equal and does not warn.
copyreg.pickle(type(pytree.treespec_leaf()), lambda leaf: (pytree.treespec_leaf, ()))

#: Two threads that call one module for the first time must not both install its code.
_CODE_LOCK = threading.RLock()


class LazyModule(_LazyGraphModule):
    """A graph module whose code is generated on the first call, and that keeps its graph when pickled or copied.

    torch's own graph modules are pickled as source text and traced again on load, which executes and drops every node
    without a tensor input (mode toggles, random numbers, constants). This one stores the nodes, also of torch's graph
    modules directly in it, such as the branches of a `cond`; these are lazy modules when they are loaded.
    """

    #: Whether the graph switches modes and must restore them when a node in it raises.
    _restores_modes: bool
    #: Whether the graph ends in the grad mode that its caller is assumed to have; a call restores the real one.
    _restores_grad: bool
    #: The levels of transforms that the graph and its parts enter, once there is code.
    _entered = Entered(transform=False, dual_level=False)

    @property
    def __call__(self) -> Any:  # type: ignore[override]
        """Generates the code, then is the `__call__` of any module.

        torch's lazy modules generate code inside `forward`, after the hooks have run, and so run them twice. This way
        the code exists before `forward` is looked up, as Dynamo requires.
        """
        self.real_recompile()
        return types.MethodType(type(self).__call__, self)

    def train(self, mode: bool = True) -> LazyModule:  # noqa: FBT001, FBT002  The signature is torch's.
        """Sets the training flag; refused for another flag than the one that the model was captured with."""
        fixed = self.meta.get(TRAINING)
        if fixed is not None and fixed is not mode:
            raise CaptureError(_fixed_training(fixed, mode=mode))
        super().train(mode)
        return self

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    def _real_recompile(self) -> Any:
        cls: Any = type(self)
        # What torch installs calls the `__call__` of the class, or else the inherited one, which is the property here.
        cls.__call__ = _call_as_module
        code = super()._real_recompile()
        # The code calls the parts, which need theirs; parts that were compiled are no longer lazy modules.
        for child in self.children():
            if isinstance(child, LazyModule):
                child.real_recompile()
        inner = [child for child in self.children() if isinstance(child, GraphModule)]
        entered = [child._entered if isinstance(child, LazyModule) else entered_by(child.graph) for child in inner]
        cls._entered = entered_by_any([entered_by(self.graph), *entered])
        leaves_modes = self.graph.find_nodes(op="call_function", target=WRAP_WITH_SET_GRAD_ENABLED, sort=False)
        if self.__dict__.get("_restores_modes") or leaves_modes or any(cls._entered):
            keeps_grad = bool(self.__dict__.get("_restores_grad"))
            cls.forward = _keep_modes(cls.forward, grad=keeps_grad, dual_level=cls._entered.dual_level)
        if self.__dict__.get("_is_part"):
            # The wrapper that shows the failing line of generated code is around the outer module already.
            cls.__call__ = _call_as_module
        return code

    def recompile(self) -> Any:  # type: ignore[override]
        """Regenerates existing code of the body of an operator at once: Dynamo cannot trace the generation of code."""
        waits = self._needs_recompile() or not is_exempt_from_dce(self._graph)
        return super().recompile() if waits else self._real_recompile()

    def real_recompile(self) -> None:
        with _CODE_LOCK, gc_paused():
            super().real_recompile()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyModule:
        graph: Any = Graph(tracer_cls=self._graph._tracer_cls)
        copied = _blank(type(self).__name__)
        memo[id(self)] = copied
        values: dict[Any, Any] = {}
        output = graph.graph_copy(self._graph, values, return_output_node=True)
        if output is not None:
            value, old_output = output
            new_output = graph.output(value, type_expr=getattr(old_output, "type", None))
            new_output.meta = copy.copy(old_output.meta)
        graph.set_codegen(copy.copy(self._graph._codegen))
        if is_exempt_from_dce(self._graph):
            exempt_from_dce(graph)
        shared = {"meta": copy.copy(self.meta), "shape_env": self.shape_env}
        state = {key: value for key, value in self.__dict__.items() if key != "_graph" and key not in shared}
        copied.__dict__.update(copy.deepcopy(state, memo), **shared)
        _adopt(copied, graph)
        if not self._needs_recompile():
            # A copy of a module that Dynamo can trace must be traceable too.
            copied.real_recompile()
        return copied


#: In the metadata of a captured module: the training flag that its operators were recorded with, or a text where the
#: modules of the model had different ones or that is unknown.
TRAINING = "partita_training"


def _fixed_training(fixed: object, *, mode: bool) -> str:
    """Why a module cannot be set to training, or to evaluation."""
    names = {True: "in training mode", False: "in evaluation mode"}
    recorded = f"captured {names[fixed]}" if isinstance(fixed, bool) else str(fixed)
    return (
        f"this module cannot be put {names[mode]}: it was {recorded}, and the operators for that are in its graph. Set "
        f"the model with .{'train' if mode else 'eval'}() before you capture it; for both, capture it twice and "
        "combine the modules with partita.TrainEval(train, evaluation)"
    )


def lazy_module(
    graph: Graph,
    *,
    training: bool,
    restores_modes: bool = False,
    restores_grad: bool = False,
    is_impure: bool = False,
    is_part: bool = False,
) -> LazyModule:
    """A module without state that runs `graph`; register the attributes that its nodes refer to before a call."""
    module = _blank("GraphModule")
    module.__dict__.update(blank_attributes())
    module.__dict__.update(
        training=training,
        meta={},
        shape_env=None,
        _tracer_cls=_lasting(graph._tracer_cls),
        _replace_hooks=[],
        _create_node_hooks=[],
        _erase_node_hooks=[],
        _deepcopy_hooks=[],
        # `Graph.eliminate_dead_code` reads this attribute: without it a call that only has side effects is deleted.
        _is_impure=is_impure,
        _restores_modes=restores_modes,
        _restores_grad=restores_grad,
        _is_part=is_part,
    )
    _adopt(module, graph)
    return module


def generate_code(attributes: Iterable[object]) -> None:
    """Generates the code of all lazy modules among `attributes` and inside them, without calling any."""
    for attribute in attributes:
        for module in attribute.modules() if isinstance(attribute, nn.Module) else ():
            if isinstance(module, LazyModule):
                module.real_recompile()


def make_lazy_again(module: nn.Module) -> None:
    """Restores the class of lazy modules, which torch's GraphPickler turns into plain graph modules without code.

    It ignores the `__reduce__` of graph modules (torch 2.13).
    """
    for each in module.modules():
        if type(each).forward is nn.Module.forward and "_restores_modes" in each.__dict__:
            each.__class__ = _lazy_class(type(each).__name__)


def _blank(class_name: str) -> LazyModule:
    return object.__new__(_lazy_class(class_name))


def _lazy_class(name: str) -> type[LazyModule]:
    """A class for one module, which will hold its code."""
    cls = type("GraphModuleImpl", (LazyModule,), {"forward": LazyModule._lazy_forward})
    cls.__name__ = name
    return cls


def _call_as_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__`, looked up at each call, since tracers patch it."""
    return nn.Module.__call__(module, *args, **kwargs)


def _adopt(module: LazyModule, graph: Graph) -> None:
    module.__dict__["_graph"] = graph
    graph.owning_module = module


def _reduced(module: GraphModule) -> tuple[Any, ...]:
    """What a pickle stores of a graph module."""
    if has_fleeting_hooks(module):
        raise NotPicklableError(
            "this program was made of ExportedProgram.module(), whose hooks are functions without a name that another "
            "process could import them by; make it of the exported program, Program.of(exported), or copy the module "
            "with copy.deepcopy"
        )
    state = {key: value for key, value in module.__dict__.items() if key not in _GENERATED}
    parts: dict[Any, Any] = {
        part: _AsData(part) for part in module.children() if isinstance(part, GraphModule) and _is_torchs(part)
    }
    # State of a live trace has no meaning in another process, and does not pickle.
    state |= {
        "shape_env": None,
        "meta": {key: value for key, value in module.meta.items() if is_plain(value)},
        "_tracer_cls": _lasting(module.__dict__.get("_tracer_cls")),
        "_modules": {name: parts.get(part, part) for name, part in module._modules.items()},
    }
    return _unpickle, (type(module).__name__, state, record_of_graph(module.graph))


#: The graph, which is stored as a record, and what torch generates from it.
_GENERATED = ("_graph", "_code", "_lineno_map", "_prologue_start")


@dataclass(frozen=True, slots=True, eq=False)
class _AsData:
    """Pickles a graph module of torch as data, too."""

    module: GraphModule

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self.module)


def _is_torchs(module: GraphModule) -> bool:
    """Whether torch would pickle it as source text; a subclass with its own way may store more."""
    return type(module).__reduce__ in (GraphModule.__reduce__, _LazyGraphModule.__reduce__)


def _unpickle(class_name: str, state: dict[str, Any], record: Any) -> LazyModule:
    module = _blank(class_name)
    module.__dict__.update(state)
    _adopt(module, graph_from_record(record))
    return module


class _RestoringModule(GraphModule):
    """A graph module of torch that leaves the transforms that it entered when a node raises."""

    def recompile(self) -> Any:
        code, cls = super().recompile(), type(self)
        cls.forward = _keep_modes(cls.forward, grad=False, dual_level=_entered_in(self).dual_level)
        return code


def restore_levels(module: GraphModule) -> None:
    """Lets a module of torch, and its copies, leave the transforms that its graphs enter when a node raises."""
    if any(_entered_in(module)):
        # Each graph module has a class of its own, below the one that it was made from.
        own, made_from = type(module), type(module).__bases__[0]
        own.__bases__ = (type(made_from)("_RestoringModule", (_RestoringModule, made_from), {}),)
        module.recompile()


def _entered_in(module: nn.Module) -> Entered:
    return entered_by_any(entered_by(inner.graph) for inner in module.modules() if isinstance(inner, GraphModule))


def _keep_modes(forward: Callable[..., Any], *, grad: bool, dual_level: bool) -> Callable[..., Any]:
    """`forward` that restores the modes when it raises, and with `grad` the grad mode in any case.

    With `dual_level`, the level of forward-mode AD is one of them.
    """

    @functools.wraps(forward)
    def forward_keeping_modes(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run(self, *args, **kwargs)
        ambient, had_dual_level = read_ambient(), dual_level and is_dual_level_open()
        try:
            return run(self, *args, **kwargs)
        except BaseException as error:
            restore_after_error(ambient, error)
            if dual_level and not had_dual_level:
                close_dual_level()
            raise

    def keep_grad(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = torch.is_grad_enabled()
        result = forward(self, *args, **kwargs)
        if torch.is_grad_enabled() is not found:
            torch._C._set_grad_enabled(found)
        return result

    run = keep_grad if grad else forward
    return forward_keeping_modes


# Empty modules, made without `nn.Module.__init__`, which costs more than everything else about a part.


def blank_module(*, training: bool) -> nn.Module:
    """The same as `nn.Module()`."""
    module = nn.Module.__new__(nn.Module)
    module.__dict__.update(blank_attributes(), training=training)
    return module


def blank_attributes() -> dict[str, Any]:
    """The attributes of a fresh module, in tables of its own."""
    return {name: value.copy() if name in _TABLES else value for name, value in _TEMPLATE.items()}


_TEMPLATE = dict(nn.Module().__dict__)
_TABLES = frozenset(name for name, value in _TEMPLATE.items() if hasattr(value, "copy"))


# A graph as plain data that can be pickled: every node with its name, target and arguments, without retracing.


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """Rows of (op, target, args, kwargs, name, type, metadata), and the code generator."""

    rows: tuple[tuple[Any, ...], ...]
    codegen: Any
    tracer_cls: Any


@dataclass(frozen=True, slots=True)
class _Reference:
    row: int


@dataclass(frozen=True, slots=True)
class _Operator:
    namespace: str
    name: str
    overload: str | None


@dataclass(frozen=True, slots=True)
class _Builtin:
    module: str
    name: str


#: The classes that a pickled graph consists of.
RECORDS: tuple[type, ...] = (GraphRecord, _Reference, _Operator, _Builtin)


def record_of_graph(graph: Graph) -> GraphRecord:
    """`graph` as data; only plain values of the metadata are kept, since traced tensors do not pickle."""
    references: dict[Node, _Reference] = {}
    rows = []
    for node in graph.nodes:
        _check_has_name(node)
        rows.append(
            (
                node.op,
                _packed_target(node.target),
                _packed(node.args, references),
                _packed(node.kwargs, references),
                node.name,
                node.type,
                {key: value for key, value in node.meta.items() if is_plain(value)},
            )
        )
        references[node] = _Reference(len(references))
    return GraphRecord(tuple(rows), graph._codegen, _lasting(graph._tracer_cls))


def _lasting(tracer: Any) -> Any:
    """A class of tracers, if another process can import it."""
    return None if tracer is None or "<locals>" in tracer.__qualname__ else tracer


def graph_from_record(record: GraphRecord) -> Graph:
    """The graph of a record."""
    writer = GraphWriter(record.tracer_cls)
    writer.names.reserve(row[4] for row in record.rows)
    nodes: list[Node] = []
    for op, target, args, kwargs, name, type_expr, meta in record.rows:
        read, named = _unpacked(args, nodes), _unpacked(kwargs, nodes)
        node = writer.write(op, _unpacked_target(target), read, named, name=name, type_expr=type_expr)
        node.meta.update(meta)
        nodes.append(node)
    graph = writer.close()
    graph.set_codegen(record.codegen)
    return graph


def _packed(argument: Any, references: dict[Node, _Reference]) -> Any:
    """Arguments with references for nodes, in ordinary containers."""

    def packed(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return references[leaf]
        if isinstance(leaf, OpOverload | OpOverloadPacket | HigherOrderOperator | BuiltinFunctionType):
            return _packed_target(leaf)
        if isinstance(leaf, torch.memory_format | torch.layout):
            return _Builtin("torch", str(leaf).removeprefix("torch."))
        return leaf

    return _with_leaves(argument, packed)


def _unpacked(argument: Any, nodes: list[Node]) -> Any:
    def unpacked(leaf: Any) -> Any:
        if isinstance(leaf, _Reference):
            return nodes[leaf.row]
        return _unpacked_target(leaf) if isinstance(leaf, _Operator | _Builtin) else leaf

    return _with_leaves(argument, unpacked)


def _with_leaves(argument: Any, change: Callable[[Any], Any]) -> Any:
    """An argument in ordinary containers, with `change(leaf)` for everything in them that is no container."""
    if isinstance(argument, tuple):
        items = [_with_leaves(item, change) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [_with_leaves(item, change) for item in argument]
    if isinstance(argument, dict):
        return {key: _with_leaves(item, change) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_with_leaves(item, change) for item in (argument.start, argument.stop, argument.step)))
    return change(argument)


def _check_has_name(node: Node) -> None:
    """Raises for a function that another process could not find."""
    target = node.target
    if not isinstance(target, FunctionType):
        return
    try:
        found = attrgetter(target.__qualname__)(sys.modules[target.__module__])
    except (AttributeError, KeyError):
        found = None
    if found is not target:
        raise NotPicklableError(
            f"node {node.name!r} calls {target.__module__}.{target.__qualname__}, which has no name that another "
            "process could import it by; call a function of a module, or copy the graph module with copy.deepcopy"
        )


def _packed_target(target: Any) -> Any:
    if isinstance(target, OpOverload):
        name, _, overload = target.name().partition("::")[2].partition(".")
        return _Operator(target.namespace, name, overload or "default")
    if isinstance(target, OpOverloadPacket):
        namespace, _, name = str(target).partition(".")
        return _Operator(namespace, name, None)
    if isinstance(target, HigherOrderOperator):
        # Ours know the module that registers them, which need not be imported yet where the pickle is loaded.
        knows_home = type(target).__reduce__ is not object.__reduce__
        return target if knows_home else _Operator("higher_order", target.name(), None)
    if isinstance(target, BuiltinFunctionType) and isinstance(target.__self__, ModuleType):
        # Older pickle protocols, which torch.save uses, would try to store the module itself.
        return _Builtin(target.__self__.__name__, target.__name__)
    return target


def _unpacked_target(target: Any) -> Any:
    if isinstance(target, _Builtin):
        return attrgetter(target.name)(_module(target.module))
    if not isinstance(target, _Operator):
        return target
    try:
        packet = getattr(getattr(torch.ops, target.namespace), target.name)
        return packet if target.overload is None else getattr(packet, target.overload)
    except AttributeError as error:
        name = ".".join(part for part in (target.name, target.overload) if part)
        raise MissingTargetError(
            f"the operator {target.namespace}::{name} is not registered in this process; import the library that "
            "registers it before you load the module"
        ) from error


def _module(path: str) -> Any:
    """A module by its path; some of torch's are attributes of others and cannot be imported."""
    package, _, rest = path.partition(".")
    module = importlib.import_module(package)
    return sys.modules.get(path) or (attrgetter(rest)(module) if rest else module)


_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device)


def is_plain(value: Any) -> bool:
    """Whether `value` consists of numbers, text and containers of them."""
    if type(value) in _PLAIN or isinstance(value, torch.dtype):
        return True
    if type(value) in (tuple, list, set, frozenset, torch.Size):
        return all(map(is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


# Unused nodes in bodies: torch's dead-code elimination (DCE) recurses into bodies and deletes too much there.


def exempt_from_dce(graph: Graph) -> None:
    """Makes dead-code elimination of the outer graph skip this graph.

    A trace keeps unused random numbers, and unused batch norms that mutate their statistics without an annotation; but
    in the bodies that the traced graph calls they are deleted (torch 2.13).
    """
    graph.eliminate_dead_code = lambda *args, **keywords: False  # type: ignore[method-assign]


def is_exempt_from_dce(graph: Graph) -> bool:
    """Whether a graph was exempted; a copy of it is not."""
    return "eliminate_dead_code" in graph.__dict__
