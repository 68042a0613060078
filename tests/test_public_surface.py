"""The public names, listed, so that adding one is a decision."""

from __future__ import annotations

import importlib
import pydoc
import re
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_origin

import pytest
import torch
from torch.fx import symbolic_trace

from partita import Program

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

PUBLIC = {
    "partita": {
        "Bisection",
        "Comparison",
        "Partition",
        "Plan",
        "Policy",
        "Program",
        "Region",
        "Report",
        "Tolerance",
        "TrainEval",
        "Treatment",
        "bisect",
        "capture",
        "capture_joint",
        "compare",
        "dissolve",
        "fingerprint",
        "fit",
        "gather",
        "hops",
        "inline",
        "load_plan",
        "mode_tree",
        "outline",
        "plan",
        "report",
        "save_plan",
        "verify",
    },
    "partita.reports": {"Report", "report"},
    "partita_cli": {"main"},
    "partita.memory": {
        "MemoryBudget",
        "MemoryPlan",
        "Moment",
        "Occupant",
        "Picture",
        "Rates",
        "SegmentChoice",
        "StepMemory",
        "StepMemoryPlan",
        "StepMoment",
        "StepPart",
        "Timeline",
        "budget_curve",
        "communication_bytes",
        "fit",
        "measure_rates",
        "measured_peak",
        "step_memory",
    },
    "partita.policies": {
        "AroundOperators",
        "ByAnnotation",
        "ByCapability",
        "ByLabel",
        "ByMode",
        "ByModule",
        "BySize",
        "InForward",
        "Policy",
        "Repeats",
        "SplitAt",
    },
    "partita.treatments": {
        "Call",
        "Delegate",
        "Keep",
        "KeepAtMost",
        "KeepEverything",
        "KeepExpensive",
        "KeepNodes",
        "KeepNothing",
        "KeepOperators",
        "LeaveEager",
        "Lower",
        "Mark",
        "Mode",
        "Recompute",
        "Treatment",
    },
    "partita.recompute.keep": {
        "Keep",
        "KeepAtMost",
        "KeepEverything",
        "KeepExpensive",
        "KeepNodes",
        "KeepNothing",
        "KeepOperators",
        "gives_tensors",
        "keepable",
    },
    "partita.backends": {
        "AotEager",
        "AotInductor",
        "Backend",
        "Compiled",
        "Eager",
        "Inductor",
        "backend_names",
        "find_backend",
        "register_backend",
    },
    "partita.hops": {
        "call",
        "wrap",
        "wrap_with_autocast",
        "wrap_with_inference_mode",
        "wrap_with_set_grad_enabled",
    },
    "partita.recompute": {
        "Keep",
        "KeepAtMost",
        "KeepEverything",
        "KeepExpensive",
        "KeepNodes",
        "KeepNothing",
        "KeepOperators",
        "Recompute",
        "keep",
        "tag_activation_checkpoint",
        "wrap_activation_checkpoint",
    },
    "partita.dissolve": {"dissolve"},
    "partita.rewrite": {"gather", "inline", "outline"},
    "partita.plans": {
        "Called",
        "CompiledBody",
        "DistinctBody",
        "Explanation",
        "Failure",
        "Excluded",
        "ModeTree",
        "Plan",
        "Policy",
        "Site",
        "Treatment",
        "mode_tree",
        "plan",
    },
    "partita.plans.memory": {
        "SavedBytes",
        "SavedMemory",
        "ReportsSavedBytes",
        "saved_bytes_of",
        "saved_memory",
    },
    "partita.equivalence": {
        "Bisection",
        "Comparison",
        "Difference",
        "Tolerance",
        "bisect",
        "compare",
        "verify",
    },
    "partita.program.joint": {
        "Joint",
        "SavedStorage",
    },
    "partita.program.archives": {
        "ArchiveReport",
        "Kind",
        "Member",
        "Problem",
        "inspect_archive",
        "load_exported",
    },
    "partita.compat.fuser_utils": {
        "erase_nodes",
        "fuse_as_graphmodule",
        "fuse_by_partitions",
        "insert_subgm",
        "legalize_graph",
        "topo_sort",
        "validate_partition",
    },
    "partita.compat.partial_lower": {
        "MIN_ATEN_OPS_TO_LOWER",
        "partial_lower",
    },
    "partita.compat.partitioner": {
        "CapabilityBasedPartitioner",
        "Partition",
    },
    "partita.compat.regional_inductor": {
        "regional_inductor",
    },
    "partita.compat.replace_autocast_with_hop_pass": {
        "replace_autocast_with_hop_pass",
    },
    "partita.compat.replace_set_grad_with_hop_pass": {
        "replace_set_grad_with_hop_pass",
    },
    "partita.compat.split_module": {
        "Partition",
        "split_module",
        "split_module_simple",
    },
    "partita.compat.utils": {
        "node_inline_",
        "node_replace_",
        "nodes_count",
        "nodes_filter",
        "nodes_first",
        "nodes_map",
        "sequential_split",
    },
    "partita.compat.replace_with_hop_pass_util": {
        "_replace_with_hop_helper",
        "_replace_with_hop_pass_helper",
        "_sequential_split_and_maybe_inline_subgraphs_helper",
    },
    "partita.compat.wrap": {
        "TagActivationCheckpoint",
        "Wrap",
        "WrapActivationCheckpoint",
        "WrapWithAutocast",
        "WrapWithSetGradEnabled",
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    },
    "partita.capture": {
        "TrainEval",
        "capture",
        "capture_joint",
    },
    "partita.torch_compile": {
        "FramePlan",
        "InputKind",
        "backend",
        "input_kinds",
        "joint_partition",
        "memory_partition",
        "plans",
    },
    "partita.testing": {
        "BackendReport",
        "BrokenLaw",
        "check_backend",
        "nests",
        "check_mode_laws",
        "check_export_laws",
        "MODE_LAWS",
        "EXPORTABLE",
        "ALL",
        "CAPTURES",
        "LAWS",
        "Case",
        "Features",
        "Input",
        "Labelling",
        "Labels",
        "LawError",
        "Recipe",
        "Step",
        "build",
        "captured_case",
        "captured_programs",
        "check_laws",
        "label",
        "labelled_programs",
        "labellings",
        "programs",
        "random_case",
        "random_crossing",
        "random_labelling",
        "random_labels",
        "random_nest",
        "random_recipe",
        "recipes",
    },
    "partita.errors": {
        "ArchiveError",
        "BackendError",
        "BrokenGraphError",
        "BudgetError",
        "CallbackError",
        "CaptureError",
        "CycleError",
        "LoweringError",
        "MissingLabelError",
        "MissingTargetError",
        "ModeError",
        "NoMatchError",
        "NotPicklableError",
        "OptionError",
        "PartitaError",
        "PlanFileError",
        "RecomputeError",
        "RegionError",
        "SignatureError",
        "TreatmentError",
        "UnknownNodeError",
        "UntrustedArchiveError",
        "VerificationError",
    },
}


