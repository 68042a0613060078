"""Memory budgets: the fastest training step whose peak fits, its timeline, and measured peaks."""

from partita.memory.budget import MemoryBudget
from partita.memory.communication import communication_bytes
from partita.memory.joint.step_plan import StepMemoryPlan, StepMoment, StepPart
from partita.memory.measure import measured_peak
from partita.memory.picture import Picture
from partita.memory.plan import MemoryPlan, SegmentChoice, StepMemory, budget_curve, fit, step_memory
from partita.memory.rates import Rates, measure_rates
from partita.memory.timeline import Moment, Occupant, Timeline

__all__ = [
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
]
