"""`Lower`, the treatment that has a backend compile a region at its first call and runs it eagerly where that fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache
from typing import ClassVar, final

from torch import nn
from torch.fx import GraphModule

from partita._plain_help import PlainHelp
from partita._torch.fx.structural_hash import body_key, modules_key
from partita.analysis.modes import AMBIENT
from partita.analysis.modes import Mode as GraphMode
from partita.analysis.tolerance import EXACT, Tolerance
from partita.backends.backend import (
    Backend,
    find_backend,
    picks_kernels,
    takes_symbols,
    tolerance_of,
    trains,
    wants_constants,
)
from partita.errors import OptionError
from partita.lowering.cache_folder import CacheFolder, checked_root
from partita.lowering.compilation import Compiler
from partita.lowering.config import CudaGraphOptions, Lowering, ModeScope, effects_by_name
from partita.lowering.constants import state_inputs
from partita.lowering.cuda_graphs import assertions_in, static_inputs
from partita.lowering.lowered import Lowered
from partita.lowering.signature import DynamicSizes, traced_symbols
from partita.lowering.variant_cache import Variants, variants_for
from partita.plans.compilations import Compilations, Failure, Failures
from partita.plans.treatment import Site
from partita.program.program import Program, mutated_positions, tensors_with_hooks
from partita.regions import Region
from partita.rewrite.bodies import bare_body


@final
@dataclass(frozen=True, slots=True, repr=False)
class Lower(metaclass=PlainHelp):
    """Has `backend`, a name or a backend with options, compile the body at the first call.

    Example::

        from partita.backends import Inductor

        treatment = Lower("inductor")
        treatment = Lower(Inductor({"max_autotune": True}), strict=True)
        plan = partita.plan(program, ByModule("*"), Lower("aot_eager"))
        module = plan.apply().module()
        y = module(x)  # compiled now

    Another function is compiled for each new signature (dtypes, devices, sizes, strides, whether gradients are needed,
    modes), and the `max_variants` last used are kept. Sizes that were traced as symbols are symbols for the backend
    too, and so is a size that has changed; `dynamic=True` makes symbols of all sizes, `dynamic=False` of none. Where a
    compilation fails, the region runs eagerly and `plan.failures` says why; with `strict`, `LoweringError` is raised.
    `dumper` gets the text of the body and returns the tag under which a profiler shows the region; without it, the tag
    is `tag`, or the name of the region. `cache` is a folder for compiled functions, from which other processes load
    them; loading runs code.

    With `cuda_graphs` calls without gradients are recorded as CUDA graphs, for all sizes, or for those calls whose
    dynamic sizes are all among the given ones. Inputs are copied before a replay, except for parameters, buffers, and
    the inputs of the program that `static_inputs` names: these must stay where they are in memory, or are recorded
    again.
    """

    backend: str | Backend = "inductor"
    _: KW_ONLY
    dynamic: bool | None = None
    strict: bool = False
    max_variants: int = 8
    dumper: Callable[[str], str] | None = None
    tag: str | None = None
    cache: str | os.PathLike[str] | None = None
    cuda_graphs: bool | Collection[int] = False
    static_inputs: Collection[str] = ()

    #: They decide which code runs, so no plan file holds them.
    unsaved_options: ClassVar[frozenset[str]] = frozenset({"cache", "dumper"})
    #: A function is compiled for one mode.
    allows_mixed_modes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise OptionError(f"dynamic is True, False or None, not {self.dynamic!r}")
        if not isinstance(self.strict, bool):
            raise OptionError(f"strict is True or False, not {self.strict!r}")
        if type(self.max_variants) is not int or self.max_variants < 1:
            raise OptionError(
                f"max_variants is how many compiled functions a region keeps, at least 1, not {self.max_variants!r}"
            )
        if self.dumper is not None and not callable(self.dumper):
            raise OptionError(f"dumper is a function from the text of a body to a tag; {self.dumper!r} is none")
        if self.tag is not None and not isinstance(self.tag, str):
            raise OptionError(f"a tag is text, not {self.tag!r}")
        backend = _found(self.backend)
        if self.cache is not None:
            checked_root(self.cache)
            if not (hasattr(backend, "save") and hasattr(backend, "load")):
                raise OptionError(f"cache stores compiled functions, and {backend.name!r} has no `save` and `load`")
        self._check_cuda_graphs(backend)

    def _check_cuda_graphs(self, backend: Backend) -> None:
        sizes, names = self.cuda_graphs, self.static_inputs
        if not isinstance(sizes, bool):
            if not isinstance(sizes, Collection) or not sizes or any(type(one) is not int or one < 1 for one in sizes):
                raise OptionError(f"cuda_graphs is True, or the sizes to record, such as (1, 2, 4), not {sizes!r}")
            object.__setattr__(self, "cuda_graphs", tuple(sorted(set(sizes))))
        if (
            isinstance(names, str)
            or not isinstance(names, Collection)
            or not all(isinstance(one, str) for one in names)
        ):
            raise OptionError(f"static_inputs are names of inputs of the program, such as ('ids',), not {names!r}")
        object.__setattr__(self, "static_inputs", tuple(names))
        if names and not self.cuda_graphs:
            raise OptionError("static_inputs are for cuda_graphs, which is off")
        if self.cuda_graphs and dict(getattr(backend, "options", ())).get("triton.cudagraphs"):
            raise OptionError("Inductor's option 'triton.cudagraphs' records CUDA graphs as well; use one of the two")

    def __repr__(self) -> str:
        """With the options that differ from their defaults, since a plan prints it in every row."""
        arguments = [repr(self.backend)]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "backend" and value != option.default:
                arguments.append(f"{option.name}={value!r}")
        return f"Lower({', '.join(arguments)})"

    @property
    def tolerance(self) -> Tolerance:
        """That of the backend."""
        backend = self._backend_or_reason()
        return EXACT if isinstance(backend, str) else tolerance_of(backend)

    def treat(self, body: GraphModule) -> nn.Module:
        """The replacement for a region of which only the body is known."""
        return self._lowered(Program(body), "region", "the region", Failures(), Compilations(), frozenset(), None)

    def treat_at(self, body: GraphModule, site: Site) -> nn.Module:
        title = title_of(site)
        # A compiled function has one backward for all of its results, which reads all that was saved.
        later = names_mutated_later(body, site.region)
        program, nodes = Program(body, caller=site.caller), set(site.region.nodes)
        for hooked in () if site.program is None else site.program.once(tensors_with_hooks):
            if hooked.is_divided_by(nodes):
                registers = "registers" if hooked.is_certain else "may register (it calls an unknown function)"
                reason = (
                    f"{hooked.hook.name!r} {registers} a hook that gets gradients from inside and outside of the region"
                )
                return self._eager(program, Failure(site.region.name, str(self.backend), reason), site.failures)
        name, failures = site.region.name, site.failures
        return self._lowered(program, name, title, failures, site.compilations, later, site.region)

    def _lowered(
        self,
        program: Program,
        region: str,
        title: str,
        failures: Failures,
        compilations: Compilations,
        mutated_later: frozenset[str],
        cut: Region | None,
    ) -> nn.Module:
        backend = self._backend_or_reason()
        if isinstance(backend, str):
            return self._eager(program, Failure(region, str(self.backend), backend), failures)
        bare = bare_body(program)
        for node in bare.module.graph.nodes:
            reason = backend.refusal(node) if node.op.startswith("call_") else None
            if reason is not None:
                refused = f"it refuses this node: {reason or 'no reason given'}"
                return self._eager(program, Failure(region, backend.name, refused, node.name), failures)
        body, dynamic = Program(bare.module), self.dynamic if takes_symbols(backend) else False
        tag = self._tag(bare.module, region)
        constants = None
        if wants_constants(backend):
            constants = () if cut is None else state_inputs(bare.module, cut)
        lowering = Lowering(
            region,
            backend.name,
            trains=trains(backend),
            picks_kernels=picks_kernels(backend),
            scope=scope_of(bare.mode),
            effects=effects_by_name(body),
            mutated_inputs=body.once(mutated_positions),
            # An input that the body itself mutates must not be a copy.
            mutated_later=mutated_later.difference(body.index.nodes[at].name for at in body.effects.mutated_inputs),
            modules=modules_key(bare.module),
            dynamic_sizes=DynamicSizes(traced_symbols(body), dynamic),
            constants=constants,
            cuda_graphs=self._cuda_graph_options(bare.module, cut),
            strict=self.strict,
            tag=tag,
            title=title if tag == region else f"{title}, tagged {tag!r},",
            failures=failures,
            compilations=compilations,
        )
        if constants is None:
            variants = self._shared_variants(bare.module, backend, mutated_later, dynamic=dynamic)
        else:  # A function with folded weights is for this body alone.
            variants = Variants(backend, keep=self.max_variants)
        compilations.progress.expect(region, id(variants))  # Equal bodies share their variants.
        return Lowered(bare.module, lowering, variants)

    def _shared_variants(
        self, body: GraphModule, backend: Compiler, mutated_later: frozenset[str], *, dynamic: bool | None
    ) -> Variants:
        """The compiled functions of all bodies that equal this one, and those in the folder."""
        # Equal bodies may differ in which of their results are mutated later, and functions are specialized on that.
        places = tuple(at for at, node in enumerate(body.graph.nodes) if node.name in mutated_later)
        folder = None if self.cache is None else CacheFolder.of(self.cache, body, backend, dynamic, places)
        key = body_key(body)
        whole = None if key is None else (key, dynamic, places)
        return variants_for(whole, backend, keep=self.max_variants, folder=folder)

    def _cuda_graph_options(self, body: GraphModule, cut: Region | None) -> CudaGraphOptions | None:
        if not self.cuda_graphs:
            return None
        sizes = None if isinstance(self.cuda_graphs, bool) else tuple(self.cuda_graphs)
        static = () if cut is None else static_inputs(body, cut, tuple(self.static_inputs))
        return CudaGraphOptions(sizes, static, assertions_in(body))

    def _eager(self, program: Program, failure: Failure, failures: Failures) -> nn.Module:
        """The body itself, for a region that cannot be compiled for any inputs."""
        failures.report(failure, strict=self.strict)
        return program.graph_module

    def _backend_or_reason(self) -> Backend | str:
        try:
            return _found(self.backend)
        except OptionError as error:
            return str(error)

    def _tag(self, body: GraphModule, region: str) -> str:
        if self.dumper is None:
            return self.tag or region
        tag = self.dumper(body.print_readable(print_output=False))
        if not isinstance(tag, str):
            raise OptionError(f"a dumper returns a tag, which is text; {self.dumper!r} returned {tag!r}")
        return tag


def _found(wanted: str | Backend) -> Backend:
    return _found_by_name(wanted) if isinstance(wanted, str) else find_backend(wanted)


#: A search of the installed entry points takes milliseconds, and there may be hundreds of regions.
_found_by_name = cache(find_backend)


def title_of(site: Site) -> str:
    """The name of a region in a log."""
    return f"{site.region.name} (region {site.place + 1} of {site.count})"


def scope_of(mode: GraphMode) -> ModeScope | None:
    if mode == AMBIENT:
        return None
    autocast = tuple((one.device, one.dtype, one.enabled, one.cache) for one in mode.autocast)
    return ModeScope(mode.grad, mode.inference, autocast)


def names_mutated_later(body: GraphModule, region: Region) -> frozenset[str]:
    """The nodes of a region's body, inputs included, whose memory may be mutated between its forward and its backward.

    A compiler may save an output or an input for backward where eager mode saves another tensor.
    """
    mutations, sources = region.surroundings().mutations, region.inputs()
    computed = mutations.names_mutated_outside(region.nodes)
    mutated = mutations.later_mutators(sources, region.nodes)
    if not mutated:
        return computed
    inputs = {node.name for node in body.graph.find_nodes(op="placeholder")}
    # Inputs with other names than their sources, such as items of containers, may be any of these.
    unnamed = inputs.difference(node.name for node in sources)
    return computed | inputs.intersection(node.name for node in mutated) | unnamed
