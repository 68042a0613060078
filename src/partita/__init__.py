"""Partita cuts PyTorch graphs into regions, gives each a treatment, and checks that the program means the same.

Example::

    import torch
    import partita
    from partita.policies import ByModule
    from partita.treatments import Lower

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x = torch.randn(4, 8)

    program = partita.capture(model, (x,))  # a graph; blocks of no_grad and autocast are kept
    plan = partita.plan(program, ByModule("0"), Lower("aot_eager"))  # or "inductor", to run fast
    print(plan)  # what will be done; nothing is done yet
    after = plan.apply()  # a new program, which shares the parameters
    partita.verify(program, after, (x,))  # raises if values, gradients, state or anything else differs
    y = after.module()(x)  # called like the model

Examples of other names begin where this one ends. Policies are in `partita.policies`, treatments in
`partita.treatments`, backends in `partita.backends`, the backend of torch.compile in `partita.torch_compile`, torch's
own names in `partita.compat`, and every error in `partita.errors`.
"""

from typing import TYPE_CHECKING

from partita._lazy_imports import lazy_attributes
from partita._torch.gc_pause import gc_paused

# Importing makes enough objects to start a full collection, which would visit all of torch's.
with gc_paused():
    from partita import hops
    from partita import recompute as recompute  # A file may name its operators.
    from partita.analysis.tolerance import Tolerance
    from partita.capture import TrainEval, capture, capture_joint
    from partita.dissolve import dissolve
    from partita.plans import Plan, Policy, Treatment, mode_tree, plan
    from partita.program.fingerprint import fingerprint
    from partita.program.program import Program
    from partita.regions import Partition, Region
    from partita.rewrite import gather, inline, outline

__version__ = "0.1.0"

__all__ = [
    "Bisection",
    "Comparison",
    "Partition",
    "Plan",
    "Policy",
    "Program",
    "Region",
    "Report",
    "Tolerance",
    "TrainEval",
    "Treatment",
    "bisect",
    "capture",
    "capture_joint",
    "compare",
    "dissolve",
    "fingerprint",
    "fit",
    "gather",
    "hops",
    "inline",
    "load_plan",
    "mode_tree",
    "outline",
    "plan",
    "report",
    "save_plan",
    "verify",
]

# The other public packages, and what is taken from them: each is imported when it is first used.
if TYPE_CHECKING:
    from partita.equivalence.bisect import Bisection, bisect
    from partita.equivalence.compare import compare
    from partita.equivalence.differences import Comparison
    from partita.equivalence.verify import verify
    from partita.memory import fit
    from partita.reports.report import Report, report
    from partita.treatments.plan_files import load_plan, save_plan
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        modules=(
            "backends",
            "compat",
            "equivalence",
            "errors",
            "memory",
            "policies",
            "reports",
            "testing",
            "torch_compile",
            "treatments",
        ),
        names={
            "Bisection": "partita.equivalence",
            "Comparison": "partita.equivalence",
            "Report": "partita.reports",
            "bisect": "partita.equivalence",
            "compare": "partita.equivalence",
            "fit": "partita.memory",
            "load_plan": "partita.treatments.plan_files",
            "report": "partita.reports",
            "save_plan": "partita.treatments.plan_files",
            "verify": "partita.equivalence",
        },
    )
