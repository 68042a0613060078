"""Graph modules that generate their Python code when they are first called, and not before."""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _WrappedCall
from torch.utils import _pytree as pytree

from partita._torch.ambient import read_ambient, restore_after_error
from partita._torch.blank_modules import blank_attributes
from partita._torch.functorch_levels import Entered, close_dual_level, entered_by, entered_by_any, is_dual_level_open
from partita._torch.graph_records import graph_from_record, is_plain, record_of_graph
from partita._torch.pause_gc import gc_paused
from partita._torch.torch_operators import WRAP_WITH_SET_GRAD_ENABLED
from partita._torch.unread_nodes import keep_unread_nodes, keeps_unread_nodes

__all__ = ["LazyModule", "generate_code", "lazy_module", "make_lazy_again", "restore_levels"]

# The specification of a leaf is an instance of a class that torch 2.13 deprecates, so that every copy and pickle of a
# module with one would warn. Copied as what `treespec_leaf` gives, it is the same and says nothing.
copyreg.pickle(type(pytree.treespec_leaf()), lambda leaf: (pytree.treespec_leaf, ()))

#: Two threads that call one module for the first time must not both install its code.
_CODE_LOCK = threading.RLock()


class LazyModule(_LazyGraphModule):
    """A graph module whose code waits for its first call, that keeps its whole graph when pickled or copied.

    torch's own graph modules are pickled as source text and traced again on load, which executes and drops every node
    that has no tensor input (mode toggles, random draws, constants). This one stores the nodes.
    """

    #: Whether the graph switches modes and must put them back when a node in it raises.
    _restores_modes: bool
    #: Whether the graph ends with the grad mode that its caller is taken to have; calling it puts back the real one.
    _restores_grad: bool
    #: The levels of transforms that the graph and its parts start, once there is code.
    _entered = Entered(transform=False, dual_level=False)

    @property
    def __call__(self) -> Any:  # type: ignore[override]
        """Generates the code, then is what any module's `__call__` is.

        torch's lazy modules generate code inside `forward`, after the hooks have run, and so run them twice. This way
        the code is there before anyone asks for `forward`, which is also what Dynamo needs.
        """
        self.real_recompile()
        return types.MethodType(type(self).__call__, self)

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    def _real_recompile(self) -> Any:
        cls: Any = type(self)
        # The code's own `__call__`, installed below, would look for the one above it, which is the property here.
        cls._wrapped_call = _WrappedCall(cls, _call_as_module)
        code = super()._real_recompile()
        # Code that calls parts is about to need theirs; parts that went to a compiler are no lazy modules any more.
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
        """The body of an operator that has code has it again at once: Dynamo can trace code, but not how it is made."""
        waits = self._needs_recompile() or not keeps_unread_nodes(self._graph)
        return super().recompile() if waits else self._real_recompile()

    def real_recompile(self) -> None:
        with _CODE_LOCK, gc_paused():
            super().real_recompile()

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__dict__.items() if key != "_graph"}
        # What a live trace left on the module means nothing in another process, and does not pickle either.
        state |= {"shape_env": None, "meta": {key: value for key, value in self.meta.items() if is_plain(value)}}
        return _unpickle, (type(self).__name__, state, record_of_graph(self._graph))

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
        if keeps_unread_nodes(self._graph):
            keep_unread_nodes(graph)
        shared = {"meta": copy.copy(self.meta), "shape_env": self.shape_env, "_tracer_extras": self._tracer_extras}
        state = {key: value for key, value in self.__dict__.items() if key != "_graph" and key not in shared}
        copied.__dict__.update(copy.deepcopy(state, memo), **shared)
        _adopt(copied, graph)
        if not self._needs_recompile():
            # Whoever copies a module that can be traced can trace the copy.
            copied.real_recompile()
        return copied


def lazy_module(
    graph: Graph,
    *,
    training: bool,
    restores_modes: bool = False,
    restores_grad: bool = False,
    is_impure: bool = False,
    is_part: bool = False,
) -> LazyModule:
    """A module without state that runs `graph`; register what its nodes name before it is called."""
    module = _blank("GraphModule")
    module.__dict__.update(blank_attributes())
    tracer = graph._tracer_cls
    module.__dict__.update(
        training=training,
        meta={},
        shape_env=None,
        _tracer_cls=tracer if tracer is not None and "<locals>" not in tracer.__qualname__ else None,
        _tracer_extras=graph._tracer_extras or {},
        _replace_hooks=[],
        _create_node_hooks=[],
        _erase_node_hooks=[],
        _deepcopy_hooks=[],
        # `Graph.eliminate_dead_code` asks for this name: without it a call that only has effects is deleted.
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
    """Gives lazy modules their class back, which torch's GraphPickler makes plain graph modules without code.

    It reduces every graph module in its own way (torch 2.13), whatever the module says of itself.
    """
    for each in module.modules():
        if type(each).forward is nn.Module.forward and "_restores_modes" in each.__dict__:
            each.__class__ = _lazy_class(type(each).__name__)


def _blank(class_name: str) -> LazyModule:
    return object.__new__(_lazy_class(class_name))


def _lazy_class(name: str) -> type[LazyModule]:
    """A class for one module, into which its code will go."""
    cls = type("GraphModuleImpl", (LazyModule,), {"forward": LazyModule._lazy_forward})
    cls.__name__ = name
    return cls


def _call_as_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What calling any module does; looked up at each call, since tracers put their own function there for a while."""
    return nn.Module.__call__(module, *args, **kwargs)


def _adopt(module: LazyModule, graph: Graph) -> None:
    module.__dict__["_graph"] = graph
    graph.owning_module = module


def _unpickle(class_name: str, state: dict[str, Any], record: Any) -> LazyModule:
    module = _blank(class_name)
    module.__dict__.update(state)
    _adopt(module, graph_from_record(record))
    return module


class _RestoringModule(GraphModule):
    """A graph module of torch whose code leaves the transforms that it entered when a node raises."""

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
