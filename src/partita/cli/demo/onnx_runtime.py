"""An exported program as ONNX, run by onnxruntime where that is installed."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

__all__ = ["largest_difference"]


def largest_difference(exported: ExportedProgram, model: nn.Module, args: tuple[torch.Tensor, ...]) -> float | None:
    """How far onnxruntime's result is from that of `model`; None where it, or what converts to ONNX, is missing."""
    if not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        return None
    found = _run(_converted(exported, args), args)
    with torch.no_grad():
        return float((found - model(*args)).abs().max())


def _converted(exported: ExportedProgram, args: tuple[torch.Tensor, ...]) -> bytes:
    # It warns of every operator of torchvision, where that is not installed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted: Any = torch.onnx.export(exported, args, dynamo=True, verbose=False)
    serialized: bytes = converted.model_proto.SerializeToString()
    return serialized


def _run(converted: bytes, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    session = import_module("onnxruntime").InferenceSession(converted, providers=["CPUExecutionProvider"])
    inputs = {given.name: value.numpy() for given, value in zip(session.get_inputs(), args, strict=True)}
    return torch.from_numpy(session.run(None, inputs)[0])
