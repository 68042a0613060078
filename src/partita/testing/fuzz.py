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


def fuzz(
    first_seed: int,
    graphs: int,
    *,
    modes: bool = False,
    lower: str | None = None,
    recompute: str | None = None,
    mixed: str | None = None,
    repeats: str | None = None,
    fit: str | None = None,
) -> Tally:
    """Checks the laws for `graphs` programs from `first_seed` on.

    With `modes`, the laws for modes, on nests only; with `lower`, the name of a backend, the law for lowered programs;
    with `recompute`, the laws for recomputed ones, run eagerly (`"eager"`) or compiled by a backend of `torch.compile`;
    with `mixed`, the name of a backend, the law for plans with several treatments; with `repeats`, the laws for blocks
    that are nearly equal and share a body (`"call"`), or functions of aot_eager (`"lower"`, or `"compile"` inside
    torch.compile); with `fit`, the laws for training steps that fit a memory budget, run eagerly (`"eager"`) or
    compiled.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    check = _check_nest if modes else _check_program
    check = check if lower is None else partial(_check_lowered, lower)
    check = check if recompute is None else partial(_check_recomputed, recompute)
    check = check if mixed is None else partial(_check_mixed, mixed)
    check = check if repeats is None else partial(_check_repeats, repeats)
    check = check if fit is None else partial(_check_fit, fit)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what broke; the status is 1 if anything did."""
    options = _parser().parse_args(arguments)
    start, total = time.perf_counter(), Tally()
    starts = range(options.seed, options.seed + options.graphs, _CHUNK)
    sizes = [min(_CHUNK, options.seed + options.graphs - first) for first in starts]
    chosen = {name: getattr(options, name) for name in ("modes", "lower", "recompute", "mixed", "repeats", "fit")}
    check = partial(fuzz, **chosen)
    quiet = partial(logging.disable, logging.WARNING)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), initializer=quiet) as pool:
        for tally in pool.map(check, starts, sizes):
            for case in tally.broken[: max(0, options.show - len(total.broken))]:
                print(f"\n{case}", flush=True)
            total += tally
    _print_counts("broken", total.broken)
    _print_counts("not compiled" if options.lower or options.mixed or options.repeats else "refused", total.refused)
    titles = {
        "lower": "compiled",
        "recompute": "recomputed",
        "mixed": "with several treatments",
        "repeats": "with equal blocks",
        "fit": "fitted",
    }
    legal = next((title for option, title in titles.items() if getattr(options, option)), "legal partitions")
    what = f"{len(total.refused)} refused" if options.modes else f"{total.legal} {legal}"
    seconds = time.perf_counter() - start
    print(f"\n{total.tried} programs, {what}, {len(total.broken)} broken, {seconds:.0f} s")
    return 1 if total.broken or _is_vacuous(total, modes=options.modes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000, help="how many programs (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--modes", action="store_true", help="nests of modes only, by the laws for modes")
    kinds.add_argument("--lower", choices=backend_names(), help="regions that this backend supports, lowered by it")
    kinds.add_argument(
        "--recompute",
        nargs="?",
        const=_EAGER,
        choices=_COMPILERS,
        help="regions that are recomputed in the backward, compiled if a compiler is named",
    )
    kinds.add_argument(
        "--mixed", choices=backend_names(), help="regions with several treatments in one plan, some lowered by this"
    )
    kinds.add_argument(
        "--repeats",
        nargs="?",
        const=_CALL,
        choices=_SHARED,
        help="blocks that are nearly equal, and share a body, or compiled functions if that is said",
    )
    kinds.add_argument(
        "--fit",
        nargs="?",
        const=_EAGER,
        choices=_COMPILERS[:2],
        help="training steps that fit memory budgets, compiled if a compiler is named",
    )
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
