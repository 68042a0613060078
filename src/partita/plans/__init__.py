"""Plans: what will be done, decided and printed before anything is done."""

from partita.plans.plan import Plan, Policy, plan
from partita.plans.treatment import Treatment

__all__ = ["Plan", "Policy", "Treatment", "plan"]
