"""What runs again is named by an earlier record of the same code."""

from __future__ import annotations

import torch

from partita.memory._torch.recorder import Recorder


def test_a_view_that_the_script_has_later_does_not_skip_work() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 8)
    with torch.no_grad(), Recorder() as first:
        first.ignore((x, weight))
        first.node = "product"
        product = x @ weight
        first.node = "sine"
        product.sin().detach()
        first.node = "second product"
        product @ weight.t()
    with torch.no_grad(), Recorder(script=first.record.ran) as again:
        again.ignore((x, weight))
        product = x.detach() @ weight  # The recomputation detaches its inputs, which the script does not.
        product.sin().detach()
        product @ weight.t()
    made = [(one.node, one.operator) for one in again.record.allocations]
    assert made == [
        ("product", "aten.mm.default"),
        ("sine", "aten.sin.default"),
        ("second product", "aten.mm.default"),
    ]
