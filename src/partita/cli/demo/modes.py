"""Chapter: a model with nested mode blocks goes out to a file, to plain operators and to ONNX, and means the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import nn

import partita
from partita.cli.demo.distilled import seeded
from partita.cli.demo.onnx_runtime import largest_difference
from partita.policies import ByMode
from partita.treatments import Mode

__all__ = ["TITLE", "tell"]


TITLE = "Nested no_grad and autocast blocks, out and back"


def tell() -> bool:
    """Shows the regions as a tree, what torch.export makes of them, and the round trip; whether all of it held."""
    model, args = seeded()
    program = partita.capture(model, args)
    print("a student learns from a frozen teacher, in half precision; its mode regions as a tree:\n")
    print(f"{partita.mode_tree(program)}\n")
    gradients_hold = _tell_gradients()

    wrapped = partita.plan(program, ByMode(), Mode()).apply()
    operators = ", ".join(str(node.target) for node in wrapped.operators() if "partita" in str(node.target))
    print(f"\nwrapped:   the outer regions are calls of {operators}")
    file_holds = _tell_file(wrapped)
    plain = partita.dissolve(wrapped)
    comparison = partita.compare(model, plain, args)
    print(f"dissolved: {_counted(plain)}; compared with the model: {comparison}")
    return _tell_onnx(plain, model, args) and gradients_hold and file_holds and comparison.equal


def _tell_gradients() -> bool:
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


def _tell_file(wrapped: partita.Program) -> bool:
    """Saves the program, and has another process load it and compare it with the model."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "distilled.pt2")
        torch.export.save(wrapped.exported(), file)
        print(f"saved:     {file.stat().st_size:,} bytes")
        start = perf_counter()
        command = [sys.executable, "-m", "partita.cli.demo.reload", str(file)]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    found = told.stdout.partition("\n")[0] or told.stderr
    print(f"loaded:    in a new process, {perf_counter() - start:.1f} s; compared with the model: {found}")
    return told.returncode == 0


def _counted(program: partita.Program) -> str:
    kinds = [str(getattr(node.target, "overloadpacket", "")) for node in program.operators()]
    return f"{len(kinds)} plain operators, {kinds.count('aten.to')} of them casts, {kinds.count('aten.detach')} detach"


def _tell_onnx(plain: partita.Program, model: nn.Module, args: tuple[torch.Tensor, ...]) -> bool:
    difference = largest_difference(plain.exported(), model, args)
    if difference is None:
        print("ONNX:      left out; it takes onnx, onnxscript and onnxruntime, which are not all installed")
        return True
    print(f"ONNX:      onnxruntime's result differs from the model's by at most {difference:.1e}, in half precision")
    return difference < 0.01
