"""Memory budgets on a GPU: planned steps beside plain compilation, checkpoints by hand and torch's own budget.

The decoder of `benchmarks.device.recompute` trains under each way in a process of its own, and with `vit/` or `unet/`
before a way a model of `benchmarks.device.models`. `breaks/` and `layers/` are the decoder in several graphs: with a
graph break after each fourth block, and with each block compiled on its own. Processes compile side by side, and are
timed one at a time, in turns. Bytes are beside those that rest between steps: parameters and arguments. `plan:11.7` is
a plan for 11.7 GB of them, `plan:60%` one for 60 % of the fastest step.

    python -m benchmarks.device.peak                       # the decoder in all ways, in less than six minutes
    python -m benchmarks.device.peak plain plan:14.4 hand:matmuls
    python -m benchmarks.device.peak vit/plain vit/hand:nothing vit/torch:0.5 vit/plan:70% vit/plan:45%
    python -m benchmarks.device.peak breaks/plain breaks/plan:11.7 layers/plain layers/plan:11.7 layers/plan:smallest
    python -m benchmarks.device.peak --jobs 4 --seconds 600

Prints a line of JSON for each way, and then how each plan compares with the best other way of at most its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.device.models import UNet, VisionTransformer, image_inputs, vision_inputs
from benchmarks.device.recompute import BATCH, LAYERS, TOKENS, WORDS, Decoder
from partita.errors import BudgetError
from partita.memory import Rates, StepMemoryPlan, measure_rates
from partita.torch_compile import backend

#: Those with high peaks and those with low ones alternate, since several compile at the same time.
WAYS = (
    "plain",
    "plan:smallest",
    "torch:0.9",
    "plan:4.4",
    "plan:15",
    "hand:attention",
    "torch:0.7",
    "plan:6.3",
    "plan:14.4",
    "hand:rich:4",
    "torch:0.5",
    "plan:9.0",
    "hand:matmuls",
    "hand:rich:8",
    "torch:0.3",
    "plan:11.7",
    "hand:rich:12",
    "hand:nothing",
)
ROUNDS, STEPS = 3, 5
#: The rates of the GPU, measured while nothing else runs on it.
_RATES = "PARTITA_BENCHMARK_RATES"


class _HandDecoder(Decoder):
    """A decoder whose blocks are checkpointed: the last `rich` keep matmuls and attention, the others `keep`."""

    def __init__(self, keep: str, rich: int = 0) -> None:
        super().__init__()
        self.keeps = ["matmuls" if number >= LAYERS - rich else keep for number in range(LAYERS)]

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for keep, block in zip(self.keeps, self.blocks, strict=True):
            x = _RUNS[keep](block, x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _policy(names: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(name in str(op) for name in names)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, ("attention",)))


def _keep_matmuls() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, ("attention", "aten.mm", "aten.addmm")))


#: torch's checkpoint around a block, by what it keeps.
_RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "nothing": partial(checkpoint, use_reentrant=False),
    "attention": partial(checkpoint, use_reentrant=False, context_fn=_keep_attention),
    "matmuls": partial(checkpoint, use_reentrant=False, context_fn=_keep_matmuls),
}


class _BrokenDecoder(Decoder):
    """A decoder of which torch.compile makes a graph for each four blocks."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        # Not in a loop: Dynamo compiles no frame that breaks in one.
        x = self._four(self.embed(ids), 0)
        torch._dynamo.graph_break()
        x = self._four(x, 4)
        torch._dynamo.graph_break()
        x = self._four(x, 8)
        torch._dynamo.graph_break()
        x = self._four(x, 12)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def _four(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + 4]:
            x = block(x)
        return x


