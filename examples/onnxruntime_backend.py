"""ONNX Runtime as a backend: it gets the weights when it compiles, and its functions travel in a file.

python examples/onnxruntime_backend.py
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import onnxruntime
import torch
from model import Decoder, some_ids
from torch import Tensor
from torch.fx import GraphModule, Node

import partita
from partita.backends import AotEager, register_backend
from partita.policies import ByCapability
from partita.treatments import Delegate, Lower

#: It has the tag of random operators, also without dropout.
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class OnnxRuntime:
    """Runs bodies on the CPU, for inference; `threads` of each session, 0 for as many as there are cores."""

    threads: int = 0

    name: ClassVar[str] = "onnxruntime"
    wants_constants: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = False
    tolerance: ClassVar[partita.Tolerance] = partita.Tolerance(relative=1e-3, absolute=1e-4)

    def refusal(self, node: Node) -> str | None:
        """What cannot be traced, mutations and random numbers; what else ONNX lacks, `compile` finds."""
        schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
        if schema is not None and schema.is_mutable:
            return "mutates a tensor"
        drops = node.target is not ATTENTION or (len(node.args) > 4 and node.args[4]) or node.kwargs.get("dropout_p")
        if torch.Tag.nondeterministic_seeded in tags and drops:
            return "random numbers"
        return AotEager().refusal(node)

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Session:
        """A session of the body, whose buffers are the weights."""
        if not all(value.device.type == "cpu" for value in inputs if isinstance(value, Tensor)):
            raise TypeError("only tensors on the CPU")
        stored = io.BytesIO()
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(body, tuple(inputs), dynamo=True, verbose=False).save(stored)
        return Session(stored.getvalue(), self.threads)

    def save(self, compiled: Session) -> bytes:
        """The ONNX file."""
        return compiled.model

    def load(self, data: bytes) -> Session:
        """A session of the ONNX file."""
        return Session(data, self.threads)


class Session:
    """Calls an ONNX model with tensors."""

    def __init__(self, model: bytes, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.model = model
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._names = [one.name for one in self._session.get_inputs()]

    def __call__(self, *inputs: Any) -> list[Tensor]:
        # Numbers are sizes, which the model was compiled for.
        arrays = (value.numpy(force=True) for value in inputs if isinstance(value, Tensor))
        found = self._session.run(None, dict(zip(self._names, arrays, strict=True)))
        return [torch.from_numpy(array) for array in found]


def main() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(layers=2).eval(), some_ids()
    program = partita.capture(model, (ids,))
    plan = partita.plan(program, ByCapability(OnnxRuntime()), Lower(OnnxRuntime(), strict=True))
    print(plan.summary())
    after = plan.apply()
    with torch.no_grad():
        print(partita.verify(program, after, (ids,), gradients=False))

    # The same regions compiled now, as bytes in an exported program: the file holds no weights beside them.
    register_backend(OnnxRuntime())
    delegated = partita.plan(program, ByCapability("onnxruntime"), Delegate("onnxruntime")).apply()
    with TemporaryDirectory() as folder, torch.no_grad():
        torch.export.save(delegated.exported(), f"{folder}/model.pt2")
        loaded = partita.Program.of(f"{folder}/model.pt2", operators=["partita::delegate"])
        assert torch.equal(loaded.module()(ids), after.module()(ids))
    print(f"the same from a file, whose own weights are {sorted(loaded.exported().state_dict)}")


if __name__ == "__main__":
    main()
