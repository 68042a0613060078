"""Real models from capture to a new process: modes as operators, saved, loaded, trained one step, equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.core import text
from tests.helpers.selecting import slow_but
from tests.program.exported_runs import Job, differences_in_another_process
from torch import Tensor, nn
from torch.export import unflatten

from partita import Program, Tolerance, capture, fingerprint, hops, inline, mode_tree, plan, verify
from partita.policies import AroundOperators, ByMode, ByModule, BySize
from partita.treatments import Call, Mode

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(6).reshape(1, 6)
SIZES: dict[str, Any] = {"vocab_size": 32, "use_cache": False, "attn_implementation": "eager"}


class Logits(nn.Module):
    """A language model that takes and gives tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids).logits


class InFullPrecision(nn.Module):
    """The rotary embedding as transformers wrote it for years: with autocast switched off around it."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.rotary(x, position_ids)


class InHalfPrecision(Logits):
    def forward(self, ids: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(ids).logits


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        **SIZES,
    )
    model: Any = LlamaForCausalLM(config)
    model.model.rotary_emb = InFullPrecision(model.model.rotary_emb)
    return InHalfPrecision(model)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        **SIZES,
    )
    return Logits(BertForMaskedLM(config))


class MovingAverage(nn.Module):
    """A buffer that follows the data under no_grad, before and after it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        with torch.no_grad():
            self.steps.add_(1)
            self.mean.lerp_(h.mean(0), 0.1)
        return self.head(h - self.mean)


class MixedNest(nn.Module):
    """Every kind of block, in and out of each other, some of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = self.teacher(x)
                with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                    guide = self.student(target.float())
                self.seen.add_(target.sum(0))
            found = self.student(x)
        with torch.inference_mode():
            scale = self.head(x).abs().mean()
        return {"loss": (self.head(found.float()) - target) * scale.item(), "guide": guide}


class Decorated(nn.Module):
    """Methods with a mode as a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Any:
        return self.encoder(x)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def decode(self, h: Tensor) -> Any:
        return self.head(h)

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.encode(x)).float() + self.head(x)


SMALL = (MovingAverage, MixedNest, Decorated)
LARGE = {llama: "*.layers.*", gpt2: "*.h.*", bert: "*.layer.*"}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in training, with the same weights each time."""
    torch.manual_seed(0)
    return make().train()


def arguments(make: Callable[[], nn.Module]) -> tuple[Tensor]:
    return (IDS,) if make in LARGE else (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),)


def wrapped(make: Callable[[], nn.Module]) -> Program:
    """A model captured, with its modes as operators."""
    return plan(capture(built(make), arguments(make)), ByMode(), Mode()).apply()


@pytest.mark.parametrize("make", SMALL)
def test_a_captured_model_with_its_modes_as_operators_is_the_model(make: Callable[[], nn.Module]) -> None:
    program = wrapped(make)
    verify(built(make), program, arguments(make), tolerance=Tolerance())
    assert fingerprint(inline(program)) == fingerprint(capture(built(make), arguments(make)))


@pytest.mark.models
@pytest.mark.parametrize("is_every_model", slow_but([False, True], False))
def test_models_train_in_another_process_as_in_eager_mode(tmp_path: Path, is_every_model: bool) -> None:
    makes = (*SMALL, *LARGE) if is_every_model else (SMALL[0], next(iter(LARGE)))
    jobs = [Job(make.__name__, wrapped(make).exported(), built(make), arguments(make)) for make in makes]
    assert differences_in_another_process(jobs, tmp_path) == ""


@pytest.mark.models
@pytest.mark.parametrize("make", slow_but(LARGE, gpt2))
def test_a_model_can_be_cut_by_its_layers(make: Callable[[], nn.Module]) -> None:
    program = capture(built(make), arguments(make))
    for policy in (ByModule(LARGE[make]), BySize(parts=3), AroundOperators(torch.ops.aten.softmax.int)):
        after = plan(program, policy, Call()).apply()
        assert after.graph.find_nodes(op="call_function", target=hops.call)
        verify(built(make), after, arguments(make), second_call=False)
        flat, model = unflatten(after.exported()), built(make)
        with torch.no_grad():
            torch.manual_seed(3)
            found = flat(*arguments(make))
            torch.manual_seed(3)
            assert torch.equal(found, model(*arguments(make)))


@pytest.mark.models
def test_the_rotary_embedding_keeps_both_of_its_modes() -> None:
    assert str(mode_tree(capture(built(llama), (IDS,)))) == text("""
        the caller's modes: 210 operators, embedding .. linear_14
        +- autocast on cpu bfloat16: 210 operators, embedding .. linear_14
           +- no autocast on cpu: 15 operators, unsqueeze_13 .. to_5
              +- no_grad: 15 operators, unsqueeze_13 .. to_5
    """)


def test_a_frozen_encoder_gets_no_gradient_after_decomposing() -> None:
    module: Any = wrapped(Decorated).exported().run_decompositions().module()
    module(*arguments(Decorated)).sum().backward()
    assert module.encoder.weight.grad is None
    assert module.head.weight.grad is not None


def test_copies_of_a_program_train_apart() -> None:
    program = wrapped(MovingAverage)
    copied = copy.deepcopy(program.exported()).module()
    copied(*arguments(MovingAverage))
    assert not program.exported().state_dict["mean"].any()
