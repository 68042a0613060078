"""Compiles the blocks of a decoder one by one inside torch.compile, and trains it.

python examples/compile_blocks.py            # regions go to AOTAutograd, without code generation
python examples/compile_blocks.py inductor   # regions go to Inductor
"""

from __future__ import annotations

import copy
import sys

import torch
from model import Decoder, some_ids

from partita.policies import ByModule
from partita.torch_compile.backend import backend


def main(inner: str) -> None:
    torch.manual_seed(0)
    model, ids = Decoder(layers=2), some_ids()
    twin = copy.deepcopy(model)
    options = {"policy": ByModule("blocks.*"), "inner": inner}
    # Where Partita is installed, `backend="partita"` says the same.
    compiled = torch.compile(model, backend=backend, options=options)

    losses = []
    for call, parameters in ((compiled, model.parameters()), (twin, twin.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(call(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    print(f"loss after three steps: {losses[0]:.4f} compiled block by block, {losses[1]:.4f} in eager mode")
    assert abs(losses[0] - losses[1]) < 1e-4


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "aot_eager")
