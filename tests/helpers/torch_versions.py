"""What older versions of torch cannot do, so that tests which need it are left out there."""

from __future__ import annotations

import pytest
import torch
import torch.fx.passes.split_module as splitting

#: Before torch 2.13, which has opaque objects and saves more kinds of programs.
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

NEEDS_SPLIT_MODULE_SIMPLE = pytest.mark.skipif(
    not hasattr(splitting, "split_module_simple"), reason="torch 2.11 has no split_module_simple to compare with"
)
KEEPS_UNREAD_OPERATORS = pytest.mark.skipif(
    IS_OLD, reason="dead-code elimination of torch 2.11 deletes torch's own mode operators that only write"
)
TRACES_HOOKS = pytest.mark.skipif(
    IS_OLD,
    reason="Dynamo of torch 2.11 applies hooks only to later uses, by backend='eager' too, and fails where one reads",
)
HAS_CONTEXT_OF_BACKWARD = pytest.mark.skipif(
    IS_OLD, reason="autograd of torch 2.11 takes no context variables of its caller to a backward"
)
