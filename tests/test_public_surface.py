"""The public names, listed, so that adding one is a decision."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

PUBLIC = {
    "partita": {
        "Partition",
        "Plan",
        "Program",
        "Region",
        "compare",
        "plan",
        "verify",
    },
    "partita.policies": {
        "AroundOperators",
        "ByAnnotation",
        "ByLabel",
        "ByModule",
        "BySize",
        "Sequential",
    },
    "partita.treatments": {
        "Call",
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
    undocumented = [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()]
    assert undocumented == []


@pytest.mark.parametrize("target", _entry_points())
def test_entry_points_lead_somewhere(target: str) -> None:
    module_name, name = target.split(":")
    assert callable(getattr(importlib.import_module(module_name), name))
