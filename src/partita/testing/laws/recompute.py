"""Laws for recomputation: whatever is recomputed and whatever kept, the program is equivalent to the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.pytrees import flatten
from partita.analysis.tolerance import EXACT, Tolerance
from partita.equivalence import compare
from partita.equivalence.ambient import restored_ambient
from partita.equivalence.differences import value_difference
from partita.errors import CycleError, TreatmentError
from partita.plans import Plan, plan
from partita.policies import ByLabel
from partita.program.program import Program
from partita.recompute.keep import keepable
from partita.recompute.recompute import uses_own_generator
from partita.regions import Partition, Region
from partita.testing.generator.build import dump
from partita.testing.generator.draft import Case
from partita.testing.generator.regions import random_labels
from partita.testing.laws.core import LawError
from partita.testing.laws.lowering import is_allowed
from partita.treatments import Call, Keep, KeepEverything, KeepExpensive, KeepNothing, Recompute, Treatment

#: How many roundings a sum in another order may be off, of the size of its largest gradient.
_ROUNDINGS = 16


def check_recompute_laws(case: Case, seed: int) -> str | None:
    """Raises where a law is broken; where `random_recomputation` is refused, the words of the refusal."""
    program, before = Program.of(case.graph_module), dump(case.graph_module)
    try:
        after = recomputed(program, seed)
    except TreatmentError as refusal:
        _hold("the input is unchanged after an error", case, lambda: _equal(dump(case.graph_module), before))
        return str(refusal)
    _hold("a recomputed program is equivalent to the original", case, partial(_means_the_same, case, program, after))
    _hold("losses that go back one after the other have the same gradients", case, partial(_same_losses, case, seed))
    _hold("the input is unchanged", case, lambda: _equal(dump(case.graph_module), before))
    return None


def random_recomputation(program: Program, seed: int) -> Plan:
    """The plan of that number: some regions are recomputed, keeping something, and some are called."""
    source = Random(seed)
    partition = random_partition(program, source, seed)
    keeps = [random_keep(program, source) for _ in range(3)]
    share = source.choice((0.0, 0.0, 0.3))
    treatments = {region.name: _treatment(source, keeps, share) for region in partition}
    return plan(program, partition, treatments)


def recomputed(program: Program, seed: int) -> Program:
    """The program with the plan of that number; of some, regions that hold recomputed regions are recomputed again."""
    after = random_recomputation(program, seed).apply()
    return random_recomputation(after, seed + 1).apply() if seed % 3 == 0 else after


def random_partition(program: Program, source: Random, seed: int) -> Partition:
    """Regions without what cannot be recomputed, most of the time."""
    refused = set(_refused(program)) if source.random() < 0.8 else set[Node]()
    if source.random() < 0.5:
        labels = random_labels(program.graph, seed)
        try:
            return ByLabel(lambda node: None if node in refused else labels.get(node.name))(program)
        except CycleError:
            pass  # Parts in series are always legal.
    operators = program.operators()
    cuts = [source.randrange(len(operators) + 1) for _ in range(source.choice((0, 1, 2, 4)))]
    cuts += [place for place, node in enumerate(operators) if node in refused]
    places = {node: sum(cut <= place for cut in cuts) for place, node in enumerate(operators) if node not in refused}
    return ByLabel(places.get)(program)


def _refused(program: Program) -> Iterator[Node]:
    for number, node in enumerate(program.index.nodes):
        if number in program.effects.barriers or uses_own_generator(node):
            yield node


def random_keep(program: Program, source: Random) -> Keep:
    """What a region keeps: nothing, everything, what is expensive, or nodes at random."""
    share = source.choice((0.1, 0.3, 0.6))
    chosen = {node.name for node in program.graph.nodes if source.random() < share}
    return source.choice((KeepNothing(), KeepEverything(), KeepExpensive(1e-9), partial(_chosen, chosen)))


def _chosen(names: set[str], region: Region) -> list[Node]:
    return [node for node in keepable(region) if node.name in names]


def _treatment(source: Random, keeps: list[Keep], share: float) -> Treatment:
    return Call() if source.random() < share else Recompute(source.choice(keeps))


def _hold(title: str, case: Case, law: Callable[[], None]) -> None:
    try:
        law()
    except Exception as error:
        raise LawError(f"{title}\n{case!r}\n{type(error).__name__}: {error}") from error


def _means_the_same(case: Case, program: Program, after: Program) -> None:
    own = case.copy()
    comparison = compare(program, after, own.args, own.kwargs, tolerance=after.tolerance)
    # Where the original's own backward raises, a recomputed one may succeed, or say something else.
    allowed = [is_allowed(one, counted=False, other_errors=True) for one in comparison.differences]
    assert all(allowed), str(comparison)


def _same_losses(case: Case, seed: int) -> None:
    plain, other = case.copy(), case.copy()
    after = recomputed(Program.of(other.graph_module), seed)
    retain = seed % 2 == 0
    expected = _gradients(plain, plain.graph_module, retain=retain)
    for place, (ones, others) in enumerate(
        zip(expected, _gradients(other, after.module(), retain=retain), strict=False)
    ):
        if isinstance(ones, Exception):
            return
        assert not isinstance(others, Exception), f"loss {place}: {type(others).__name__}: {others}"
        assert len(ones) == len(others), f"loss {place}: {len(ones)} gradients are {len(others)}"
        for number, (one, two) in enumerate(zip(ones, others, strict=True)):
            words = _difference(one, two, after.tolerance.rounding)
            assert words is None, f"loss {place}, gradient {number}: {words}"


def _gradients(case: Case, call: Callable[..., Any], *, retain: bool) -> Iterator[list[Tensor | None] | Exception]:
    """For each result by itself, the gradients of all leaves; with `retain`, the graph is kept for the next."""
    given = [*flatten((case.args, case.kwargs)).leaves, *case.graph_module.parameters()]
    leaves = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]
    with restored_ambient(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            results = flatten(call(*case.args, **case.kwargs)).leaves
        except Exception as error:
            yield error
            return
    losses = [leaf for leaf in dict.fromkeys(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    for loss in losses if leaves else ():
        try:
            with torch.enable_grad():
                yield list(torch.autograd.grad(loss.sum(), leaves, retain_graph=retain, allow_unused=True))
        except Exception as error:
            yield error


def _difference(one: Tensor | None, two: Tensor | None, rounding: float) -> str | None:
    """What to say about two gradients; where uses run in another order than before, sums may round otherwise."""
    if one is None or two is None:
        return None if one is two else f"{one} != {two}"
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return f"{one.dtype} of shape {tuple(one.shape)} != {two.dtype} of shape {tuple(two.shape)}"
    if not rounding or not one.numel():
        return value_difference(one, two, EXACT)
    unit = max(rounding, torch.finfo(one.dtype).eps)
    largest = float(one.detach().abs().nan_to_num(posinf=0.0).max())
    return value_difference(one, two, Tolerance(absolute=_ROUNDINGS * unit * largest))


def _equal(found: object, expected: object) -> None:
    assert found == expected, f"{found}\nwas\n{expected}"
