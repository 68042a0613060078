"""What a trace with fake tensors knows of an operator: whether it can run it without data."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["has_meta_kernel", "is_operator", "name_of_operator", "size_depends_on_data", "value_depends_on_data"]


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
