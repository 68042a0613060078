"""Eager training steps that fit a budget on a GPU: the predicted peak beside what torch's allocator measures.

The decoder of `benchmarks.device.recompute` and the models of `benchmarks.device.models` train without a compiler: as
they are, with torch's checkpoint around each block, and by `partita.fit` at several budgets. Bytes are all that is
allocated, parameters and arguments included.

    python -m benchmarks.device.eager_peak                    # all models
    python -m benchmarks.device.eager_peak vit unet

Prints a line of JSON for each way: the peak of a step with memory of libraries made before, and of the first step.
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
from partita.memory import StepMemory, measured_peak, step_memory

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
    model = build().to(torch.bfloat16)
    _report(name, "plain", model, args)
    _report(name, "checkpoint of each block", build(_checkpointed).to(torch.bfloat16), args)
    start = time.perf_counter()
    memory = step_memory(model, args)
    budgets = [memory.plain_peak_bytes * part for part in BUDGETS]
    planned = {"seconds": round(time.perf_counter() - start, 2)}
    for budget in (*budgets, memory.smallest_peak_bytes):
        _report_plan(name, memory, int(budget), model, args, planned)


def _report_plan(
    name: str, memory: StepMemory, budget: int, model: nn.Module, args: tuple[Tensor, ...], planned: dict[str, Any]
) -> None:
    plan = memory.plan(max(budget, memory.smallest_peak_bytes))
    _report(name, "fit", plan.module(), args, asked=budget, predicted=plan.peak_bytes, **planned)


def _report(name: str, way: str, model: nn.Module, args: tuple[Tensor, ...], **known: Any) -> None:
    def step() -> None:
        loss: Tensor = model(*args)
        loss.backward()

    state = [*model.parameters(), *model.buffers(), *args]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state}
    before = torch.cuda.memory_allocated()
    first = measured_peak(step, state)
    _forget_gradients(model)
    resting = torch.cuda.memory_allocated()
    peak = measured_peak(step, state)
    _forget_gradients(model)
    seconds = [_timed(step, model) for _ in range(_STEPS)]
    others = before - sum(held.values())
    found = {
        "model": name,
        "way": way,
        **known,
        "measured": peak - others,
        "first": first - others,
        "libraries": resting - before,
        "others": others,
        "ms": round(statistics.median(seconds) * 1e3, 1),
    }
    if "predicted" in known:
        found["of predicted"] = round(found["measured"] / known["predicted"], 4)
    print(json.dumps(found), flush=True)
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
