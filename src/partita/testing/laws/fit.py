"""Laws for memory budgets: at every budget that can be met, losses, gradients and state keep their bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from partita._torch.pytrees import tensors_in
from partita.errors import BudgetError, PartitaError
from partita.memory import MemoryPlan, Rates, StepMemory, measured_peak, step_memory
from partita.testing.generator.build import random_case
from partita.testing.generator.near_repeats import near_repeats
from partita.testing.generator.recipe import Features
from partita.testing.laws.core import LawError
from partita.torch_compile import backend

#: What torch.export captures, with random numbers. Blocks of modes hold what they read, which no trial counts.
FITTABLE = Features.only(
    *("overloads", "methods", "keywords", "modules", "attributes", "containers", "sizes", "views", "mutations"),
    "random",
)

#: Fixed, so that a seed has the same plans everywhere.
_RATES = Rates(matmul_flops=1e9, attention_flops=1e9, bytes=1e9, call=1e-6)
#: One program in so many has blocks that repeat.
_REPEATS = 2
_BUDGETS = 5


@final
class Loss(nn.Module):
    """A program as a training step: the mean of every result that has a gradient."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        results = tensors_in(self.program(*args, **kwargs))
        floats = [one for one in results if one.is_floating_point() and one.numel()]
        return sum((one.float().mean() for one in floats), torch.zeros(()))


