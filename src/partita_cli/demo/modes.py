"""Chapter: a model with nested mode blocks is saved, dissolved and run as ONNX, equal in all forms."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

import partita
from partita.policies import ByMode
from partita.treatments import Mode

TITLE = "Nested no_grad and autocast blocks, out and back"


def show() -> bool:
    """Shows the regions as a tree, what torch.export makes of them, and the round trip; returns whether it held."""
    model, args = seeded()
    program = partita.capture(model, args)
    print("a student learns from a frozen teacher, in half precision; its mode regions as a tree:\n")
    print(f"{partita.mode_tree(program)}\n")
    gradients_hold = _show_gradients()

    wrapped = partita.plan(program, ByMode(), Mode()).apply()
    operators = ", ".join(str(node.target) for node in wrapped.operators() if "partita" in str(node.target))
    print(f"\nwrapped:   the outer regions are calls of {operators}")
    file_holds = _show_file(wrapped)
    plain = partita.dissolve(wrapped)
    comparison = partita.compare(model, plain, args)
    print(f"dissolved: {_counted(plain)}; compared with the model: {comparison}")
    return _show_onnx(plain, model, args) and gradients_hold and file_holds and comparison.equal


def _show_gradients() -> bool:
    """The teacher is frozen by a no_grad block inside an autocast block, which torch.export loses."""
    model, args = seeded()
    wanted = _gradient_of_teacher(model, args)
    theirs = _gradient_of_teacher(torch.export.export(model, args).module(), args)
    ours = _gradient_of_teacher(partita.capture(model, args).module(), args)
    print("the gradient of the frozen teacher's weight, summed up")
    print(f"  model            {wanted}")
    print(f"  torch.export     {theirs}   {_verdict(theirs, wanted)}")
    print(f"  partita.capture  {ours}   {_verdict(ours, wanted)}")
    return ours == wanted


def _gradient_of_teacher(module: nn.Module, args: tuple[torch.Tensor, ...]) -> str:
    weight = module.get_parameter("teacher.weight")
    (gradient,) = torch.autograd.grad(module(*args).square().sum(), [weight], allow_unused=True)
    return "none" if gradient is None else f"{gradient.abs().sum().item():.1f}"


def _verdict(found: str, wanted: str) -> str:
    return "same" if found == wanted else "WRONG"


def _show_file(wrapped: partita.Program) -> bool:
    """Saves the program; another process loads it and compares it with the model."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "distilled.pt2")
        torch.export.save(wrapped.exported(), file)
        print(f"saved:     {file.stat().st_size:,} bytes")
        start = perf_counter()
        command = [sys.executable, "-P", "-m", "partita_cli.demo.reload", str(file)]
        loaded = subprocess.run(command, capture_output=True, text=True, check=False, env=same_imports())
    found = loaded.stdout.partition("\n")[0] or loaded.stderr
    print(f"loaded:    in a new process, {perf_counter() - start:.1f} s; compared with the model: {found}")
    return loaded.returncode == 0


def same_imports() -> dict[str, str]:
    """The environment of a Python with -P that imports from where this one does, not from the working directory."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _counted(program: partita.Program) -> str:
    kinds = [str(getattr(node.target, "overloadpacket", "")) for node in program.operators()]
    return f"{len(kinds)} plain operators, {kinds.count('aten.to')} of them casts, {kinds.count('aten.detach')} detach"


def _show_onnx(plain: partita.Program, model: nn.Module, args: tuple[torch.Tensor, ...]) -> bool:
    difference = _largest_difference(plain.exported(), model, args)
    if difference is None:
        print("ONNX:      skipped; it needs onnx, onnxscript and onnxruntime, which are not all installed")
        return True
    print(f"ONNX:      onnxruntime's result differs from the model's by at most {difference:.1e}, in half precision")
    return difference < 0.01


def _largest_difference(exported: ExportedProgram, model: nn.Module, args: tuple[torch.Tensor, ...]) -> float | None:
    """How far onnxruntime's result is from that of `model`; None where it, or what converts to ONNX, is missing."""
    if not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        return None
    found = _run_onnx(_converted(exported, args), args)
    with torch.no_grad():
        return float((found - model(*args)).abs().max())


def _converted(exported: ExportedProgram, args: tuple[torch.Tensor, ...]) -> bytes:
    # The exporter warns of every operator of torchvision, where that is not installed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted: Any = torch.onnx.export(exported, args, dynamo=True, verbose=False)
    serialized: bytes = converted.model_proto.SerializeToString()
    return serialized


def _run_onnx(converted: bytes, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    session = import_module("onnxruntime").InferenceSession(converted, providers=["CPUExecutionProvider"])
    inputs = {node.name: value.numpy() for node, value in zip(session.get_inputs(), args, strict=True)}
    return torch.from_numpy(session.run(None, inputs)[0])


WIDTH, CLASSES = 32, 10


class Distilled(nn.Module):
    """Three blocks in a block: the teacher has no gradients, and its features are scaled in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.student = nn.Linear(WIDTH, CLASSES)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(x.shape[0])
        with torch.autocast("cpu", torch.float16):
            with torch.no_grad():
                features = torch.relu(self.teacher(x))
            with torch.autocast("cpu", enabled=False):
                scale = torch.rsqrt(features.float().square().mean(-1, keepdim=True) + 1e-5)
            logits: torch.Tensor = self.student(features * scale)
        return logits.float()


def seeded() -> tuple[Distilled, tuple[torch.Tensor, ...]]:
    """The model and its arguments, the same in every process."""
    torch.manual_seed(0)
    return Distilled(), (torch.randn(4, WIDTH),)
