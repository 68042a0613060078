"""BodyOperator, the base of our higher-order operators: dispatch, tracing, pickling and dead-code elimination."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import DispatchKey
from torch._ops import HigherOrderOperator, _compute_keyset, _get_current_dispatch_mode_pre_dispatch
from torch.fx import Graph, Proxy
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import has_side_effect
from torch.overrides import handle_torch_function

from partita._torch.modes import Tracing, tracing_now
from partita.errors import OptionError
from partita.hops._torch.body import KeptCall, run_body, trace_call
from partita.hops._torch.hop_rules import register_with_dynamo

#: Dynamo must not compile the code of this module, which runs around a body after a graph break inside it.
DYNAMO_SKIPS = True


_Operator = TypeVar("_Operator", bound="BodyOperator")
_Result = TypeVar("_Result")


class BodyOperator(HigherOrderOperator):
    """An operator that takes the arguments of its mode, a body, and the arguments of the body.

    A pre-dispatch trace keeps the call, with the body as a subgraph. Everywhere else the body just runs, so that
    autograd, transforms and all other tracers see the operators in it and need no rule for this one.
    """

    #: A call in eager mode does not trace its body, unlike one of `scan` of torch.
    only_runs_body: ClassVar[bool] = True
    #: The names of the arguments up to the body.
    parameters: ClassVar[tuple[str, ...]] = ("body",)
    #: How Dynamo traces a call: "inlined" by its meaning, "wrapped" as a call of a traced body, or as a "checkpoint".
    dynamo_rule = "inlined"

    def __init__(
        self,
        name: str | None = None,
        *,
        cacheable: bool = True,
        home: tuple[str, str] | None = None,
        twin: Any = None,
        **options: Any,
    ) -> None:
        """An operator that torch's table knows as `name`, or by the name of its class, numbered if that is taken.

        `home` is a module and the name that it exports the operator by. `twin` is torch's operator of that name: the
        two are equal, so a search of a graph for calls of one finds those of both.
        """
        self._home, self._twin = home, twin
        named = _free_name(type(self).__name__.lower()) if name is None else name
        super().__init__(named, cacheable=cacheable, **options)  # type: ignore[no-untyped-call]
        self.__doc__ = type(self).__doc__
        self.py_impl(ProxyTorchDispatchMode)(self._keep_call)
        keep_unused_calls(self)
        if home is None:
            register_with_dynamo((self,))

    @property
    def mode_count(self) -> int:
        """How many arguments come before the body."""
        return len(self.parameters) - 1

    def bound(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, those up to the body by position; all other keywords are passed to the body."""
        positional, rest = list(args), dict(keywords)
        for parameter in self.parameters[len(positional) :]:
            if parameter not in rest:
                takes = ", ".join(self.parameters)
                raise OptionError(f"{self._shown()} is called without {parameter!r}; it takes {takes} and more")
            positional.append(rest.pop(parameter))
        return tuple(positional), rest

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Runs a call, or hands it to the tracer that keeps it."""
        args, keywords = self.bound(args, keywords)
        mode, body, operands = args[: self.mode_count], args[self.mode_count], args[self.mode_count + 1 :]
        proxy = _first_proxy((args, keywords))
        if proxy is not None:
            return handle_torch_function(self, (proxy,), *args, **keywords)
        self.check(*mode)
        if not callable(body):
            raise OptionError(
                f"{self._shown()} takes a body to call after {self.mode_count} arguments, not {type(body).__name__!r}; "
                "give it a function or a module"
            )
        if self._is_kept(args, keywords):
            return super().__call__(*args, **keywords)  # type: ignore[no-untyped-call]
        return self.run(mode, body, operands, keywords)

    def __eq__(self, other: object) -> bool:
        return other is self or (self._twin is not None and other is self._twin)

    def __hash__(self) -> int:
        return object.__hash__(self if self._twin is None else self._twin)

    def check(self, *mode: Any) -> None:
        """Raises if these arguments describe no mode."""

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        """The context that the body runs in."""
        return nullcontext()

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        """The function, with the signature of a call, that Dynamo traces in place of one; the context lasts as long."""
        raise NotImplementedError

    def run(self, mode: tuple[Any, ...], body: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of a call that no tracer keeps."""
        return run_body(self.scope(*mode, tracing=tracing_now()), body, operands, keywords)

    def own_keywords(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keywords of the operator, which a kept call has too, and those of the body."""
        return {}, keywords

    def body_metadata(self, body: Any, own: dict[str, Any]) -> dict[str, Any]:
        """Metadata for the traced body of a kept call; keywords that it replaces are removed from `own`."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, self._home or ("torch.ops.higher_order", self.__name__)

    def __repr__(self) -> str:
        return f"<operator {'.'.join(self._home or ('torch.ops.higher_order', self.__name__))}>"

    def _shown(self) -> str:
        return self._home[1] if self._home else self.__name__

    def _is_kept(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a pre-dispatch tracer is the next to handle the call, and no other dispatch key comes before it.

        Under functionalization the body is inlined instead: its mutations must become values of the outer graph.
        """
        if not torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch):
            return False
        if not isinstance(_get_current_dispatch_mode_pre_dispatch(), ProxyTorchDispatchMode):
            return False
        if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python):
            return False
        keys = _compute_keyset(args, keywords, self.non_fallthrough_keys)
        return bool(keys.highestPriorityTypeId() == DispatchKey.PreDispatch)

    def _keep_call(self, tracer: ProxyTorchDispatchMode, /, *args: Any, **keywords: Any) -> Any:
        mode, body, operands = args[: self.mode_count], args[self.mode_count], args[self.mode_count + 1 :]
        own, theirs = self.own_keywords(keywords)
        call = KeptCall(self, mode, own, self.body_metadata(body, own))
        scope = self.scope(*mode, tracing=Tracing.KEPT)
        return trace_call(tracer.tracer, call, body=body, scope=scope, operands=operands, keywords=theirs)


class PlainBodyOperator(BodyOperator):
    """A body operator without a mode: the body comes first, and the call returns what the body returns."""

    @overload
    def __call__(self, body: Callable[..., _Result], /, *operands: Any, **keywords: Any) -> _Result: ...

    @overload
    def __call__(self, /, **keywords: Any) -> Any: ...

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return super().__call__(*args, **keywords)


class SwitchOperator(BodyOperator):
    """A body operator whose mode is one flag."""

    @overload
    def __call__(
        self,
        enabled: bool,  # noqa: FBT001  The signature is that of torch's operator.
        body: Callable[..., _Result],
        /,
        *operands: Any,
        **keywords: Any,
    ) -> _Result: ...

    @overload
    def __call__(self, /, *args: Any, **keywords: Any) -> Any: ...

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return super().__call__(*args, **keywords)


def registered(kind: type[_Operator], name: str, *, home: tuple[str, str], twin: Any = None) -> _Operator:
    """The operator `name`, created once even if its module is reloaded: graphs refer to the first one."""
    known = getattr(torch.ops.higher_order, name, None)
    return cast(_Operator, known) if isinstance(known, BodyOperator) else kind(name, home=home, twin=twin)


def _imported(module: str, name: str) -> Any:
    """Unpickles an operator: imports its module, and returns the operator of this process."""
    if module == "torch.ops.higher_order":
        return getattr(torch.ops.higher_order, name)
    return getattr(importlib.import_module(module), name)


def _free_name(wanted: str) -> str:
    """`wanted`, with a number if an operator has that name already."""
    numbered = (wanted if number == 0 else f"{wanted}_{number}" for number in count())
    return next(name for name in numbered if not hasattr(torch.ops.higher_order, name))


def _first_proxy(value: Any) -> Proxy | None:
    """A proxy of `torch.fx` among the arguments, in any container that a graph can hold."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, tuple | list):
        for item in value:
            found = _first_proxy(item)
            if found is not None:
                return found
    return None


def keep_unused_calls(operator: Any) -> None:
    """Marks an operator as impure, so that `Graph.eliminate_dead_code` keeps unused calls of it.

    torch decides by the operator and not by the call, so calls whose body has no side effects are kept as well.
    """
    has_side_effect(operator)
    if not Graph().call_function(operator).is_impure():
        # torch 2.11 consults that list for functions and plain operators only, but it does consult the registry of
        # effects. Effect tokens are created where an operator is dispatched, which these never are.
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(operator, _EffectType.ORDERED)
