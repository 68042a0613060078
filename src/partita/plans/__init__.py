"""Plans: what will be done, decided and printed before anything is done."""

from partita.plans.compilations import CompiledBody, Failure
from partita.plans.mode_tree import ModeTree, mode_tree
from partita.plans.plan import Plan, Policy, plan
from partita.plans.report import DistinctBody, Excluded, Explanation
from partita.plans.treatment import Called, Site, Treatment

__all__ = [
    "Called",
    "CompiledBody",
    "DistinctBody",
    "Excluded",
    "Explanation",
    "Failure",
    "ModeTree",
    "Plan",
    "Policy",
    "Site",
    "Treatment",
    "mode_tree",
    "plan",
]
