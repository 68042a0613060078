"""Which operators and draws a fake trace handles faithfully."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.operators.schemas import is_higher_order
from partita.backends._torch.compile_context import LostDropout, drops_all
from partita.backends._torch.fake_inputs import mode_of
from partita.errors import BackendError

__all__ = [
    "check_draws",
    "has_meta_kernel",
    "is_operator",
    "name_of_operator",
    "size_depends_on_data",
    "value_depends_on_data",
]


# Draws that a trace would make otherwise than plain torch: into tensors that are not contiguous, or not at all.
#
# Functionalization (torch 2.13) makes `x.bernoulli_()` a new tensor that is filled and then copied. Where `x` is
# transposed or has gaps, the same random numbers come to lie in other places, and the result may have other strides.


log = logging.getLogger(__name__)


def check_draws(body: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises where `body`, run on these fake inputs, draws into a tensor that is not contiguous, or loses dropout."""
    from torch._dispatch.python import enable_python_dispatcher

    if not any(map(_may_draw, body.graph.nodes)):
        return
    mode, order = mode_of(inputs), _Order()  # type: ignore[no-untyped-call]
    own = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    try:
        with (
            mode.shape_env.ignore_fresh_unbacked_symbols(),
            mode,
            enable_python_dispatcher(),
            torch.no_grad(),
            order,
            LostDropout(),
        ):
            Interpreter(body).run(*own)
    except BackendError:
        raise
    except Exception as error:
        log.debug("whether the body draws in order cannot be told: %s", error)


def _is_seeded(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _may_draw(node: Node) -> bool:
    if node.op == "call_module" or is_higher_order(node.target):
        return True
    if isinstance(node.target, torch._ops.OpOverload) and _is_seeded(node.target):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and _DRAWING.search(name) is not None


_DRAWING = re.compile(
    "attention|bernoulli|cauchy|dropout|exponential|gamma|geometric|gru|normal|poisson|rand|rnn|rrelu|uniform"
)


class _Order(TorchDispatchMode):
    """Lets nobody draw into a tensor that is not contiguous, or for one where that goes wrong."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        reason = _reason_against(func) if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) else None
        if reason is not None:
            for value in (*args, *given.values()):
                if isinstance(value, Tensor) and not value.is_contiguous():
                    raise BackendError(f"it draws for a tensor that is not contiguous, and {reason}")
        if func is torch.ops.aten.native_dropout.default and drops_all(args[1]):
            raise BackendError("it drops everything, for which a trace draws random numbers and plain torch none")
        return func(*args, **given)


def _reason_against(func: Any) -> str | None:
    if func._schema.is_mutable:
        return "a trace would draw in another order"
    # Inductor asserts the strides at each call.
    return "fake tensors (torch 2.13) have other strides" if func._schema.name in _MISTAKEN else None


_MISTAKEN = frozenset(("aten::_standard_gamma", "aten::normal", "aten::poisson"))


# What a trace with fake tensors knows of an operator: whether it can run it without data.


def is_operator(target: Any) -> bool:
    """Whether `target` is one overload of an operator."""
    return isinstance(target, OpOverload)


def name_of_operator(target: Any) -> tuple[str, str]:
    """The namespace and the name of an operator, its overload left out."""
    if isinstance(target, HigherOrderOperator):
        return target.namespace or "", target.name()
    namespace, _, name = target._schema.name.partition("::")
    return namespace, name


def has_meta_kernel(target: OpOverload) -> bool:
    """Whether the shapes of what `target` gives can be computed from shapes alone, or by what it is made of."""
    name = target.name()
    if _lacks_fake_function(target, name):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in _KEYS) or _is_known_otherwise(target, name)


def size_depends_on_data(target: OpOverload) -> bool:
    """Whether how much `target` gives may depend on the values that it is given."""
    return torch.Tag.dynamic_output_shape in target.tags


def value_depends_on_data(target: OpOverload) -> bool:
    """Whether `target` gives Python a value that no trace can know."""
    return torch.Tag.data_dependent_output in target.tags


def _lacks_fake_function(target: OpOverload, name: str) -> bool:
    """Whether it was made by `torch.library.custom_op`, which has a Meta kernel for everything, if only to complain."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.utils import can_generate_trivial_fake_impl

    definition = OPDEFS.get(name)
    return definition is not None and definition._abstract_fn is None and not can_generate_trivial_fake_impl(target)


def _is_known_otherwise(target: OpOverload, name: str) -> bool:
    from torch._decomp import decomposition_table
    from torch._library.simple_registry import singleton
    from torch._subclasses.fake_impls import op_implementations_dict

    if target in op_implementations_dict or target in decomposition_table:
        return True
    return singleton.find(name).fake_impl.kernel is not None


_KEYS = (
    "Meta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
