"""Generators for whoever tests a policy or a treatment: random programs that run, and regions over them."""

from partita.testing.build import build, random_case, random_nest
from partita.testing.captured import CAPTURES, captured_case
from partita.testing.case import Case
from partita.testing.features import ALL, Features
from partita.testing.laws import LAWS, LawError, check_laws
from partita.testing.recipe import Input, Recipe, Step
from partita.testing.regions import Labelling, Labels, label, random_labelling, random_labels
from partita.testing.seeds import random_recipe
from partita.testing.strategies import captured_programs, labelled_programs, labellings, programs, recipes

__all__ = [
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
    "random_nest",
    "random_recipe",
    "recipes",
]