class _Worker:
    """One way in this process."""

    def __init__(self, way: str) -> None:
        self.way, self.plans = way, list[Any]()
        model, _, way = way.rpartition("/")
        who, *rest = way.split(":")
        torch.manual_seed(0)
        torch.set_default_device("cuda")
        if who == "torch":
            import torch._functorch.config as functorch_config

            functorch_config.activation_memory_budget = float(rest[0])
        self.model, self.inputs = _built(model or "decoder", rest if who == "hand" else [])
        torch.cuda.synchronize()
        self.resting = torch.cuda.memory_allocated()
        #: The bytes of a step that were asked for, or a part of those of the fastest step.
        self.asked: int | float | None = None
        self.in_layers = model == "layers"
        self.step = self._compiled()
        if who == "plan":
            part = rest[0].removesuffix("%")
            asked = float(part) / 100 if part != rest[0] else 1 if part == "smallest" else int(float(part) * 1e9)
            self._fit(asked)

    def _fit(self, asked: int | float) -> None:
        self.asked = asked
        self.plans.clear()
        rates = Rates(**json.loads(os.environ[_RATES])) if _RATES in os.environ else None
        peak = asked if isinstance(asked, float) else self.resting + asked
        options = {"peak": peak, "on_plan": self.plans.append, "rates": rates}
        self.step = self._compiled(backend=backend, options=options)

    def _compiled(self, **how: Any) -> Callable[..., Tensor]:
        if not self.in_layers:
            return torch.compile(self.model, **how)
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(**how)
        return self.model

    def forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()

    def timed(self) -> float:
        self.forget()
        start = time.perf_counter()
        self.step(*self.inputs).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def start(self) -> dict[str, Any]:
        """Compiles, plans again where the measured peak is over, and measures the peak."""
        begin = time.perf_counter()
        try:
            self.timed()
            if self.asked:  # A step of several graphs is planned when the next one begins.
                self.timed()
        except Exception as error:
            smallest = _smallest(error)
            if smallest is None or not self.way.endswith("plan:smallest"):
                raise
            torch.compiler.reset()
            self._fit(smallest - self.resting)  # An error counts all that is allocated.
            self.timed()
            self.timed()
        first = time.perf_counter() - begin
        # Plans are compared with the measured peak when the third step begins, and may be made anew.
        for _ in range(4 if self.asked else 2):
            self.timed()
        self.forget()
        torch.cuda.reset_peak_memory_stats()
        loss = self.step(*self.inputs)
        held = torch.cuda.memory_allocated() - self.resting
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self.resting
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        found: dict[str, Any] = {
            "way": self.way,
            "first_s": round(first, 1),
            "peak_gb": round(peak / 1e9, 3),
            "held_gb": round(held / 1e9, 3),
            "loss": float(loss.detach()),
            "gradients": sum(float(one.float().abs().sum()) for one in gradients),
        }
        if self.asked:
            # A plan of several graphs counts all that is allocated.
            together = [plan for plan in self.plans if isinstance(plan, StepMemoryPlan)]
            plans, beside = (together, self.resting) if together else (self.plans, 0)
            # Where no plan holds what was asked for, a later one is allowed what it takes.
            asked = plans[0].allowed_bytes - beside if isinstance(self.asked, float) else self.asked
            found["asked_gb"] = round(asked / 1e9, 3)
            found["fits"] = peak <= asked
            found["plans"] = len(plans)
            found["predicted_gb"] = [round((plan.peak_bytes - beside) / 1e9, 3) for plan in plans]
            found["recompute_ms"] = round(1e3 * plans[-1].seconds, 2) if plans else None
        self._give_back()
        return found

    def times(self) -> list[float]:
        """Milliseconds of some steps, after one that fills the allocator again."""
        self.timed()
        found = [round(1e3 * self.timed(), 3) for _ in range(STEPS)]
        self._give_back()
        return found

    def _give_back(self) -> None:
        self.forget()
        torch.cuda.empty_cache()


