"""A model of equal blocks: seconds to the first result, and the steady time of a step, for each way to compile it.

Each way runs in a process of its own, with an empty folder for the caches of Inductor. The processes wait for each
other and take turns with their steps, so that other work on the machine slows all of them down alike. A GPU must have
room for all of them, about 25 GB each for training at width 4096:

    python -m benchmarks.compile_once                                    # 24 blocks of width 64 on the CPU
    python -m benchmarks.compile_once --device cuda --width 4096         # on a GPU; --train for training
    python -m benchmarks.compile_once whole ours --blocks 6 --distinct   # a model in which nothing repeats
    python -m benchmarks.compile_once whole nested ours --scaled         # each block has a factor of its own
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rows import Row, Target, at_most
from benchmarks.scales import Scale

#: Dynamo alone; one block alone; the whole model; each block by `compile()`; by torch's `nested_compile_region`; ours.
WAYS = ("traced", "one", "whole", "by hand", "nested", "ours")
#: By `capture`, `Repeats` and `Lower`, without torch.compile.
CAPTURED = "captured"
#: Ours, with borders before the first matrix product of each block, where nothing is fused.
AT_MATMULS = "at matmuls"
_TOKENS, _HEAD = 16, 16
_STEPS = 20


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm, and multiplied by a factor if there is one."""

    def __init__(self, width: int, factor: float | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, width // _HEAD, _HEAD).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._scaled(self.out(seen.transpose(1, 2).reshape(batch, tokens, width)))
        fed: Tensor = x + self._scaled(self.down(functional.gelu(self.up(self.norm2(x)))))
        return fed

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor


class Model(nn.Module):
    """Blocks of one width and nothing else, or blocks of different widths, with a projection between them.

    If `scaled`, each block has a factor of its own, as in models that make deep residuals small.
    """

    def __init__(self, widths: Sequence[int], *, scaled: bool) -> None:
        super().__init__()
        factors = [(2 * at + 2) ** -0.5 if scaled else None for at in range(len(widths))]
        self.blocks = nn.ModuleList(map(Block, widths, factors))
        self.between = nn.ModuleList(
            nn.Identity() if one == other else nn.Linear(one, other) for one, other in pairwise((*widths, widths[-1]))
        )

    def forward(self, x: Tensor) -> Tensor:
        for block, between in zip(self.blocks, self.between, strict=True):
            x = between(block(x))
        return x


def compiled(way: str, model: Model) -> Callable[[Tensor], Tensor]:
    """The model, to be compiled in this way at its first call."""
    if way == "traced":
        return torch.compile(model, backend="eager")
    if way == "by hand":
        for block in model.blocks:
            block.compile()
        return model
    if way == "nested":
        # torch 2.13 marks the function, and a bound method cannot be marked.
        Block.forward = torch.compiler.nested_compile_region(Block.forward, **_as_many_regions_as(model))  # type: ignore[method-assign]
    if way in ("ours", AT_MATMULS):
        from partita.policies import SplitAt
        from partita.torch_compile import backend

        options = {"policy": SplitAt(_reads_qkv)} if way == AT_MATMULS else {}
        return torch.compile(model, backend=backend, options=options)
    return torch.compile(model)


def _as_many_regions_as(model: Model) -> dict[str, int]:
    """torch 2.13 refuses more than eight blocks that differ unless one asks for more; torch 2.11 has no such limit."""
    has_limit = "max_reuse_entries" in signature(torch.compiler.nested_compile_region).parameters
    return {"max_reuse_entries": len(model.blocks)} if has_limit else {}


def _reads_qkv(node: torch.fx.Node) -> bool:
    return node.target is functional.linear and "qkv_parameters_weight" in str(node.args[1])


class Measured:
    """A model and its compiled form in this process."""

    def __init__(
        self, way: str, *, blocks: int, width: int, device: str, train: bool, distinct: bool, scaled: bool = False
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        widths = [width + _HEAD * at * distinct for at in range(1 if way == "one" else blocks)]
        self._way, self._device, self._train = way, device, train
        # Made where it is used: to fill the weights of a wide model on one core takes a minute.
        with torch.device(device):
            self._model = Model(widths, scaled=scaled).to(dtype)
        self._x = torch.randn(2, _TOKENS, width, device=device, dtype=dtype)
        self._call: Callable[[Tensor], Tensor] | None = None if way == CAPTURED else compiled(way, self._model)

    def first(self) -> dict[str, float]:
        """Seconds to the first result: CPU seconds on a CPU."""
        clock = _cpu_seconds if self._device == "cpu" else time.perf_counter
        _start_compilers(self._device)
        begin, parts = clock(), {}
        if self._way == CAPTURED:
            self._call, parts = self._captured(clock)
        self._step()
        self._wait()
        return {"first": clock() - begin, **parts}

    def steps(self) -> dict[str, float]:
        """Milliseconds of a step and of its host part, the fastest of some: other processes only add to a time."""
        clock = time.process_time if self._device == "cpu" else time.perf_counter
        host, whole = [], []
        for _ in range(_STEPS):
            self._wait()
            start = clock()
            self._step()
            host.append(clock() - start)
            self._wait()
            whole.append(clock() - start)
        return {"step": min(whole) * 1e3, "host": min(host) * 1e3}

    def _captured(self, clock: Callable[[], float]) -> tuple[Callable[[Tensor], Tensor], dict[str, float]]:
        import partita
        from partita.policies import Repeats
        from partita.treatments import Lower

        begin = clock()
        program = partita.capture(self._model, (self._x,))
        captured = clock()
        applied = partita.plan(program, Repeats(), Lower("inductor")).apply()
        return applied.module(), {"capture": captured - begin, "plan and apply": clock() - captured}

    def _step(self) -> None:
        assert self._call is not None
        if not self._train:
            with torch.no_grad():
                self._call(self._x)
            return
        self._call(self._x).float().square().mean().backward()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def _start_compilers(device: str) -> None:
    """Starts Dynamo, the compiler and the device, which every way needs, before the clock."""
    model: Any = torch.compile(nn.Linear(8, 8).to(device))
    model(torch.randn(3, 8, device=device)).sum().backward()
    torch.compiler.reset()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Process:
    """A way to compile, in a fresh process with fresh caches; it lives until it is closed."""

    def __init__(self, way: str, *, limit_s: float = 240, **options: Any) -> None:
        self._caches = tempfile.TemporaryDirectory()
        settings = {"TORCHINDUCTOR_CACHE_DIR": self._caches.name, "OMP_NUM_THREADS": "1"}
        if options["device"] == "cpu":
            settings["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # CPU seconds of other processes would not count.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compile_once", "--one-way", way, json.dumps(options)],
            env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._limit = threading.Timer(limit_s, self._child.kill)
        self._limit.start()
        try:
            self.found = self.answer("first")
        except BaseException:
            self.__exit__()
            raise

    def answer(self, question: str) -> dict[str, float]:
        """What the process answers: to "first" or "steps"."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(f"{question}\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended, and its output says so.
        for line in self._child.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise ChildProcessError(f"the process ended with status {self._child.wait()}, or was stopped at its time limit")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._child.kill()
        self._child.communicate()
        self._caches.cleanup()


def _answer(way: str, options: Mapping[str, Any]) -> None:
    measured = Measured(way, **options)
    for question in sys.stdin:
        print(json.dumps(measured.first() if question.strip() == "first" else measured.steps()), flush=True)


def compare(
    ways: Sequence[str], *, turns: int, repeated: Sequence[str] = (), rounds: int | None = None, **options: Any
) -> dict[str, Any]:
    """The lowest figures of each way; those that are `repeated` compile in as many fresh processes as there are turns.

    Steps of all take turns for some `rounds`, by default four a turn, each way in its last process.
    """
    running: dict[str, Process] = {}
    found: dict[str, dict[str, float]] = {way: {} for way in ways}
    try:
        for turn in range(turns):
            for way in ways if turn == 0 else repeated:
                if way in running:
                    running.pop(way).__exit__()
                running[way] = Process(way, limit_s=3_600, **options)
                _keep_lowest(found[way], running[way].found)
                print(f"{way}: {running[way].found}", file=sys.stderr, flush=True)
        for _ in range(4 * turns if rounds is None else rounds):
            for way, process in running.items():
                _keep_lowest(found[way], process.answer("steps"))
    finally:
        for process in running.values():
            process.__exit__()
    return found


def _keep_lowest(lowest: dict[str, float], found: Mapping[str, float]) -> None:
    for name, value in found.items():
        lowest[name] = min(value, lowest.get(name, value))


def rows(scale: Scale) -> Iterator[Row]:
    """The first result beside the floor, one block and Dynamo's trace of all; the steady step beside the whole."""
    blocks = scale.equal_blocks[0]
    for train in (False, True):
        yield from _beside_floor(scale, ("traced", "one", "whole", "nested", "ours"), blocks, train=train)


def many_rows(scale: Scale) -> Iterator[Row]:
    """The same for more blocks, without the whole."""
    for train in (False, True):
        yield from _beside_floor(scale, ("traced", "one", "ours"), scale.equal_blocks[1], train=train)


def distinct_rows(scale: Scale) -> Iterator[Row]:
    """A model in which nothing repeats, beside the whole compile."""
    blocks = scale.equal_blocks[0] // 4 + 1
    for train in (False, True):
        ways = ("whole", "ours")
        found = compare(ways, repeated=ways, blocks=blocks, train=train, distinct=True, **_options(scale))
        case = f"{blocks} different blocks, {_TASKS[train]}"
        yield from _beside_whole(found, case, first=at_most(1.05), has_targets=_has_targets(scale))


def scaled_rows(scale: Scale) -> Iterator[Row]:
    """Blocks that differ in a factor, beside blocks that do not."""
    blocks = scale.equal_blocks[0]
    for train in (False, True):
        options = {"blocks": blocks, "train": train, "distinct": False, **_options(scale)}
        ways = ("whole", "nested", "ours")
        found = compare(ways, repeated=("ours",), scaled=True, **options)
        equal = compare(("ours",), repeated=("ours",), **options)["ours"]
        case, target = f"{blocks} blocks with factors, {_TASKS[train]}", at_most(1.15) if _has_targets(scale) else None
        yield _row("first result", case, "s", found["ours"]["first"], "blocks without", equal["first"], target)
        yield from _beside_whole(found, case, first=None, has_targets=_has_targets(scale))


def captured_rows(scale: Scale) -> Iterator[Row]:
    """What plan and apply are of the way by capture, Repeats and Lower."""
    ways, blocks = (CAPTURED,), scale.equal_blocks[0]
    found = compare(ways, repeated=ways, blocks=blocks, train=False, distinct=False, **_options(scale))[CAPTURED]
    target = at_most(0.1) if _has_targets(scale) else None
    parts, case = found["plan and apply"], f"{blocks} blocks, captured"
    yield _row("plan and apply", case, "s", parts, "its first result", found["first"], target, "of it")


_TASKS = ("inference", "training")


def _options(scale: Scale) -> dict[str, Any]:
    return {"width": 64, "device": "cpu", "turns": scale.compile_turns}


def _has_targets(scale: Scale) -> bool:
    return scale.equal_blocks[0] >= _FEWEST_FOR_TARGETS


#: Below, noise is larger than what the targets allow.
_FEWEST_FOR_TARGETS = 24


def _beside_floor(scale: Scale, ways: Sequence[str], blocks: int, *, train: bool) -> Iterator[Row]:
    found = compare(
        ways, repeated=("traced", "one", "ours"), blocks=blocks, train=train, distinct=False, **_options(scale)
    )
    case, has_targets = f"{blocks} blocks, {_TASKS[train]}", _has_targets(scale)
    floor = found["one"]["first"] + found["traced"]["first"]
    target = at_most(1.15 if train else 1.1) if has_targets else None
    yield _row("first result", case, "s", found["ours"]["first"], "one block and Dynamo", floor, target)
    yield from _beside_whole(found, case, first=None, has_targets=has_targets)


def _beside_whole(found: Mapping[str, Any], case: str, *, first: Target | None, has_targets: bool) -> Iterator[Row]:
    for way in ("whole", "nested"):
        if way in found:
            target = first if has_targets and way == "whole" else None
            yield _row("first result", case, "s", found["ours"]["first"], way, found[way]["first"], target)
    for way in ("whole", "nested"):
        if way in found:
            target = at_most(1.05) if has_targets and way == "whole" else None
            yield _row("step", case, "ms", found["ours"]["step"], way, found[way]["step"], target)


def _row(
    section: str,
    case: str,
    unit: str,
    ours: float,
    beside: str,
    other: float,
    target: Target | None,
    reading: str = "times as long",
) -> Row:
    return Row(
        section=section,
        case=case,
        unit=unit,
        ours=ours,
        beside=beside,
        other=other,
        reading=reading,
        value=ours / other,
        target=target,
    )


def main(arguments: list[str]) -> None:
    """Prints the figures of each way that is asked for as a line of JSON."""
    if arguments[:1] == ["--one-way"]:
        _answer(arguments[1], json.loads(arguments[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=[], metavar="WAY", help=", ".join((*WAYS, AT_MATMULS, CAPTURED)))
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--distinct", action="store_true", help="blocks of different widths, none equal to another")
    parser.add_argument("--scaled", action="store_true", help="each block has a factor of its own")
    parser.add_argument("--turns", type=int, default=1, help="how often each way compiles; the lowest figures count")
    parser.add_argument("--rounds", type=int, help="how often the steps of each way are timed, 20 at a time")
    options = vars(parser.parse_args(arguments))
    ways, turns = options.pop("ways") or WAYS, options.pop("turns")
    for way, found in compare(ways, turns=turns, repeated=ways, **options).items():
        print(json.dumps({"way": way, **options, **{key: round(value, 3) for key, value in found.items()}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
