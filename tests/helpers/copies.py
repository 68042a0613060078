"""Three ways to copy a graph module: deepcopy, a pickle, and a file of torch.save."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

Copy = Callable[[GraphModule], GraphModule]


def saved_and_loaded(module: GraphModule) -> GraphModule:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: GraphModule = torch.load(file, weights_only=False)
    return loaded


COPIES: list[Copy] = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded]
copies = pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
