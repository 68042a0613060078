"""For whoever tests a policy, a treatment or a backend: random programs that run, regions over them, and laws."""

from partita.testing.backend_laws import check_backend
from partita.testing.backend_report import BackendReport, BrokenLaw
from partita.testing.build import build, random_case, random_crossing, random_nest
from partita.testing.captured import CAPTURES, captured_case
from partita.testing.case import Case
from partita.testing.export_laws import EXPORTABLE, check_export_laws
from partita.testing.features import ALL, Features
from partita.testing.laws import LAWS, LawError, check_laws
from partita.testing.mode_laws import MODE_LAWS, check_mode_laws
from partita.testing.recipe import Input, Recipe, Step
from partita.testing.regions import Labelling, Labels, label, random_labelling, random_labels
from partita.testing.seeds import random_recipe
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
