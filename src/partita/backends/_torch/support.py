"""Which operators a trace with fake tensors supports, and which random operators it would change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.compile_context import WrongWhenTraced, drops_all
from partita._torch.operator_schemas import is_higher_order, is_of_other_library, signatures_of
from partita.analysis.effects.calls import CallEffects
from partita.backends._torch.fake_inputs import mode_of
from partita.errors import BackendError

log = logging.getLogger(__name__)


#: Whether Inductor keeps the order of random operators by itself.
_KEEPS_ORDER = torch.__version__ >= "2.13"


class RandomOperators(NamedTuple):
    """The random operators of a body, as far as Inductor treats them otherwise than eager mode."""

    #: Whether there are any, or may be.
    any: bool = False
    #: Whether `torch.bernoulli(probabilities)` runs on a GPU: Inductor generates other numbers for it there.
    bernoulli_on_gpu: bool = False

    @property
    def options(self) -> dict[str, object]:
        """Options that switch off most of what moves them past each other in Inductor before torch 2.13."""
        return {} if _KEEPS_ORDER or not self.any else {"reorder_for_locality": False, "reorder_for_peak_memory": False}


def check_random_operators(body: GraphModule, inputs: Sequence[Any]) -> RandomOperators:
    """Raises where a trace of `body` would place random numbers otherwise than eager mode, or lose dropout.

    Functionalization (torch 2.13) makes `x.bernoulli_()` a new tensor that is filled and then copied. Where `x` is not
    contiguous, the same random numbers end up in other places, and the result may have other strides.
    """
    from torch._dispatch.python import enable_python_dispatcher

    if not _may_use_rng(body):
        return RandomOperators()
    mode, order = mode_of(inputs), _RandomOrderCheck()
    own = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    try:
        with (
            mode.shape_env.ignore_fresh_unbacked_symbols(),
            mode,
            enable_python_dispatcher(),
            torch.no_grad(),
            order,
            WrongWhenTraced(),
        ):
            Interpreter(body).run(*own)
    except BackendError:
        raise
    except Exception as error:
        log.debug("the random operators of a body cannot be checked: %s", error)
    return RandomOperators(any=True, bernoulli_on_gpu=order.has_bernoulli_on_gpu)


def is_random(target: Any) -> bool:
    """Whether an operator uses random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _may_use_rng(body: GraphModule) -> bool:
    """Whether a body uses the RNG, or calls operators of other libraries, which need not declare it, at any depth."""
    if any(effects.uses_rng for effects in CallEffects(body).effectful.values()):
        return True
    targets = {node.target for node in body.graph.nodes if node.op == "call_function"}
    return any(is_higher_order(target) or any(map(is_of_other_library, signatures_of(target))) for target in targets)


class _RandomOrderCheck(TorchDispatchMode):
    """Raises at random operators on non-contiguous tensors whose results a trace would change."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_bernoulli_on_gpu = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        reason = _reason_to_refuse(func) if is_random(func) else None
        if reason is not None:
            for value in (*args, *named.values()):
                if isinstance(value, Tensor) and not value.is_contiguous():
                    raise BackendError(f"it generates random numbers for a tensor that is not contiguous, and {reason}")
        if func is torch.ops.aten.bernoulli.default and args[0].device.type != "cpu":
            self.has_bernoulli_on_gpu = True
        if func is torch.ops.aten.native_dropout.default and drops_all(args[1]):
            raise BackendError("it drops everything, for which a trace generates random numbers and eager mode none")
        return func(*args, **named)


def _reason_to_refuse(func: Any) -> str | None:
    if func._schema.is_mutable:
        return "a trace would generate them in another order"
    # Inductor asserts the strides at each call.
    return "fake tensors (torch 2.13) have other strides" if func._schema.name in _WRONG_STRIDES else None


_WRONG_STRIDES = frozenset(("aten::_standard_gamma", "aten::normal", "aten::poisson"))


def is_operator(target: Any) -> bool:
    """Whether `target` is one overload of an operator."""
    return isinstance(target, OpOverload)


def name_of_operator(target: Any) -> tuple[str, str]:
    """The namespace and the name of an operator, without its overload."""
    if isinstance(target, HigherOrderOperator):
        return target.namespace or "", target.name()
    namespace, _, name = target._schema.name.partition("::")
    return namespace, name


def has_meta_kernel(target: OpOverload) -> bool:
    """Whether the result shapes of `target` can be computed from shapes alone, or by its decomposition."""
    from torch._library.utils import has_fake_kernel
    from torch._subclasses.fake_impls import op_implementations_dict

    if has_fake_kernel(target) or target in op_implementations_dict:
        return True
    # Beside those of the dispatcher, torch registers kernels in Python.
    is_composite = target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeExplicitAutogradNonFunctional)
    return is_composite or torch.DispatchKey.Meta in target.py_kernels


def size_depends_on_data(target: OpOverload) -> bool:
    """Whether the result sizes of `target` may depend on the values of its arguments."""
    return torch.Tag.dynamic_output_shape in target.tags


def value_depends_on_data(target: OpOverload) -> bool:
    """Whether `target` returns a Python value that no trace can know."""
    return torch.Tag.data_dependent_output in target.tags
