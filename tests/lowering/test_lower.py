"""Lowering: compiled at the first call, for each signature once, eagerly where that fails; the numbers stay."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, Failing, lowered, plan_of, region_of
from torch import Tensor, nn

from partita import Tolerance, capture, plan, verify
from partita.backends import Eager
from partita.errors import LoweringError, ModeError, OptionError, TreatmentError
from partita.plans.compilations import Failure
from partita.policies import ByLabel, ByMode, BySize, SplitAt
from partita.treatments import Lower, Mode


def wave(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y + 1


def test_a_region_is_compiled_at_its_first_call_and_not_again() -> None:
    backend = Counting()
    module = lowered(wave, Lower(backend))
    assert backend.made == []
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(module(x, y), wave(x, y))
    assert torch.equal(module(y, x), wave(y, x))
    assert len(backend.made) == 1


def test_inputs_of_a_compilation_are_fake() -> None:
    backend = Counting()
    lowered(wave, Lower(backend))(torch.randn(3, 4), torch.randn(3, 4))
    assert [type(value).__name__ for value in backend.made[0]] == ["FakeTensor", "FakeTensor"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.requires_grad_(),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:2],
        lambda x: x[None],
        lambda x: x.to(torch.complex64),
    ],
)
def test_another_signature_gets_a_function_of_its_own(change) -> None:
    backend = Counting()
    module = lowered(lambda x: torch.cos(x) * 2, Lower(backend, dynamic=False))
    for x in (torch.randn(3, 4), change(torch.randn(3, 4)), torch.randn(3, 4), change(torch.randn(3, 4))):
        assert torch.equal(module(x), torch.cos(x) * 2)
    assert len(backend.made) == 2


def test_a_number_is_part_of_the_signature() -> None:
    backend = Counting()
    module = lowered(lambda x, a, b: x * a + b, Lower(backend, dynamic=False))
    x = torch.randn(3)
    for a, b in ((2, 1.5), (2, 1.5), (3, 1.5), (2, -0.0), (2, 0.0), (2, 1.5), (2.0, 1.5)):
        assert torch.equal(module(x, a, b), x * a + b)
    assert len(backend.made) == 5


def test_only_the_last_used_functions_are_kept() -> None:
    backend = Counting()
    module = lowered(lambda x: x.sin(), Lower(backend, max_variants=2, dynamic=False))
    for size in (3, 4, 3, 5, 3, 4):
        module(torch.randn(size))
    assert [inputs[0].shape[0] for inputs in backend.made] == [3, 4, 5, 4]


def test_calls_that_never_repeat_run_eagerly_in_the_end() -> None:
    backend = Counting()
    decided = plan_of(lambda x, a: x * a, Lower(backend, max_variants=1))
    module = decided.apply().module()
    for a in range(9):
        assert torch.equal(module(torch.ones(2), float(a)), torch.ones(2) * a)
    assert len(backend.made) == 4
    assert "make a tensor of what changes" in decided.failures[0].reason


def test_gradients_flow() -> None:
    backend = Counting()
    program = program_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    decided = plan_of(program, Lower(backend))
    verify(program, decided.apply(), (torch.randn(3, 4, requires_grad=True),))
    assert len(backend.made) == 2, "with gradients and without"


def test_an_input_that_no_used_output_depends_on_gets_no_gradient() -> None:
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, y.sin() * 3, x.detach() + 1

    module = lowered(two, Lower(Counting()))
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    module(x, y)[0].sum().backward()
    assert y.grad is None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_three_steps_of_training_are_those_of_eager() -> None:
    def trained(make) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        module = make(model)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    for one, other in zip(trained(lambda m: m), trained(lambda m: lowered(m, Lower("aot_eager"))), strict=True):
        assert torch.equal(one, other)


def test_what_does_not_train_runs_eagerly_where_gradients_are_needed() -> None:
    backend = Counting(trains=False)
    decided = plan_of(lambda x: x.sin(), Lower(backend))
    module = decided.apply().module()
    x = torch.randn(3, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert backend.made == []
    assert "gradients are needed" in decided.failures[0].reason
    with torch.no_grad():
        assert torch.equal(module(x), x.sin())
    assert len(backend.made) == 1


def test_writes_to_inputs_happen_once() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y.mul_(x) + x

    program = program_of(write)
    verify(program, plan_of(program, Lower("aot_eager")).apply(), (torch.randn(3), torch.randn(3)))


def test_inputs_that_alias_what_is_mutated_are_not_compiled_for() -> None:
    backend = Counting()

    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    module = lowered(write, Lower(backend))
    apart = torch.zeros(4)
    assert torch.equal(module(apart, torch.ones(4)), torch.full((4,), 2.0))
    base = torch.zeros(4)
    assert torch.equal(module(base, base), torch.full((4,), 2.0))
    assert torch.equal(module(base[:2], base[2:]), torch.full((2,), 2.0))
    assert torch.equal(base, torch.tensor([2.0, 2.0, 1.0, 1.0]))


def test_inputs_that_share_memory_are_compiled_for_where_nothing_is_mutated() -> None:
    backend = Counting()
    module = lowered(lambda x, y: (x[0], x + y), Lower(backend))
    base = torch.randn(2, 3)
    first, _ = module(base, base)
    assert first.data_ptr() == base.data_ptr()
    other = torch.randn(2, 3)
    first, _ = module(other, base)
    assert first.data_ptr() == other.data_ptr(), "nothing rests on what was shared in the first call"
    assert len(backend.made) == 1


def test_random_numbers_follow_the_seed() -> None:
    def draw(x: Tensor) -> Tensor:
        torch.rand(2)
        return torch.nn.functional.dropout(x, 0.5, True)

    program = program_of(draw)
    after = plan_of(program, Lower("aot_eager")).apply()
    verify(program, after, (torch.ones(20),))
    module = after.module()
    torch.manual_seed(1)
    one, other = module(torch.ones(20)), module(torch.ones(20))
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(module(torch.ones(20)), one)


def _overwritten(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    torch.sin(x, out=noise)
    return noise + 1


def _unused_in_a_block(x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.nn.functional.dropout(x)
        scale = x.mean()
    return x.cos() * scale


@pytest.mark.parametrize("function", [_overwritten, _unused_in_a_block])
@pytest.mark.parametrize("trains", [False, True])
def test_random_numbers_that_are_not_used_are_generated(function, trains: bool) -> None:
    """Of `torch.compile` they are not (2.13)."""
    x = torch.randn(4, 3)
    program = plan(capture(function, (x,)), ByMode(), Mode()).apply()
    after = plan(program, BySize(parts=1), Lower("aot_eager", strict=True)).apply()
    verify(program, after, (x.requires_grad_(trains and function is not _overwritten),))


def test_a_container_is_used_by_item_and_returned_whole() -> None:
    backend = Counting()

    def split(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        parts = torch.split(x * 2, 2)
        return parts[0] + 1, parts

    program = program_of(split)
    verify(program, plan_of(program, Lower(backend, strict=True)).apply(), (torch.randn(4, 2),))
    assert backend.made


def test_containers_may_be_inputs() -> None:
    backend = Counting()

    def join(parts: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        return torch.cat(parts) + named["shift"]

    decided = plan_of(join, Lower(backend))
    module = decided.apply().module()
    for count in (2, 2, 3):
        parts, named = [torch.randn(2) for _ in range(count)], {"shift": torch.ones(1)}
        assert torch.equal(module(parts, named), join(parts, named))
    assert len(backend.made) == 2
    assert not decided.failures


def test_outputs_that_are_no_tensors_are_kept() -> None:
    backend = Counting()

    def several(x: Tensor) -> tuple[object, ...]:
        return x.size(0), x.dtype, x.shape, None, x, x[:0], x.to(torch.complex64)

    program = program_of(several)
    decided = plan_of(program, Lower(backend, strict=True))
    verify(program, decided.apply(), (torch.randn(3),))
    given = decided.apply().module()(torch.ones(3))
    assert given[:3] == (3, torch.float32, torch.Size([3]))


def test_new_tensors_share_no_memory_with_others() -> None:
    class Sharing(Counting):
        """Gives its first input for everything, as Inductor does for `zeros + x`, and one result twice."""

        def compile(self, body, inputs):
            return lambda x: (x, x)

    module = lowered(lambda x: (0 + x, 1 * x), Lower(Sharing()))
    for _ in range(2):
        x = torch.randn(3)
        one, other = module(x)
        assert torch.equal(one, x)
        assert len({x.data_ptr(), one.data_ptr(), other.data_ptr()}) == 3


def test_it_can_be_run_twice_on_the_same_graph() -> None:
    program = program_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
    once = plan(
        program, ByLabel(lambda node: "first" if node.name in ("_0", "_1") else None), Lower("aot_eager")
    ).apply()
    twice = plan(once, ByLabel(lambda node: "first" if node.name in ("_2", "_3") else None), Lower("aot_eager")).apply()
    verify(program, twice, (torch.randn(2, 4),))
    assert len([name for name, _ in twice.module().named_children() if name.startswith("first")]) == 2


def test_a_region_that_fails_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = Failing()
    decided = plan_of(wave, Lower(backend))
    module = decided.apply().module()
    x, y = torch.randn(3), torch.randn(3)
    with caplog.at_level(logging.WARNING):
        for size in (3, 3, 4, 5, 6, 7):
            tries = len(backend.tries)
            x, y = torch.randn(size), torch.randn(size)
            assert torch.equal(module(x, y), wave(x, y))
    assert list(decided.failures) == [Failure("whole", "failing", "no such luck")]
    assert [record.getMessage() for record in caplog.records] == [
        "whole: failing failed: no such luck; it runs eagerly"
    ]
    assert len(backend.tries) == tries, "after three sizes another one is no reason to try again"


def test_strict_raises_what_fails() -> None:
    module = lowered(wave, Lower(Failing(), strict=True))
    for _ in range(2):
        with pytest.raises(LoweringError, match="whole: failing failed: no such luck; without strict=True"):
            module(torch.randn(3), torch.randn(3))


def test_a_failure_names_the_node_if_that_is_known() -> None:
    decided = plan_of(wave, Lower(Failing("bad\n\nWhile executing %mul : [num_users=1] = call_function")))
    decided.apply().module()(torch.randn(3), torch.randn(3))
    assert decided.failures[0].node == "mul"


def test_a_failure_at_run_time_is_not_swallowed() -> None:
    class Broken(Counting):
        def compile(self, body, inputs):
            def fail(*_):
                raise ZeroDivisionError("at run time")

            return fail

    decided = plan_of(wave, Lower(Broken()))
    module = decided.apply().module()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="at run time"):
            module(torch.randn(3), torch.randn(3))
    assert not decided.failures


@pytest.mark.parametrize("strict", [False, True])
def test_a_backend_that_does_not_exist_is_an_error_at_once(strict: bool) -> None:
    with pytest.raises(OptionError, match="no backend is called 'inducktor'; try 'inductor'"):
        Lower("inducktor", strict=strict)


def test_a_region_whose_backend_is_gone_runs_eagerly() -> None:
    treatment = Lower("eager")
    object.__setattr__(treatment, "backend", "uninstalled")  # As from a pickle of another machine.
    decided = plan_of(wave, treatment)
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(decided.apply().module()(x, y), wave(x, y))
    assert "no backend is called 'uninstalled'" in decided.failures[0].reason


def test_a_region_that_holds_a_refused_node_runs_eagerly() -> None:
    class NoSines(Counting):
        def refusal(self, node):
            return "sines" if node.target is torch.sin else None

    backend = NoSines()
    decided = plan_of(wave, Lower(backend))
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(decided.apply().module()(x, y), wave(x, y))
    assert list(decided.failures) == [Failure("whole", "counting", "it refuses this node: sines", "sin")]
    assert backend.made == []
    with pytest.raises(LoweringError, match="it refuses this node: sines"):
        plan_of(wave, Lower(backend, strict=True)).apply()


def test_a_region_takes_one_mode() -> None:
    def mixed(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y

    from partita import capture

    program = capture(mixed, (torch.randn(3),))
    with pytest.raises(ModeError, match="takes one mode a region"):
        plan(program, BySize(parts=1, modes_apart=False), Lower("eager"))
    assert len(plan(program, BySize(parts=1), Lower("eager")).partition) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_variants": 0}, "at least 1"),
        ({"max_variants": True}, "at least 1"),
        ({"dynamic": "yes"}, "dynamic is True, False or None"),
        ({"dumper": "there"}, "dumper is a function"),
        ({"backend": 3}, "a backend is a name or has"),
        ({"backend": Eager}, "a backend is a name or has"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Lower(**{"backend": "eager", **options})


def test_a_treatment_has_the_tolerance_of_its_backend() -> None:
    assert plan_of(wave, Lower("inductor")).tolerance.relative > 0
    assert plan_of(wave, Lower("eager")).tolerance.relative == 0


def test_a_dumper_gets_the_body_and_gives_the_tag() -> None:
    texts: list[str] = []

    def dump(text: str) -> str:
        texts.append(text)
        return "file 7"

    module = lowered(wave, Lower("eager", dumper=dump))
    assert "torch.sin(x)" in texts[0]
    assert region_of(module).lowering.tag == "file 7"
    with pytest.raises(TreatmentError, match="a dumper returns a tag"):
        lowered(wave, Lower("eager", dumper=len))


def test_a_profile_shows_the_region_by_its_tag() -> None:
    module = lowered(wave, Lower("eager", tag="the waves"))
    module(torch.randn(3), torch.randn(3))
    with torch.profiler.profile() as profile:
        module(torch.randn(3), torch.randn(3))
    assert "the waves" in {event.key for event in profile.key_averages()}


def test_start_and_end_of_a_compilation_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(nn.Sequential(nn.Tanh(), nn.ReLU()))
    module = plan(program, BySize(parts=2), Lower("aot_eager")).apply().module()
    with caplog.at_level(logging.INFO):
        module(torch.randn(3))
    told = [record.getMessage() for record in caplog.records if record.name.startswith("partita.lowering")]
    assert [line.partition(" in ")[0] for line in told] == [
        "compiling part_0 (region 1 of 2) with aot_eager",
        "compiled part_0 (region 1 of 2) with aot_eager",
        "compiling part_1 (region 2 of 2) with aot_eager",
        "compiled part_1 (region 2 of 2) with aot_eager",
    ]


def test_an_output_that_is_mutated_later_is_no_longer_saved_for_the_backward() -> None:
    class Keeping(Counting):
        """Keeps its output for the backward, as Inductor may where plain torch keeps the input."""

        tolerance = Tolerance(relative=1e-6)

        def compile(self, body, inputs):
            class Squared(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    y = x.square()
                    ctx.save_for_backward(y)
                    return y

                @staticmethod
                def backward(ctx, gradient):
                    return gradient * 2 * ctx.saved_tensors[0].sqrt()

            return lambda x: (Squared.apply(x),)

    def squared(x: Tensor) -> Tensor:
        y = x * x
        y.mul_(3)
        return y

    program = program_of(squared)
    module = (
        plan(program, ByLabel(lambda node: "first" if node.name == "mul" else None), Lower(Keeping())).apply().module()
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    module(x).sum().backward()
    assert torch.allclose(x.grad, torch.tensor([6.0, 12.0]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_regions_of_checks_and_sizes_alone_are_computed_where_they_are_read(backend: str) -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            k = n.item()
            torch._check(k >= 0)
            torch._check(k < 10)
            return torch.arange(k) * 2, x * k

    args = (torch.randn(3), torch.tensor(3))
    program = capture(Counted(), args)
    after = plan(program, SplitAt(lambda node: True), Lower(backend)).apply().module()
    found = after(*args)
    assert torch.equal(found[0], torch.arange(3) * 2)
    assert torch.equal(found[1], args[0] * 3)
