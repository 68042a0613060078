"""Chapter: a language model of which a chip supports only a part: that part is compiled, the rest has reasons."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryFile
from time import perf_counter

import torch
from torch import nn
from torch.fx import Node

import partita
from partita.backends import Inductor
from partita.policies import ByCapability
from partita.treatments import Lower
from partita_cli.demo.modes import same_imports
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "A language model, compiled as far as a chip supports it"

#: Where a C++ compiler is slow, or used for the first time, Inductor may take longer than a demo should.
_TIMEOUT_S = 17.0


def show() -> bool:
    """Shows the regions, why nodes are outside, and that the lowered model trains alike; returns whether it does."""
    started = perf_counter()
    with TemporaryFile("w+") as output:
        # In a process of its own, while this one goes on.
        command = [sys.executable, "-P", "-m", "partita_cli.demo.with_inductor"]
        inductor = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=same_imports())
        comparison = _show_capability()
        try:
            status = inductor.wait(timeout=max(0.0, _TIMEOUT_S - (perf_counter() - started)))
        except subprocess.TimeoutExpired:
            inductor.kill()
            inductor.wait()
            print("lowered with inductor: skipped; its C++ compiler takes too long here, the first time at least")
            return comparison.equal
        output.seek(0)
        print(f"lowered with inductor:\n{output.read().rstrip()}")
    return comparison.equal and status == 0


def _show_capability() -> partita.Comparison:
    """Lowers with a backend that traces as a compiler would, but compiles almost nothing."""
    name, model, args = seeded()
    program = partita.capture(model, args)
    plan = partita.plan(program, ByCapability(small_chip), Lower("aot_eager"))
    print(f"{name}; the fewest regions that hold all that the chip supports:\n\n{plan}\n\n{plan.summary()}\n")
    refused = next(node for node in program.operators() if "attention" in node.name)
    cut = next(node for node in refused.users if plan.partition.region_of(node) is not None)
    for node in (refused, cut):
        print(f"plan.explain({node.name!r})\n{plan.explain(node)}")
    comparison = partita.compare(program, plan.apply(), args)
    print(f"\nlowered with aot_eager, values and gradients compared: {comparison}")
    print(f"regions that could not be compiled, and run eagerly: {len(plan.failures)}")
    return comparison


#: Operators without a kernel on the chip.
_MISSING = {"scaled_dot_product_attention": "no kernel for attention", "rsqrt": "no table of roots"}
_COMPILER = Inductor()


def seeded() -> tuple[str, nn.Module, tuple[torch.Tensor, ...]]:
    """A description, the model and its arguments, the same in every process."""
    torch.manual_seed(0)
    name, model = ("Llama, from a configuration", _llama()) if find_spec("transformers") else ("decoder", Decoder())
    return f"a small {name}", model.eval(), (torch.randint(WORDS, (2, 16)),)


def small_chip(node: Node) -> str | None:
    """Why the chip does not support a node; None if it does. Inductor plays its compiler."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return _MISSING.get(name) or _COMPILER.refusal(node)


def _llama() -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    llama: nn.Module = transformers.LlamaForCausalLM(config)
    return llama
