"""`python -m partita.testing.fuzz --graphs N`: the laws on N generated programs, each with regions of its own."""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from partita.testing.build import random_case
from partita.testing.laws import check_laws
from partita.testing.regions import random_labels

__all__ = ["Tally", "fuzz", "main"]

_CHUNK = 50
#: From this many programs on, the share of legal partitions tells something.
_ENOUGH = 200


@dataclass(frozen=True, slots=True)
class Tally:
    """How many programs were tried, how many of their partitions were legal, and what broke."""

    tried: int = 0
    legal: int = 0
    broken: tuple[str, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.tried + other.tried, self.legal + other.legal, self.broken + other.broken)


def fuzz(first_seed: int, graphs: int) -> Tally:
    """Checks the laws for `graphs` programs from `first_seed` on."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    legal, broken = 0, []
    for seed in range(first_seed, first_seed + graphs):
        try:
            case = random_case(seed)
            legal += check_laws(case, random_labels(case.graph_module.graph, seed))
        except Exception as error:
            last = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else error.__traceback__)[-1]
            broken.append(f"seed {seed}: {error}\n  at {os.path.basename(last.filename)}:{last.lineno}")
    return Tally(graphs, legal, tuple(broken))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what broke; the status is 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000, help="how many programs (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, default=5, help="how many broken cases to print in full (default 5)")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    start, total = time.perf_counter(), Tally()
    starts = range(options.seed, options.seed + options.graphs, _CHUNK)
    sizes = [min(_CHUNK, options.seed + options.graphs - first) for first in starts]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for tally in pool.map(fuzz, starts, sizes):
            for case in tally.broken[: max(0, options.show - len(total.broken))]:
                print(f"\n{case}", flush=True)
            total += tally
    for title, count in Counter(case.partition(": ")[2].partition("\n")[0] for case in total.broken).most_common():
        print(f"{count} x {title}")
    seconds = time.perf_counter() - start
    print(f"\n{total.tried} programs, {total.legal} legal partitions, {len(total.broken)} broken, {seconds:.0f} s")
    if total.tried >= _ENOUGH and total.legal * 10 < total.tried:
        print("fewer than one partition in ten was legal: what refuses everything breaks no law")
        return 1
    return 1 if total.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
