"""Chapter: a plan is written to a file, read for the same model captured again, and compared with another one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import partita
from partita.errors import PartitaError
from partita.policies import ByModule
from partita.treatments import Call, Recompute
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "Plans in files: reviewed, compared, refused for another model"


def show() -> bool:
    """Shows a round trip, what another plan changes, and a refusal; returns whether all of it is as it should be."""
    ids = torch.randint(WORDS, (2, 16))
    program, again = _captured(4, ids), _captured(4, ids)
    plan = partita.plan(program, ByModule("blocks.*"), Recompute())
    with TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        partita.save_plan(plan, file)
        loaded = partita.load_plan(file, again)
        print(f"saved:   {file.stat().st_size:,} bytes of JSON; nothing in it is imported or run")
        print(f"loaded:  for the model captured again; {plan.diff(loaded)}")
        refusal = _refusal(file, _captured(5, ids))
    print(f"refused: {refusal}")
    other = partita.plan(program, ByModule("blocks.*"), lambda region: Call() if "3" in region.name else Recompute())
    changes = plan.diff(other)
    print(f"another plan changes:\n{changes}")
    return not plan.diff(loaded) and "another program" in refusal and len(changes.lines) == 1


def _captured(layers: int, ids: torch.Tensor) -> partita.Program:
    torch.manual_seed(0)
    return partita.capture(Decoder(layers).train(), (ids,))


def _refusal(file: Path, program: partita.Program) -> str:
    try:
        partita.load_plan(file, program)
    except PartitaError as error:
        return str(error).replace(str(file), file.name)
    return "no"