@final
@dataclass(frozen=True, slots=True)
class Step:
    """A generated training step: a model that returns a loss, and its arguments."""

    seed: int
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def trained(self, call: Callable[..., Tensor], *, measures: bool = False) -> Trained:
        """What a step of `call` leaves behind; the model and its arguments are as before."""
        before = [(one, one.detach().clone()) for one in self.state()]
        generators = [(one, one.get_state()) for one in self._generators()]
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        self.model.zero_grad()
        losses = []

        def step() -> None:
            loss = call(*args, **kwargs)
            losses.append(loss.detach().clone())
            loss.backward()

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            peak = None
            if measures:
                own = (*self.state(), *tensors_in((args, kwargs)))
                peak = -_allocated_by_others(own)
                peak += measured_peak(step, own)
            else:
                step()
            after = torch.random.get_rng_state()
        tensors = [losses[0], after, *self.state(), *tensors_in((args, kwargs))]
        leaves = [one for one in (*self.model.parameters(), *tensors_in((args, kwargs))) if one.is_leaf]
        found = Trained([one.detach().clone() for one in tensors], [_copied(one.grad) for one in leaves], peak)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        self.model.zero_grad()
        for generator, state in generators:
            generator.set_state(state)
        return found

    def _generators(self) -> Iterator[torch.Generator]:
        for module in self.model.modules():
            yield from (value for value in vars(module).values() if isinstance(value, torch.Generator))

    def state(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        yield from self.model.parameters()
        yield from self.model.buffers()


def _allocated_by_others(own: Iterable[Tensor]) -> int:
    """What torch's allocator has given out on a GPU, beside the storages of these tensors; nothing on the CPU."""
    storages = {storage.data_ptr(): storage for tensor in own if (storage := tensor.untyped_storage()).is_cuda}
    if not storages:
        return 0
    return torch.cuda.memory_allocated() - sum(-(-one.nbytes() // _ROUNDING) * _ROUNDING for one in storages.values())


#: torch's allocator gives out multiples of so many bytes.
_ROUNDING = 512


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """Loss, state of the generator, state of the model and arguments after a step, the gradients, and the peak."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    peak: int | None

    def difference(self, other: Trained) -> str | None:
        """What differs from another step, bit for bit; None if nothing does."""
        for name, ones, others in (("value", self.values, other.values), ("gradient", self.gradients, other.gradients)):
            for number, (one, two) in enumerate(zip(ones, others, strict=True)):
                if not _same(one, two):
                    return f"{name} {number}: {one} != {two}"
        return None


def random_step(seed: int) -> Step:
    """The training step of a seed: a random program, or blocks that repeat."""
    if seed % _REPEATS == 0:
        found = near_repeats(seed)
        return Step(seed, Loss(found.model), found.args, {})
    case = random_case(seed, features=FITTABLE)
    return Step(seed, Loss(case.graph_module), tuple(case.args), dict(case.kwargs))


def check_fit_law(step: Step) -> str | None:
    """Raises where a fitted step, run eagerly, differs from the plain one or takes more than it may; why it is refused.

    Budgets go from the plain peak to the smallest; less memory asked never means more memory used, nor less time.
    """
    try:
        memory = step_memory(step.model, step.args, step.kwargs, rates=_RATES)
    except PartitaError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    odd = _beyond_the_law(memory)
    if odd is not None:
        return odd
    try:
        plain = step.trained(memory.chain.program.module(), measures=True)
    except RuntimeError as error:  # Autograd refuses what was mutated.
        return f"the plain step raises: {error}"
    plans = []
    for budget in _budgets(memory.smallest_peak_bytes, memory.plain_peak_bytes):
        plan = memory.plan(budget)
        plans.append(plan)
        _check_plan(step, plan, plain, budget)
    _check_less_is_less(step, memory, plans)
    try:
        memory.plan(memory.smallest_peak_bytes - 1)
    except BudgetError as error:
        if error.smallest == memory.smallest_peak_bytes:
            return None
    raise LawError(f"a budget below the smallest peak is refused with it\nrandom_step({step.seed})")


def _beyond_the_law(memory: StepMemory) -> str | None:
    """Why a step is no example: torch's fake kernels give other sizes than real ones."""
    for node in memory.chain.program.graph.nodes:
        if any(name in str(node.target) for name in _OTHER_SIZES):
            return "oneDNN allocates more for a recurrent layer than its fake kernel says"
    return None


_OTHER_SIZES = ("aten.lstm", "aten.gru", "aten.rnn")


def _check_plan(step: Step, plan: MemoryPlan, plain: Trained, budget: int) -> None:
    if plan.peak_bytes > budget:
        raise _broken("a plan fits its budget", step, plan, f"{plan.peak_bytes} > {budget}")
    found = step.trained(plan.module(), measures=True)
    words = plain.difference(found)
    if words is not None:
        raise _broken("a fitted step keeps its bits", step, plan, words)
    if found.peak is None or found.peak > budget + _small_buffers(step):
        raise _broken("a fitted step takes at most its budget", step, plan, f"measured {found.peak} > {budget}")


def _small_buffers(step: Step) -> int:
    """What kernels may allocate inside on a GPU that no plan counts, which is more than these small programs take."""
    own = (*step.state(), *tensors_in((step.args, step.kwargs)))
    return 1 << 20 if any(one.is_cuda for one in own) else 0


def _check_less_is_less(step: Step, memory: StepMemory, plans: Sequence[MemoryPlan]) -> None:
    """`plans` are from the largest budget to the smallest."""
    peaks = [plan.peak_bytes for plan in plans]
    seconds = [plan.extra_seconds for plan in plans]
    if peaks != sorted(peaks, reverse=True):
        raise LawError(f"less memory asked never means more memory used\nrandom_step({step.seed})\n{peaks}")
    if any(one > other + 1e-12 for one, other in pairwise(seconds)):
        raise LawError(f"less memory asked never means less time\nrandom_step({step.seed})\n{seconds}")
    if peaks[0] != memory.plain_peak_bytes or peaks[-1] != memory.smallest_peak_bytes:
        raise LawError(
            f"plans go from the plain peak to the smallest\nrandom_step({step.seed})\n{peaks}, of "
            f"{memory.plain_peak_bytes} to {memory.smallest_peak_bytes}"
        )


def check_compiled_fit_law(step: Step, inner: str) -> str | None:
    """Raises where a step that is compiled to fit differs from one that `inner` compiles; why it is refused."""
    torch.compiler.reset()
    try:
        expected = step.trained(torch.compile(step.model, backend=inner))
    except Exception as error:  # torch.compile does not take every program.
        return f"torch.compile does not take the original: {type(error).__name__}"
    plans: list[Any] = []
    for part in (1.0, 0.8, 0.6):
        torch.compiler.reset()
        options: dict[str, Any] = {"peak": part, "inner": inner, "rates": _RATES, "on_plan": plans.append}
        try:
            found = step.trained(torch.compile(step.model, backend=backend, options=options))
        except Exception as error:
            if "BudgetError" in f"{type(error.__cause__).__name__} {error}":
                break
            raise _broken("a step that fits compiles", step, plans, f"{type(error).__name__}: {error}") from error
        words = expected.difference(found)
        if words is not None:
            raise _broken(f"a fitted step compiled by {inner} keeps its bits", step, plans, words)
    return None if plans else "nothing was planned"


def _budgets(least: int, most: int) -> list[int]:
    return [most - (most - least) * at // (_BUDGETS - 1) for at in range(_BUDGETS)]


def _broken(title: str, step: Step, plan: object, words: str) -> LawError:
    shown = "\n".join(map(str, plan)) if isinstance(plan, list) else str(plan)
    return LawError(f"{title}\nrandom_step({step.seed})\n{words}\n{shown}")


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
