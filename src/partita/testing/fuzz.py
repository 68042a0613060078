"""`python -m partita.testing.fuzz --graphs N`: the laws on N generated programs, each with regions of its own."""

from __future__ import annotations

import argparse
import logging
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from partita.backends import backend_names
from partita.plans import Plan
from partita.testing.generator.build import random_case, random_crossing, random_nest
from partita.testing.generator.draft import Case
from partita.testing.generator.near_repeats import near_repeats
from partita.testing.generator.recipe import ALL, Features
from partita.testing.generator.regions import random_labels
from partita.testing.laws.core import check_laws
from partita.testing.laws.fit import check_compiled_fit_law, check_fit_law, random_step
from partita.testing.laws.mode_oracle import leaves_modes
from partita.testing.laws.modes import EXPORTABLE, check_export_laws, check_mode_laws
from partita.testing.laws.repeats import (
    check_compiled_repeats_law,
    check_lowered_repeats_law,
    check_repeats_laws,
)
from partita.testing.laws.treatments import (
    COMPILABLE,
    check_compiled_recompute_law,
    check_lower_laws,
    check_mixed_law,
    check_recompute_laws,
)

_CHUNK = 50
#: From this many programs on, the share of legal partitions, or of nests that are not refused, is significant.
_ENOUGH = 200
#: One program in so many is a nest of modes; one nest in so many is exported too, which takes a second.
_NESTS, _EXPORTS = 8, 20
#: One program in so many has hooks and mutation that cross regions.
_CROSSINGS = 3
_SEEDS = 6
_COMPILERS = (_EAGER := "eager", "aot_eager", "inductor")
#: Blocks that share a body, a lowered one, or what the torch.compile backend compiles.
_SHARED = (_CALL := "call", _LOWER := "lower", "compile")


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of programs, how many of their partitions were legal, what was refused, and what broke.

    Lowered programs count as legal if something was compiled; failures to compile are among the refused.
    """

    tried: int = 0
    legal: int = 0
    broken: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tried + other.tried, self.legal + other.legal, self.broken + other.broken, self.refused + other.refused
        )


def fuzz(first_seed: int, graphs: int, *, modes: bool = False, **laws: str | None) -> Tally:
    """Checks the laws for `graphs` programs from `first_seed` on.

    With `modes`, the laws for modes, on nests only; with the name of one of `LAWS`, that one, for this value of it: the
    name of a backend, or what `main` takes.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    check = _check_nest if modes else _check_program
    for name, value in laws.items():
        check = check if value is None else partial(LAWS[name].check, value)
    return sum((_tried(check, seed) for seed in range(first_seed, first_seed + graphs)), Tally())


def _tried(check: Callable[[int], Tally], seed: int) -> Tally:
    try:
        return check(seed)
    except Exception as error:
        last = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else error.__traceback__)[-1]
        return Tally(1, broken=(f"seed {seed}: {error}\n  at {os.path.basename(last.filename)}:{last.lineno}",))


def _case(seed: int, features: Features = ALL) -> Case:
    is_crossing = seed % _CROSSINGS == _CROSSINGS - 1
    return random_crossing(seed, features=features) if is_crossing else random_case(seed, features=features)


def _check_program(seed: int) -> Tally:
    """A program with regions; nests that leave modes switched have none, since no cut can keep their order."""
    if seed % _NESTS != _NESTS - 3:
        case = _case(seed)
        return Tally(1, check_laws(case, random_labels(case.graph_module.graph, seed)))
    tally, case = _check_nest(seed), random_nest(seed)
    if tally.refused or leaves_modes(case):
        return tally
    return tally + Tally(0, check_laws(case, random_labels(case.graph_module.graph, seed)))


def _check_nest(seed: int) -> Tally:
    refusals = [check_mode_laws(random_nest(seed))]
    if seed % _EXPORTS == 0:
        refusals.append(check_export_laws(random_nest(seed, features=EXPORTABLE), dynamic=seed % (2 * _EXPORTS) == 0))
    return Tally(1, refused=tuple(f"seed {seed}: {reason}" for reason in refusals if reason is not None))


def _check_lowered(backend: str, seed: int) -> Tally:
    lowering = check_lower_laws(_case(seed), backend, seed)
    failed = {failure.region for failure in lowering.failures}
    return Tally(1, int(len(failed) < len(lowering.partition)), refused=_failures(seed, lowering))


def _check_recomputed(compiler: str, seed: int) -> Tally:
    if compiler == _EAGER:
        refusal = check_recompute_laws(_case(seed), seed)
    else:
        refusal = check_compiled_recompute_law(_case(seed, COMPILABLE), compiler, seed)
    return Tally(1, int(refusal is None), refused=() if refusal is None else (f"seed {seed}: {refusal}",))


def _check_mixed(backend: str, seed: int) -> Tally:
    mixture, _ = check_mixed_law(_case(seed), backend, seed)
    kinds = {type(treatment) for treatment in mixture.treatments}
    return Tally(1, int(len(kinds) > 1), refused=_failures(seed, mixture))


