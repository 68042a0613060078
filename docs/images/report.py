"""Makes `report.png`, the picture of a report in the documents, with playwright and Chromium."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from playwright.sync_api import sync_playwright
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import partita
from partita.memory import step_memory
from partita.policies import ByModule
from partita.treatments import Recompute

_TARGET = Path(__file__).with_suffix(".png")


class GPT2(nn.Module):
    """A small GPT-2 that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=200, n_positions=64, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids).loss
        return loss


def main() -> None:
    """A GPT-2 whose blocks are recomputed, one of them open."""
    torch.manual_seed(0)
    model, ids = GPT2(), torch.randint(0, 200, (4, 64))
    program = partita.capture(model, (ids,))
    plan = partita.plan(program, ByModule("model.transformer.h.*"), Recompute())
    comparison = partita.compare(program, plan.apply(), (ids,))
    report = partita.report(plan, comparison=comparison, memory=step_memory(model, (ids,)).plan(0.93))
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        report.save(path)
        program_path = os.environ.get("PARTITA_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(
            executable_path=program_path, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 780})
        page.goto(path.as_uri())
        page.evaluate("""async () => {
            const {view} = window.partita;
            window.partita.goToRegion(1);
            view.setOpen(view.selected, true);
            view.scale = 0.72;
            const place = view.placeOf(view.selected);
            view.left = 440 - (place.x + place.width / 2) * view.scale;
            view.top = 30;
            view.paint();
            await new Promise(requestAnimationFrame);
        }""")
        page.screenshot(path=_TARGET)
        browser.close()


if __name__ == "__main__":
    main()
