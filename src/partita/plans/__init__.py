"""Plans: what will be done, decided and printed before anything is done."""

from partita.plans.explaining import Explanation
from partita.plans.left_out import LeftOut
from partita.plans.mode_tree import ModeTree, mode_tree
from partita.plans.plan import Plan, Policy, plan
from partita.plans.treatment import Called, Site, Treatment
from partita.runtime.failures import Failure

__all__ = [
    "Called",
    "Explanation",
    "Failure",
    "LeftOut",
    "ModeTree",
    "Plan",
    "Policy",
    "Site",
    "Treatment",
    "mode_tree",
    "plan",
]