def _check_repeats(shared: str, seed: int) -> Tally:
    case = near_repeats(seed)
    if shared == _CALL:
        return Tally(1, int(check_repeats_laws(case)))
    if shared == _LOWER:
        lowered = check_lowered_repeats_law(case, "aot_eager")
        return Tally(1, int(any(body.calls > 1 for body in lowered.bodies())), refused=_failures(seed, lowered))
    check_compiled_repeats_law(case, "aot_eager")
    return Tally(1, 1)


def _check_fit(compiler: str, seed: int) -> Tally:
    step = random_step(seed)
    refusal = check_fit_law(step) if compiler == _EAGER else check_compiled_fit_law(step, compiler)
    return Tally(1, int(refusal is None), refused=() if refusal is None else (f"seed {seed}: {refusal}",))


def _failures(seed: int, applied: Plan) -> tuple[str, ...]:
    return tuple(f"seed {seed}: {failure.backend} failed: {failure.reason}" for failure in applied.failures)


@dataclass(frozen=True, slots=True)
class _Law:
    """A law for one kind of treated programs, its `values`, the first by default, or None for all backends."""

    check: Callable[[str, int], Tally]
    values: tuple[str, ...] | None
    #: What the programs are for which it says something.
    legal: str
    about: str


LAWS = {
    "lower": _Law(_check_lowered, None, "compiled", "regions that this backend supports, lowered by it"),
    "recompute": _Law(
        _check_recomputed,
        _COMPILERS,
        "recomputed",
        "regions that are recomputed in the backward, compiled if a compiler is named",
    ),
    "mixed": _Law(
        _check_mixed,
        None,
        "with several treatments",
        "regions with several treatments in one plan, some lowered by this",
    ),
    "repeats": _Law(
        _check_repeats,
        _SHARED,
        "with equal blocks",
        "blocks that are nearly equal, and share a body, or compiled functions if that is said",
    ),
    "fit": _Law(
        _check_fit, _COMPILERS[:2], "fitted", "training steps that fit memory budgets, compiled if a compiler is named"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what broke; the status is 1 if anything did."""
    options = _parser().parse_args(arguments)
    start, total = time.perf_counter(), Tally()
    starts = range(options.seed, options.seed + options.graphs, _CHUNK)
    sizes = [min(_CHUNK, options.seed + options.graphs - first) for first in starts]
    chosen = {name: getattr(options, name) for name in ("modes", *LAWS)}
    check = partial(fuzz, **chosen)
    prepare = partial(_prepare, options.device)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), initializer=prepare) as pool:
        for tally in pool.map(check, starts, sizes):
            for case in tally.broken[: max(0, options.show - len(total.broken))]:
                print(f"\n{case}", flush=True)
            total += tally
    _print_counts("broken", total.broken)
    _print_counts("not compiled" if options.lower or options.mixed or options.repeats else "refused", total.refused)
    legal = next((law.legal for name, law in LAWS.items() if getattr(options, name)), "legal partitions")
    what = f"{len(total.refused)} refused" if options.modes else f"{total.legal} {legal}"
    seconds = time.perf_counter() - start
    print(f"\n{total.tried} programs, {what}, {len(total.broken)} broken, {seconds:.0f} s")
    return 1 if total.broken or _is_vacuous(total, modes=options.modes) else 0


def _prepare(device: str | None) -> None:
    """Prepares a process: without warnings in the log, and for programs on another device."""
    logging.disable(logging.WARNING)
    if device is not None:
        torch.set_default_device(device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000, help="how many programs (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--modes", action="store_true", help="nests of modes only, by the laws for modes")
    for name, law in LAWS.items():
        first: dict[str, Any] = {} if law.values is None else {"nargs": "?", "const": law.values[0]}
        kinds.add_argument(f"--{name}", choices=law.values or backend_names(), help=law.about, **first)
    parser.add_argument("--device", help="where the programs' tensors are, as `torch.set_default_device` puts them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, default=5, help="how many broken cases to print in full (default 5)")
    return parser


def _print_counts(what: str, cases: Iterable[str]) -> None:
    """Prints how often each message occurred, by its first line without the names of nodes, and some seeds."""
    seeds: dict[str, list[str]] = {}
    for case in cases:
        seed, _, message = case.partition(": ")
        title = re.sub(r"'\w+'", "...", message.partition("\n")[0])
        seeds.setdefault(title, []).append(seed.removeprefix("seed "))
    for title, found in sorted(seeds.items(), key=lambda item: -len(item[1])):
        print(f"{what} {len(found)} x {title} ({', '.join(found[:_SEEDS])})")


def _is_vacuous(total: Tally, *, modes: bool) -> bool:
    """Whether nearly everything was refused."""
    refused = len(total.refused) * 10 > total.tried if modes else total.legal * 10 < total.tried
    if total.tried >= _ENOUGH and refused:
        print("most programs were refused: what refuses everything breaks no law")
        return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
