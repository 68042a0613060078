"""Tools to test a policy, a treatment or a backend: random programs that run, regions over them, and laws."""

from partita.testing.backend_check import BackendReport, BrokenLaw, check_backend
from partita.testing.captured import CAPTURES, captured_case
from partita.testing.generator.build import build, random_case, random_crossing, random_nest, random_recipe
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import ALL, Features, Input, Recipe, Step
from partita.testing.generator.regions import Labelling, Labels, label, random_labelling, random_labels
from partita.testing.laws.core import LAWS, LawError, check_laws
from partita.testing.laws.modes import EXPORTABLE, MODE_LAWS, check_export_laws, check_mode_laws
from partita.testing.strategies import captured_programs, labelled_programs, labellings, nests, programs, recipes

__all__ = [
    "ALL",
    "CAPTURES",
    "EXPORTABLE",
    "LAWS",
    "MODE_LAWS",
    "BackendReport",
    "BrokenLaw",
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
    "check_backend",
    "check_export_laws",
    "check_laws",
    "check_mode_laws",
    "label",
    "labelled_programs",
    "labellings",
    "nests",
    "programs",
    "random_case",
    "random_crossing",
    "random_labelling",
    "random_labels",
    "random_nest",
    "random_recipe",
    "recipes",
]
