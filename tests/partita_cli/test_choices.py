"""Policies and treatments are made from their names and options, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from partita.policies import AroundOperators, ByCapability, ByMode, ByModule, BySize, Repeats
from partita.treatments import (
    Call,
    Delegate,
    KeepAtMost,
    KeepExpensive,
    KeepNodes,
    KeepOperators,
    Lower,
    Mark,
    Mode,
    Recompute,
)
from partita_cli.choices import Kind, choices, choose
from partita_cli.errors import CommandError
from partita_cli.options import POLICIES, TREATMENTS


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("size:parts=4", BySize(parts=4)),
        ("size:parameter_bytes=1_000", BySize(parameter_bytes=1000)),
        ("repeats", Repeats()),
        ("repeats:min-size=3,min_saved=0.5,between=no", Repeats(min_size=3, min_saved=0.5, between=False)),
        ("module:layers.*", ByModule("layers.*")),
        ("module:layers.*,head,depth=2", ByModule(("layers.*", "head"), depth=2)),
        ("module:classes=Linear", ByModule(classes="Linear")),
        ("capability:inductor", ByCapability("inductor")),
        ("capability:backend=inductor,min_size=4", ByCapability("inductor", min_size=4)),
        ("capability:inductor,eager,max_size=none", ByCapability(("inductor", "eager"))),
        ("around-operators:aten.mm,aten.bmm,alone=false", AroundOperators(("aten.mm", "aten.bmm"), alone=False)),
        ("mode", ByMode()),
        ("mode:caller_grad=true", ByMode(caller_grad=True)),
        ("mode:traced", ByMode(caller_grad="traced")),
    ],
)
def test_a_policy_is_made_from_its_name_and_options(text: str, made: Any) -> None:
    assert choose("policy", text) == made


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("call", Call()),
        ("lower", Lower()),
        ("lower:aot_eager,dynamic=true,strict=yes", Lower("aot_eager", dynamic=True, strict=True)),
        ("lower:backend=eager,tag=none", Lower("eager")),
        ("delegate:aot_inductor", Delegate("aot_inductor")),
        ("mark:stage,value=3", Mark("stage", 3)),
        ("mark:stage,value=first", Mark("stage", "first")),
        ("mode:torch", Mode("torch")),
        ("recompute", Recompute()),
        ("recompute:keep=expensive", Recompute(KeepExpensive())),
        ("recompute:expensive:flops_per_byte=2", Recompute(KeepExpensive(2.0))),
        ("recompute:keep=at-most:1000", Recompute(KeepAtMost(1000))),
        ("recompute:keep=operators:aten.mm,aten.bmm", Recompute(KeepOperators("aten.mm", "aten.bmm"))),
        ("recompute:keep=nodes:linear,relu", Recompute(KeepNodes("linear", "relu"))),
    ],
)
def test_a_treatment_is_made_from_its_name_and_options(text: str, made: Any) -> None:
    assert choose("treatment", text) == made


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("policy", "sise:parts=2", "there is no policy 'sise'; did you mean 'size'?"),
        ("policy", "ByCapability", "it is called 'capability' here"),
        ("policy", "zzz", "there are annotation, around-operators, capability"),
        ("policy", "size:part=2", "has no option 'part'; did you mean 'parts'"),
        ("policy", "size:parts=two", "parts of policy size takes: whole number or none; not 'two'"),
        ("policy", "size:parts=2,parts=3", "has the option 'parts' twice"),
        ("policy", "size:parts=2,3", "parts of policy size takes: whole number or none; not '2,3'"),
        ("policy", "repeats:between=perhaps", "between of policy repeats takes: true or false; not 'perhaps'"),
        ("policy", "capability", "needs capabilities"),
        ("policy", "capability:inductor,apart=x", "is a function, and is set in Python only"),
        ("policy", "label:x", "label, which is a function: use ByLabel in Python"),
        ("policy", "in-forward:x", "policy, which is a policy: use InForward in Python"),
        ("treatment", "call:x", "treatment call has no options, and 'x' is one"),
        ("treatment", "recompute:keep=everythin", "there is no keep 'everythin'; did you mean 'everything'?"),
        ("treatment", "mode:operators=onnx", "'partita' or 'torch'; not 'onnx'"),
    ],
)
def test_what_cannot_be_made_is_said_with_the_nearest_name(kind: Kind, text: str, told: str) -> None:
    with pytest.raises(CommandError) as caught:
        choose(kind, text)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["__import__('os').system('true')", "module:__import__('os')", "mark:key,value=[1]"])
def test_nothing_is_evaluated(text: str) -> None:
    kind: Kind = "treatment" if text.startswith("mark") else "policy"
    try:
        made = choose(kind, text)
    except CommandError:
        return
    assert made in (ByModule("__import__('os')"), Mark("key", "[1]"))


def test_names_that_are_completed_are_those_that_can_be_made() -> None:
    for kind, names in (("policy", POLICIES), ("treatment", TREATMENTS)):
        known = choices(kind)  # type: ignore[arg-type]
        assert names == tuple(name for name, choice in known.items() if choice.only_in_python is None)


@pytest.mark.parametrize("kind", ["policy", "treatment", "keep"])
def test_every_choice_has_a_summary_and_readable_options(kind: Kind) -> None:
    for choice in choices(kind).values():
        assert choice.summary
        for option in choice.options:
            assert str(option.accepts) or not option.accepts.anything
