"""Laws for treatments: whatever is lowered, recomputed, kept or mixed, the program is equivalent to the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from partita._torch.pytrees import flatten, map_tensors, tensors_in
from partita.analysis.effects.calls import tensors_of
from partita.analysis.nodes import find
from partita.analysis.tolerance import EXACT, Tolerance
from partita.backends import Backend, find_backend
from partita.backends.backend import tolerance_of
from partita.equivalence import Comparison, Difference, compare
from partita.equivalence.ambient import restored_ambient
from partita.equivalence.differences import value_difference
from partita.equivalence.state import storage_key
from partita.errors import CycleError, PartitaError, TreatmentError
from partita.plans import Plan, plan
from partita.policies import ByCapability, ByLabel
from partita.program.program import Program, summation_tolerance
from partita.recompute.keep import keepable
from partita.regions import Partition, Region
from partita.testing.generator.build import dump
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import ALL
from partita.testing.generator.regions import random_labels
from partita.testing.generator.state import clip_gradient, halve_gradient
from partita.testing.laws.core import LawError, equal, hold, law
from partita.testing.laws.mode_oracle import leaves_modes
from partita.treatments import Call, Keep, KeepEverything, KeepExpensive, KeepNothing, Lower, Mode, Recompute, Treatment


def check_lower_laws(case: Case, backend: str | Backend, seed: int) -> Plan:
    """Raises where the program differs with the regions of `random_capability` lowered; else returns the plan.

    The failures of the plan are the regions that were not compiled and ran eagerly.
    """
    found = find_backend(backend)
    lowering = _lowered(case, found, seed)
    with law(f"a program lowered by {found.name} is equivalent to the original", repr(case), lowering):
        comparison = _compared(case, lowering, lowering.apply())
        counted = statistics_are_counted(lowering)
        left = [one for one in comparison.differences if not is_allowed(one, comparison, counted=counted)]
        left = [one for one in left if not (_is_refused_gradient(one) and refuses_some_gradient(case))]
        left = [one for one in left if not (_is_added_gradient(one) and _has_hooks(case))]

        def again(other: Case) -> Comparison:
            planned = _lowered(other, found, seed)
            return _compared(other, planned, planned.apply(), _SINGLE)

        assert not left or _are_rounding(left, case, again), str(comparison)
    return lowering


def _lowered(case: Case, backend: Backend, seed: int) -> Plan:
    program = Program.of(case.graph_module)
    return plan(program, random_capability(program.graph, backend, seed), Lower(backend))


def _compared(case: Case, applied: Plan, after: Program, tolerance: Tolerance = EXACT) -> Comparison:
    own, program = case.copy(), applied.program
    tolerance |= after.tolerance | summation_tolerance(program)
    return compare(program, after, own.args, own.kwargs, tolerance=tolerance)


def _are_rounding(differences: Iterable[Difference], case: Case, compared: Callable[[Case], Comparison]) -> bool:
    """Whether these are gradients that do not differ once the case computes in double precision.

    Large terms that cancel, such as those of a norm of equal values, leave a rounding error that no tolerance for the
    result allows. In double precision it is small, and a wrong gradient is as wrong as before.
    """
    if any(one.kind != "gradient" for one in differences) or _share_memory(case):
        return False
    comparison = compared(_in_double_precision(case))
    return comparison.equal and not comparison.raised


#: What single precision rounds; the sums of a program in double precision are far below it.
_SINGLE = Tolerance(rounding=torch.finfo(torch.float32).eps)


def _in_double_precision(case: Case) -> Case:
    own = case.copy()
    own.graph_module.double()
    tree = flatten((own.args, own.kwargs))
    args, kwargs = tree.rebuilt(map(_as_double, tree.leaves))
    return replace(own, args=args, kwargs=kwargs)


def _as_double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().double().requires_grad_(leaf.requires_grad)


def is_allowed(difference: Difference, comparison: Comparison, *, counted: bool, other_errors: bool = False) -> bool:
    """Compiled code has gradients where autograd refuses them for a view whose base was mutated without its knowledge.

    Other treatments may refuse them with `other_errors`, and need not refuse a view that autograd takes for a leaf: it
    does after a mutation of its base by something with a gradient, until its `grad_fn` is asked for (2.13). Where
    compiled code mutates statistics that a norm has saved which is not compiled, autograd refuses the backward, as it
    does where `torch.compile` compiles one of two calls of a norm (2.13).
    """
    if _is_after_exception(difference, comparison):
        return True
    if other_errors and difference.kind == "exception" and difference.where == "the call":
        return _TAKEN_FOR_LEAF in difference.detail and difference.detail.endswith("!= no exception")
    if difference.kind != "exception" or difference.where != "backward":
        return False
    if counted and _is_refused_gradient(difference):
        return True
    if difference.detail.endswith("!= no exception"):
        return True
    return other_errors and not difference.detail.startswith("no exception")


def _is_refused_gradient(difference: Difference) -> bool:
    is_backward = difference.kind == "exception" and difference.where == "backward"
    return is_backward and _REFUSED in difference.detail


def _is_added_gradient(difference: Difference) -> bool:
    return difference.kind == "gradient" and difference.detail == "none != a gradient"


def _has_hooks(case: Case) -> bool:
    """Whether a tensor has a hook: a compiled region passes zeros to it where eager mode does not call it."""
    return any(node.target in (clip_gradient, halve_gradient) for node in case.graph_module.graph.nodes)


_REFUSED = "modified by an inplace operation"
_TAKEN_FOR_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"


def refuses_some_gradient(case: Case) -> bool:
    """Whether autograd refuses the gradient of a value of the original, which its outputs may not depend on.

    The backward of a compiled region is one, and passes zeros to inputs that are independent of the loss, so that it
    can reach such a value.
    """
    own = case.copy()
    graph, made = own.graph_module.graph, [node for node in own.graph_module.graph.nodes if node.op.startswith("call")]
    graph.output_node().args = (made,)
    own.graph_module.recompile()
    with torch.enable_grad():
        values = tensors_in(own.graph_module(*map_tensors(_differentiable, own.args), **own.kwargs))
    return any(map(_is_refused, values))


def _differentiable(tensor: Tensor) -> Tensor:
    # A leaf could not be mutated.
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _is_refused(value: Tensor) -> bool:
    try:
        if value.grad_fn is not None:
            torch.autograd.backward([value], [torch.ones_like(value)], retain_graph=True)
    except RuntimeError as error:
        return _REFUSED in str(error)
    return False


def _is_after_exception(difference: Difference, comparison: Comparison) -> bool:
    """Whether a value differs after a call in which the original raises: what is independent may have run before that.

    Mutations of different tensors, and what a region does as one, are not ordered against a node that raises.
    """
    raising = {
        note.partition(": the original raises")[0] for note in comparison.notes if ": the original raises" in note
    }
    return difference.kind == "value" and difference.when in raising


def statistics_are_counted(lowering: Plan) -> bool:
    """Whether a lowered region and other code call one norm.

    A region may run eagerly for a call, where version counters miss mutations of statistics that compiled code counts.
    """
    program, owner = lowering.program, lowering.partition.owner
    lowered = {place for place, treatment in enumerate(lowering.treatments) if isinstance(treatment, Lower)}
    callers: dict[int, set[int]] = {}
    for number, node in enumerate(program.index.nodes):
        module = find(program.graph_module, str(node.target)) if node.op == "call_module" else None
        statistics = getattr(module, "running_mean", None)
        if statistics is not None:
            callers.setdefault(id(statistics), set()).add(owner[number])
    return any(len(places) > 1 and not places.isdisjoint(lowered) for places in callers.values())


def random_capability(graph: Graph, backend: Backend, seed: int) -> ByCapability:
    """The policy of that number: what the backend supports, less some nodes at random, for one backend or for two."""
    source = Random(seed)
    ranks = {node: source.random() for node in graph.nodes}
    share = source.choice((0.0, 0.1, 0.3, 0.6))
    connected = source.random() < 0.3
    min_size, max_size = source.choice((1, 1, 2, 4)), source.choice((None, None, 5))
    devices_apart = source.random() < 0.7
    shares = (0.6, share / 2) if source.random() < 0.4 else (share,)
    return ByCapability(
        tuple(_Picky(backend, ranks, refused) for refused in shares),
        connected=connected,
        min_size=min_size,
        max_size=max_size,
        devices_apart=devices_apart,
    )


@final
class _Picky:
    """Refuses what the backend refuses, and this share of the other nodes."""

    def __init__(self, backend: Backend, ranks: dict[Node, float], share: float) -> None:
        self._backend, self._ranks, self._share = backend, ranks, share
        self.__name__ = f"{backend.name}_{share:.0%}".removesuffix("%")

    def __call__(self, node: Node) -> str | None:
        return "no" if self._ranks[node] < self._share else self._backend.refusal(node)


# Recomputation.


#: How many roundings a sum in another order may be off, of the size of its largest gradient.
_ROUNDINGS = 16


def check_recompute_laws(case: Case, seed: int) -> str | None:
    """Raises where a law is broken; where `random_recomputation` is refused, the words of the refusal."""
    program, before = Program.of(case.graph_module), dump(case.graph_module)
    try:
        after = recomputed(program, seed)
    except TreatmentError as refusal:
        hold("the input is unchanged after an error", case, lambda: equal(dump(case.graph_module), before))
        return str(refusal)
    hold("a recomputed program is equivalent to the original", case, partial(_means_the_same, case, program, after))
    hold("losses that go back one after the other have the same gradients", case, partial(_same_losses, case, seed))
    hold("the input is unchanged", case, lambda: equal(dump(case.graph_module), before))
    return None


def random_recomputation(program: Program, seed: int) -> Plan:
    """The plan of that number: some regions are recomputed, keeping something, and some are called."""
    source = Random(seed)
    partition = random_partition(program, source, seed)
    keeps = [random_keep(program, source) for _ in range(3)]
    share = source.choice((0.0, 0.0, 0.3))
    treatments = {region.name: _recompute_or_call(source, keeps, share) for region in partition}
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
        if number in program.effects.barriers or program.calls.of(node).own_generator:
            yield node


def random_keep(program: Program, source: Random) -> Keep:
    """What a region keeps: nothing, everything, what is expensive, or nodes at random."""
    share = source.choice((0.1, 0.3, 0.6))
    chosen = {node.name for node in program.graph.nodes if source.random() < share}
    return source.choice((KeepNothing(), KeepEverything(), KeepExpensive(1e-9), partial(_chosen, chosen)))


def _chosen(names: set[str], region: Region) -> list[Node]:
    return [node for node in keepable(region) if node.name in names]


def _recompute_or_call(source: Random, keeps: list[Keep], share: float) -> Treatment:
    return Call() if source.random() < share else Recompute(source.choice(keeps))


def _means_the_same(case: Case, program: Program, after: Program) -> None:
    own = case.copy()
    comparison = compare(program, after, own.args, own.kwargs, tolerance=after.tolerance)
    # Where the original's own backward raises, a recomputed one may succeed, or say something else.
    allowed = [is_allowed(one, comparison, counted=False, other_errors=True) for one in comparison.differences]
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
    values = [*flatten((case.args, case.kwargs)).leaves, *case.graph_module.parameters()]
    leaves = [leaf for leaf in values if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]
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


# Several treatments in one plan: regions that are called, compiled, recomputed or wrapped in modes.


def check_mixed_law(case: Case, backend: str | Backend, seed: int) -> tuple[Plan, Program]:
    """Raises where the program differs once `random_mixture` is applied; else the plan and the result."""
    found = find_backend(backend)
    mixture, after = _mixed(case, found, seed)
    with law("a program with several treatments is equivalent to the original", repr(case), mixture):
        comparison = _compared(case, mixture, after, tolerance_of(found))
        allows = partial(is_allowed, comparison=comparison, counted=statistics_are_counted(mixture), other_errors=True)
        left = [one for one in comparison.differences if not allows(one)]

        def again(other: Case) -> Comparison:
            return _compared(other, *_mixed(other, found, seed), tolerance_of(found) | _SINGLE)

        assert not left or _are_rounding(left, case, again), str(comparison)
    return mixture, after


def _mixed(case: Case, backend: Backend, seed: int) -> tuple[Plan, Program]:
    return random_mixture(Program.of(case.graph_module), backend, seed, wraps_modes=not leaves_modes(case))


def random_mixture(program: Program, backend: Backend, seed: int, *, wraps_modes: bool = True) -> tuple[Plan, Program]:
    """The plan of that number, and the program with it: a region that refuses its treatment is called instead.

    Operators put back the modes that they find, so that a program which leaves modes switched is not to be wrapped.
    """
    source = Random(seed)
    partition = random_partition(program, source, seed)
    treatments = {region.name: _treatment(program, region, backend, source) for region in partition}
    if not wraps_modes:
        treatments = {name: Call() if isinstance(one, Mode) else one for name, one in treatments.items()}
    for region in partition:
        try:
            plan(program, Partition(program, (region,)), treatments[region.name]).apply()
        except PartitaError:
            treatments[region.name] = Call()
    mixture = plan(program, partition, treatments)
    return mixture, mixture.apply()


def _treatment(program: Program, region: Region, backend: Backend, source: Random) -> Treatment:
    takes_all = not any(backend.refusal(node) for node in region.nodes)
    kinds: list[Treatment] = [Call(), Mode(), Recompute(random_keep(program, source))]
    return source.choice([*kinds, Lower(backend), Lower(backend)] if takes_all else kinds)


# Recomputed programs that are compiled.


#: What torch.compile takes in one graph, most of the time: no lists that are mutated, no numbers read from tensors (an
#: operator's body cannot return them), no inference mode (torch fails at views there), nothing unknown.
COMPILABLE = replace(ALL, containers=False, lists=False, items=False, inference=False, unknown=False, hooks=False)

#: A graph with inputs to train and no result to train with has no backward, and torch takes no random numbers there.
#: Some such graphs, whose results are views of what needs gradients, it partitions, and looks for a tangent in vain.
_WITHOUT_BACKWARD = ("does not support RNG ops in recompute regions", "Couldn't find tangent node in graph inputs")


#: How torch (2.13) refuses a graph in which inputs share memory and are mutated, in a body though not in a flat graph.
_REFUSALS = ("aot_autograd() does not yet handle", "please report a bug to PyTorch")


#: How torch's partitioner (2.13) fails where two checkpoints have equal operators of several results.
_MERGED = "cannot save: non-tensor output"


def check_compiled_recompute_law(case: Case, compiler: str, seed: int) -> str | None:
    """Raises where the compiled program differs from the compiled original and from the original itself.

    Where the law says nothing, the reason: the plan was refused, or `torch.compile` does not take the original.
    """
    program = Program.of(case.graph_module)
    try:
        after = recomputed(program, seed)
    except TreatmentError as refusal:
        return str(refusal)
    plain, found = _Compiled(program.module(), compiler), _Compiled(after.module(), compiler)
    tolerance = tolerance_of(find_backend(compiler)) | after.tolerance | summation_tolerance(program)
    own = case.copy()

    def compared(one: Any) -> Comparison:
        torch.compiler.reset()
        return compare(one, found, own.args, own.kwargs, tolerance=tolerance, other_shapes=False)

    comparison = compared(plain)
    if plain.failure is not None:
        return f"torch.compile does not take the original: {plain.failure}"
    if comparison.equal or any(refusal in str(found.failure) for refusal in _WITHOUT_BACKWARD):
        return None
    if _share_memory(own) and any(refusal in str(found.failure) for refusal in _REFUSALS):
        return f"torch.compile does not take bodies whose inputs share memory: {found.failure}"
    if _MERGED in str(found.failure):
        return f"torch merges equal operators of two checkpoints, and cannot partition their graph: {found.failure}"
    # Where the compiled original is wrong itself, it is enough to be like the original.
    found_in = _places(comparison.differences) & _places(compared(program).differences)
    if not found_in:
        return None
    if _share_memory(own) and found_in <= _places(filter(_is_view_of_parameter, comparison.differences)):
        return "torch returns a view of a parameter in its place, by the order of inputs, where some share memory"
    title = f"compiled by {compiler}, a recomputed program is equivalent to the original"
    raise LawError(f"{title}\n{case!r}\n{comparison}\n{found.failure or ''}")


def _places(differences: Iterable[Difference]) -> set[tuple[str, str, str]]:
    """What differs where and when; only graphs name the nodes of their outputs."""
    return {(found.kind, found.where.partition(" (node ")[0], found.when) for found in differences}


def _share_memory(case: Case) -> bool:
    """Whether two tensors among arguments and state are one memory: AOTAutograd makes one input of them (2.13)."""
    tensors = {id(leaf): leaf for leaf in flatten((case.args, case.kwargs)).leaves if isinstance(leaf, Tensor)}
    tensors |= {id(tensor): tensor for tensor in tensors_of(case.graph_module)}
    return len({storage_key(tensor) for tensor in tensors.values()}) < len(tensors)


def _is_view_of_parameter(difference: Difference) -> bool:
    return difference.kind == "type" and difference.detail == "Parameter != Tensor"


@final
class _Compiled:
    """A compiled module, with the state of the module itself, and what was wrong when a call first failed."""

    def __init__(self, module: nn.Module, compiler: str) -> None:
        self.__self__ = module
        self.failure: Exception | None = None
        self._call = torch.compile(module, backend=compiler, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except Exception as error:
            # Dynamo (2.13) may give another reason when a function is called again whose compilation failed.
            self.failure = self.failure or error
            raise