def _built(name: str, by_hand: list[str]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in bfloat16 and its arguments."""
    if name in ("decoder", "breaks", "layers"):
        model: nn.Module = _BrokenDecoder() if name == "breaks" else Decoder()
        if by_hand:
            keep, rich = ("attention", int(by_hand[1])) if by_hand[0] == "rich" else (by_hand[0], 0)
            model = _HandDecoder(keep, rich)
        return model.to(torch.bfloat16), tuple(torch.randint(WORDS, (BATCH, TOKENS)) for _ in range(2))
    run = [_RUNS[keep] for keep in by_hand]
    if name == "vit":
        return VisionTransformer(*run).to(torch.bfloat16), vision_inputs()
    if name == "unet":
        return UNet(*run).to(torch.bfloat16), image_inputs()
    raise SystemExit(f"{name!r} is no model of this benchmark; there are decoder, breaks, layers, vit and unet")


def _smallest(error: BaseException | None) -> int | None:
    """What the planner says is the smallest peak, out of the errors of a compiler."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BudgetError):
            return error.smallest
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def work(way: str) -> None:
    """Answers a line of JSON for each line that it reads."""
    import logging

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    worker = _Worker(way)
    print(json.dumps(worker.start()), flush=True)
    for _ in sys.stdin:
        print(json.dumps(worker.times()), flush=True)


class _Process:
    """A worker process as the parent sees it."""

    def __init__(self, way: str) -> None:
        self.way, self.found, self.times = way, dict[str, Any](), list[float]()
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.device.peak", "--work", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads},
        )
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    def answer(self) -> Any:
        """The next line that is JSON; None if the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
        return None

    def ask(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("time\n")
            self.process.stdin.flush()
            self.times += self.answer() or []
        except (BrokenPipeError, OSError):
            self.errors.append("the process ended while it was timed\n")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def line(self) -> dict[str, Any]:
        if not self.found:
            return {"way": self.way, "failed": "".join(self.errors)[-1500:] or "not ready in time"}
        times = sorted(self.times)
        step = (
            {"step_ms": round(statistics.median(times), 2), "spread_ms": round(times[-1] - times[0], 2)}
            if times
            else {}
        )
        over = [line.strip() for line in self.errors if "over its budget" in line or "no plan holds" in line]
        return {**self.found, **step, **({"log": over} if over else {})}


def main(ways: list[str], *, jobs: int, seconds: float, timing: float) -> None:
    """Starts up to `jobs` workers at a time, times those that are ready in turns, and prints."""
    deadline = time.monotonic() + seconds
    ready_by = deadline - timing
    rates = asdict(measure_rates(torch.device("cuda"), torch.bfloat16))
    torch.cuda.empty_cache()
    print(json.dumps({"rates": rates, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}), flush=True)
    os.environ[_RATES] = json.dumps(rates)
    gate, processes = threading.Semaphore(jobs), list[_Process]()
    lock = threading.Lock()

    def start(way: str) -> None:
        with gate:
            if time.monotonic() > ready_by:
                return
            one = _Process(way)
            with lock:
                processes.append(one)
            one.found = one.answer() or {}
            print(f"ready: {json.dumps(one.found)}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=start, args=(way,), daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    # What is not ready when timing begins is left out.
    for thread in threads:
        thread.join(max(0.0, ready_by - time.monotonic()))
    ready = sorted((one for one in processes if one.found), key=lambda one: ways.index(one.way))
    for one in processes:
        if not one.found:
            one.stop()
    for _ in range(ROUNDS):
        for one in ready:
            if time.monotonic() < deadline:
                one.ask()
    for one in processes:
        one.stop()
    known = {one.way: one for one in processes}
    lines = [known[way].line() if way in known else {"way": way, "failed": "not started in time"} for way in ways]
    for line in lines:
        print(json.dumps(line), flush=True)
    _compare(lines)


def _compare(lines: list[dict[str, Any]]) -> None:
    measured = [line for line in lines if "step_ms" in line]
    for line in measured:
        model, _, way = line["way"].rpartition("/")
        if not way.startswith("plan:"):
            continue
        told: dict[str, Any] = {"plan": line["way"], "fits": line["fits"]}
        if line["predicted_gb"]:
            told["measured / predicted"] = round(line["peak_gb"] / line["predicted_gb"][-1], 4)
        peers = [(one, one["way"].rpartition("/")) for one in measured]
        others = [(one, parts[2]) for one, parts in peers if parts[0] == model]
        plain = next((one for one, who in others if who == "plain"), None)
        if plain is not None:
            told["ms / plain"] = round(line["step_ms"] / plain["step_ms"], 4)
            told["gradients / plain"] = round(line["gradients"] / plain["gradients"], 6)
        for kind in ("hand", "torch"):
            most = max(line["asked_gb"], line["peak_gb"])
            fitting = [one for one, who in others if who.startswith(kind) and one["peak_gb"] <= most]
            best = min(fitting, key=lambda one: one["step_ms"], default=None)
            if best is not None:
                told[f"ms / best {kind}"] = [round(line["step_ms"] / best["step_ms"], 4), best["way"], best["peak_gb"]]
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--jobs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=345.0)
    parser.add_argument("--timing", type=float, default=60.0, help="of these seconds, how many are left for timing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
    else:
        main(options.ways, jobs=options.jobs, seconds=options.seconds, timing=options.timing)
