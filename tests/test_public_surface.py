"""The public names, listed, so that adding one is a decision."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import get_origin

import pytest

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

PUBLIC = {
    "partita": {
        "Comparison",
        "Partition",
        "Plan",
        "Policy",
        "Program",
        "Region",
        "Tolerance",
        "Treatment",
        "compare",
        "fingerprint",
        "gather",
        "inline",
        "outline",
        "plan",
        "verify",
    },
    "partita.policies": {
        "AroundOperators",
        "ByAnnotation",
        "ByLabel",
        "ByModule",
        "BySize",
        "Policy",
        "Sequential",
    },
    "partita.treatments": {
        "Call",
        "Mark",
        "Treatment",
    },
    "partita.plans": {
        "Plan",
        "Policy",
        "Treatment",
        "plan",
    },
    "partita.equivalence": {
        "Comparison",
        "Difference",
        "Tolerance",
        "compare",
        "verify",
    },
    "partita.compat.split_module": {
        "Partition",
        "split_module",
        "split_module_simple",
    },
    "partita.tracing.dynamo": {
        "backend",
    },
    "partita.testing": {
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
        "random_labelling",
        "random_labels",
        "random_recipe",
        "recipes",
    },
    "partita.errors": {
        "BrokenGraphError",
        "CallbackError",
        "CycleError",
        "MissingLabelError",
        "MissingTargetError",
        "ModeError",
        "OptionError",
        "PartitaError",
        "RegionError",
        "TreatmentError",
        "UnknownNodeError",
        "VerificationError",
    },
}

#: Policies and treatments are found by these, ours the same way as anyone else's.
GROUPS = {"partita.policies": "partita.policies", "partita.treatments": "partita.treatments"}


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


@pytest.mark.parametrize("group", GROUPS)
def test_policies_and_treatments_with_an_entry_point_are_public(group: str) -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert set(project["entry-points"][group]) == PUBLIC[GROUPS[group]] - {"Policy", "Treatment"}


def test_every_error_is_a_partita_error_and_of_a_builtin_type() -> None:
    errors = importlib.import_module("partita.errors")
    for name in errors.__all__:
        kinds = getattr(errors, name).__mro__
        assert errors.PartitaError in kinds
        assert name == "PartitaError" or any(
            issubclass(kind, Exception) and kind is not Exception for kind in kinds if kind.__module__ == "builtins"
        )


def test_the_public_names_of_partita_are_in_the_documentation() -> None:
    pages = [PYPROJECT.parent / "README.md", *sorted((PYPROJECT.parent / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    shown = ("partita", "partita.policies", "partita.treatments", "partita.compat.split_module", "partita.errors")
    missing = [name for module in shown for name in sorted(PUBLIC[module]) if name not in text]
    assert missing == []
