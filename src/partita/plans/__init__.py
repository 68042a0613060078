"""Plans: what will be done, decided and printed before anything is done."""

from partita.plans.mode_tree import ModeTree, mode_tree
from partita.plans.plan import Plan, Policy, plan
from partita.plans.treatment import Treatment

__all__ = ["ModeTree", "Plan", "Policy", "Treatment", "mode_tree", "plan"]
