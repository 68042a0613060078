"""Regions of generated programs: what is predicted is what torch's own checkpoint really holds and computes again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.plans.helpers import KNOWN, Checkpoint, backward_flops, bytes_really_held, random_traced_case
from torch import Tensor, nn

import partita
from partita import Plan, Program
from partita._torch.modes import read_ambient, restore_autocast
from partita._torch.pytrees import flatten
from partita.plans.memory import saved_memory
from partita.policies import BySize
from partita.program.saved_tensors import SavedTensors, saved_tensors_of
from partita.testing.generator.draft import Case

T = TypeVar("T")

#: Hooks see no tensors in lists, torch's checkpoint saves no inference tensors, and what reads numbers is not traced.
_FEATURES = replace(KNOWN, mutations=False, lists=False, items=False, inference=False)


@pytest.mark.parametrize("seeds", slow_but([range(70), range(70, 200)], range(70)))
def test_regions_hold_and_compute_again_what_was_predicted(seeds: range) -> None:
    holding = computing = 0
    for seed in seeds:
        case = random_traced_case(seed, features=_FEATURES)
        case.graph_module.graph.eliminate_dead_code()
        case.graph_module.recompile()
        plan, saved = _plan(case, seed), saved_tensors_of(Program.of(case.graph_module))
        if saved.reason is not None or not _is_seen_by_hooks(saved):
            continue
        total = saved_memory(plan.partition, plan.treatments).total
        assert total is not None
        assert total.plain_bytes == _measured(case, bytes_really_held), seed
        assert total.treated_bytes == _measured(case, bytes_really_held, seed=seed), seed
        holding += bool(total.treated)
        if _has_backward(case):
            assert total.extra_flops == _measured(case, _flops, seed=seed) - _measured(case, _flops), seed
            computing += bool(total.extra_flops)
    assert holding > len(seeds) // 10
    assert computing > len(seeds) // 40


def _plan(case: Case, seed: int) -> Plan:
    return partita.plan(Program.of(case.graph_module), BySize(operators=1 + seed % 6), Checkpoint())


def _is_seen_by_hooks(saved: SavedTensors) -> bool:
    """Whether what hooks see is what is held.

    What is saved and not needed is let go of, unless a region that is held reads it. torch's checkpoint keeps no copies
    of what a region writes, and an LSTM of oneDNN has a workspace of unknown size.
    """
    runs = saved.nodes.values()
    return not (
        any(run.flops_until_saved is not None and not run.saves for run in runs)
        or any(run.mutates for run in runs)
        or "lstm" in str(saved.program.graph)
    )


def _measured(case: Case, measure: Callable[[nn.Module, Callable[[], Any]], T], seed: int | None = None) -> T:
    """What a copy of the case shows, cut if there is a seed."""
    own, ambient = case.copy(), read_ambient()
    module = own.graph_module if seed is None else _plan(own, seed).apply().module()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return measure(module, lambda: module(*own.args, **own.kwargs))
    finally:
        restore_autocast(ambient)


def _flops(module: nn.Module, call: Callable[[], Any]) -> int:
    return backward_flops(call)


def _has_backward(case: Case) -> bool:
    def gives_gradients(module: nn.Module, call: Callable[[], Any]) -> bool:
        leaves = flatten(call()).leaves
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)

    return _measured(case, gives_gradients)