def _entry_points() -> list[str]:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return [target for group in groups for target in group.values()]


@pytest.mark.parametrize("module_name", PUBLIC)
def test_public_names_are_the_listed_ones(module_name: str) -> None:
    exported = importlib.import_module(module_name).__all__
    assert set(exported) == PUBLIC[module_name]
    assert len(exported) == len(set(exported)), "a name is exported twice"


@pytest.mark.parametrize("module_name", PUBLIC)
def test_public_names_exist_and_say_what_they_are(module_name: str) -> None:
    module = importlib.import_module(module_name)
    # An alias of a type has no docstring of its own; a comment above it says what it is.
    named = [name for name in module.__all__ if get_origin(getattr(module, name)) is None]
    assert [name for name in named if not (getattr(module, name).__doc__ or "").strip()] == []


@pytest.mark.parametrize("target", _entry_points())
def test_entry_points_lead_somewhere(target: str) -> None:
    module_name, name = target.split(":")
    assert callable(getattr(importlib.import_module(module_name), name))


def test_entry_points_are_of_groups_that_somebody_reads() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert set(project["entry-points"]) == {"partita.backends", "torch_dynamo_backends"}


def test_every_error_is_a_partita_error_and_of_a_builtin_type() -> None:
    errors = importlib.import_module("partita.errors")
    for name in errors.__all__:
        kinds = getattr(errors, name).__mro__
        assert errors.PartitaError in kinds
        assert name == "PartitaError" or any(
            issubclass(kind, Exception) and kind is not Exception for kind in kinds if kind.__module__ == "builtins"
        )


def test_the_public_names_of_partita_are_in_the_documentation() -> None:
    # The pages made of docstrings have every name, and explain none.
    pages = [page for page in sorted((PYPROJECT.parent / "docs").rglob("*.md")) if page.parent.name != "api"]
    pages.append(PYPROJECT.parent / "README.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    compat = [name for name in PUBLIC if name.startswith("partita.compat.")]
    shown = (
        "partita",
        "partita.policies",
        "partita.treatments",
        "partita.hops",
        "partita.recompute",
        "partita.errors",
        *compat,
    )
    missing = [name for module in shown for name in sorted(PUBLIC[module]) if name not in text]
    assert missing == []


@pytest.mark.parametrize(
    "module_name", ["partita", "partita.policies", "partita.treatments", "partita.backends", "partita.plans"]
)
def test_help_shows_nothing_that_a_dataclass_generates(module_name: str) -> None:
    module = importlib.import_module(module_name)
    values = [value for name in module.__all__ if is_dataclass(value := getattr(module, name))]
    assert values
    for value in values:
        text = pydoc.render_doc(value, renderer=pydoc.plaintext)
        assert not re.search(r"__(eq|hash|repr|getstate|setattr|post_init|dataclass_fields|match_args)__", text), value


def test_the_page_about_policies_explains_all_that_is_public_of_a_program() -> None:
    page = (PYPROJECT.parent / "docs" / "how-to" / "write-a-policy.md").read_text(encoding="utf-8")
    explained = page.partition("What a policy may use of a program:")[2].partition("That is all that is public")[0]
    words = set(re.findall(r"`(?:Program\.)?([a-z_]+)(?:\.at)?(?:\([a-z]*\))?`", explained))
    program = Program.of(symbolic_trace(torch.nn.ReLU()))
    for names in (vars(Program), vars(program), dir(program)):
        assert {name for name in names if not name.startswith("_")} <= words
    assert words <= set(vars(Program))
