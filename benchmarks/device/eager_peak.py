"""Eager training steps that fit a budget on a GPU: the predicted peak beside what torch's allocator measures.

The decoder of `benchmarks.device.recompute` and the models of `benchmarks.device.models` train without a compiler: as
they are, with torch's checkpoint around each block, and by `partita.fit` at several budgets. Bytes are all that is
allocated, parameters and arguments included.

    python -m benchmarks.device.eager_peak                    # all models
    python -m benchmarks.device.eager_peak vit unet

Prints a line of JSON for each way: the peak of a step, and of the first one.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.device.models import UNet, VisionTransformer, image_inputs, vision_inputs
from benchmarks.device.recompute import BATCH, TOKENS, WORDS, Decoder
from partita.memory import measured_peak, step_memory

#: Parts of the plain peak.
BUDGETS = (1.0, 0.7, 0.45)
_STEPS = 5


def main(models: Sequence[str]) -> None:
    """Measures each of these models, by default all."""
    torch.set_default_device("cuda")
    for name in models or MODELS:
        build, inputs = MODELS[name]
        _measure_model(name, build, inputs)


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))


_checkpointed = partial(checkpoint, use_reentrant=False)

#: How each model is made, by default plainly or with what runs each block, and its inputs.
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "decoder": (Decoder, _tokens),
    "vit": (VisionTransformer, vision_inputs),
    "unet": (UNet, image_inputs),
}


def _measure_model(name: str, build: Callable[..., nn.Module], inputs: Callable[[], tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    args = inputs()
    for way, run in (("checkpoint of each block", (_checkpointed,)), ("plain", ())):
        _report(name, way, build(*run).to(torch.bfloat16), args)
    model = build().to(torch.bfloat16)
    start = time.perf_counter()
    memory = step_memory(model, args)
    smallest = memory.smallest_peak_bytes
    seconds = round(time.perf_counter() - start, 2)
    for part in (*BUDGETS, 0.0):
        plan = memory.plan(max(int(memory.plain_peak_bytes * part), smallest))
        asked = {"asked": plan.budget_bytes, "predicted": plan.peak_bytes, "planning": seconds}
        _report(name, "fit", plan.module(), args, **asked)


def _report(name: str, way: str, model: nn.Module, args: tuple[Tensor, ...], **known: Any) -> None:
    """Prints the peak of the second step, all that is allocated, and of the first; nothing else may be allocated."""

    def step() -> None:
        loss: Tensor = model(*args)
        loss.backward()

    _free()
    first = measured_peak(step, args)
    _forget_gradients(model)
    peak = measured_peak(step, args)
    _forget_gradients(model)
    found = {"model": name, "way": way, **known, "measured": peak, "first": first}
    if "predicted" in known:
        found["of predicted"] = round(peak / known["predicted"], 4)
        found["within"] = max(peak, first) <= known["asked"]
    print(json.dumps({**found, "ms": round(_milliseconds(step, model), 1)}), flush=True)


def _milliseconds(step: Callable[[], None], model: nn.Module) -> float:
    return 1e3 * statistics.median(_timed(step, model) for _ in range(_STEPS))


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _timed(step: Callable[[], None], model: nn.Module) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    _forget_gradients(model)
    return seconds


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


if __name__ == "__main__":
    main(sys.argv[1:])
