"""Tables that torch fills once, by looking functions up by name: filled before a capture swaps any of these.

Else torch would keep a stand-in for the rest of the process, and Dynamo would no longer know the function itself.
"""

from __future__ import annotations

__all__ = ["fill_tables"]


def fill_tables() -> None:
    """Fills the tables of Dynamo, which every export imports, and those of functions that can be overridden."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.overrides import get_ignored_functions, get_overridable_functions

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    get_ignored_functions()
    get_overridable_functions()
