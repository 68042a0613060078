"""Plans in files: which treatments one may name, and how it is written and read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import is_dataclass

from torch.export import ExportedProgram
from torch.fx import GraphModule

from partita import treatments
from partita.errors import OptionError, PlanFileError
from partita.plans import Plan
from partita.plans.files import Known, read_plan, write_plan
from partita.program.program import Program
from partita.treatments.basic import Mark

#: Those of the public names that have options.
_OURS = [cls for cls in map(vars(treatments).get, treatments.__all__) if isinstance(cls, type) and is_dataclass(cls)]


def save_plan(plan: Plan, path: str | os.PathLike[str], *, classes: Iterable[type] = ()) -> None:
    """Writes a plan as JSON. `classes` are treatments of your own, dataclasses whose options are plain values."""
    _check_marks(plan)
    write_plan(plan, path, _known(classes))


def load_plan(
    path: str | os.PathLike[str],
    program: Program | GraphModule | ExportedProgram,
    *,
    classes: Iterable[type] = (),
) -> Plan:
    """The plan of a file for the program that it was made for, captured again if need be, before or after it was saved.

    A file has each mode block of a program as one operator. Where the plan was made for the mode blocks in the other
    form, `plan.program` is this program in that form. The file is data: nothing in it is imported or run. A treatment
    of your own is found among `classes`, by its name.
    """
    plan = read_plan(path, program if isinstance(program, Program) else Program.of(program), _known(classes))
    _check_marks(plan)
    return plan


def _check_marks(plan: Plan) -> None:
    """Raises if a treatment would replace metadata of torch or Partita.

    Compilers, printers and savers of graphs read it, rely on its type, and write some of it into code.
    """
    for treatment in plan.treatments:
        if not isinstance(treatment, Mark):
            continue
        key = treatment.key
        if not isinstance(key, str) or key in _KEYS_OF_TORCH or key.startswith("partita_"):
            raise PlanFileError(
                f"{str(treatment)[:80]} replaces what torch or Partita keeps in the metadata of nodes under this key, "
                "and no plan of a file does; choose another key, a text"
            )


#: Under which torch 2.13 reads from the nodes of graphs that it compiles, prints or saves.
_KEYS_OF_TORCH = frozenset(
    (
        *("ac_graph_id", "arg_kwarg_vals", "autograd_backward", "custom", "desc", "dislike_padding"),
        *("dynamo_flat_name_to_original_fqn", "eager_input_vals", "example_value", "from_node"),
        *("fusion_meta", "fwd_nn_module_stack", "fwd_source_fn_stack", "grapharg", "has_backward_hook"),
        *("inductor_realize_to_strides", "is_wrapped", "local_map_kwargs", "nested_region_config"),
        *("nn_module_stack", "original_aten", "original_output_strides", "partitioner_tag", "recompute"),
        *("saved_for_offloading", "saved_for_quantization", "seq_nr", "should_fallback"),
        *("source_fn_stack", "stack_trace", "symbol", "tensor_dict", "tensor_meta", "torch_fn"),
        *("unbacked_bindings", "user_cache_hash", "user_visible_output_idxs", "val"),
    )
)


def _known(classes: Iterable[type]) -> Known:
    known: dict[str, type] = {cls.__name__: cls for cls in _OURS}
    for cls in classes:
        if not isinstance(cls, type):
            raise OptionError(f"classes are classes of treatments, not {cls!r}")
        if known.setdefault(cls.__name__, cls) is not cls:
            raise OptionError(f"two classes are called {cls.__name__!r}; a file names classes, so rename one")
    return known
