"""Loading `.pt2` files: ordinary ones load without trust, and are the programs that torch loads."""

from __future__ import annotations

import ast
import importlib
import json
import re
import zipfile
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.compat.split_helpers import same
from tests.helpers.processes import run_in_new_process
from tests.helpers.torch_versions import IS_OLD
from tests.program.archives.helpers import Plain, Spoilt, X, call, exported, pickled_by_torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import partita
from partita import Program, dissolve
from partita.errors import ArchiveError, OptionError, UntrustedArchiveError
from partita.policies import ByMode, BySize
from partita.program.archives import ArchiveReport, Kind, inspect_archive, load_exported
from partita.treatments import Call, KeepExpensive, Mode, Recompute


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "plain.pt2"
    torch.export.save(exported(), path, extra_files={"notes.txt": "hello"})
    return path


def without_quotes(code: str) -> str:
    """Messages of assertions have another sign for quotes once they were loaded."""
    return re.sub("[\"'`]", "`", code)


def unparsed(guard: str) -> str:
    return ast.unparse(ast.parse(guard))


def described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    kind = (value.is_leaf, value.requires_grad, value.is_inference())
    return f"{value} {value.stride()} {value.dtype} {value.device} {value.layout} {kind}"


def compare_with_torch(path: Path) -> torch.export.ExportedProgram:
    """The program that we load, after it was compared with the one that torch loads."""
    mine, torchs = load_exported(path), torch.export.load(path)
    assert without_quotes(mine.graph_module.code) == without_quotes(torchs.graph_module.code)
    assert mine.graph_signature == torchs.graph_signature
    assert mine.range_constraints == torchs.range_constraints
    assert [unparsed(guard) for guard in mine._guards_code] == [unparsed(guard) for guard in torchs._guards_code]
    assert [described(node.meta.get("val")) for node in mine.graph.nodes] == [
        described(node.meta.get("val")) for node in torchs.graph.nodes
    ]
    for table in ("state_dict", "constants"):
        left, right = getattr(mine, table), getattr(torchs, table)
        assert list(left) == list(right)
        for name, tensor in left.items():
            other = right[name]
            assert type(tensor) is type(other)
            assert (tensor.dtype, tensor.stride(), tensor.requires_grad) == (
                other.dtype,
                other.stride(),
                other.requires_grad,
            )
            assert torch.equal(tensor, other)
    assert mine.example_inputs is None
    return mine


# What loads ------------------------------------------------------------------------------------------------------


def test_an_ordinary_archive_is_the_program_that_torch_loads(saved: Path) -> None:
    mine = compare_with_torch(saved)
    assert same(call(mine, rows=9), call(torch.export.load(saved), rows=9))
    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[0\] <= 100"):
        call(Program.of(mine).exported(), rows=101)


def test_a_path_may_be_text(saved: Path) -> None:
    assert load_exported(str(saved)).graph_signature == load_exported(saved, trusted=True).graph_signature


def test_tied_weights_are_one_tensor_again(saved: Path) -> None:
    state = load_exported(saved).state_dict
    assert state["linear.weight"] is state["tied.weight"]


def test_a_loaded_program_can_be_saved_retrained_and_decomposed(saved: Path, tmp_path: Path) -> None:
    program = load_exported(saved)
    torch.export.save(program, tmp_path / "again.pt2")
    assert same(call(load_exported(tmp_path / "again.pt2")), call(load_exported(saved)))
    call(load_exported(saved))["out"].sum().backward()
    load_exported(saved).run_decompositions()
    assert program.state_dict["linear.weight"].requires_grad


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    class ReportsSavedBytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(12).reshape(3, 4)
            self.register_buffer("whole", base.to(dtype))
            self.register_buffer("turned", base.to(dtype).t())
            self.register_buffer("one", torch.tensor(1).to(dtype))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x + 1, self.whole.clone(), self.turned.clone(), self.one.clone()

    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(ReportsSavedBytes(), (X,)), path)
    mine = load_exported(path)
    assert mine.state_dict["turned"].stride() == (1, 4)
    for name, tensor in ReportsSavedBytes().state_dict().items():
        given = mine.state_dict[name]
        assert given.dtype is dtype
        assert torch.equal(given.to(torch.complex128), tensor.to(torch.complex128))


def unbacked(x: Tensor) -> Any:
    count = x.sum().to(torch.int64).item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return torch.zeros(count + 2), x.nonzero()


def sizes(x: Tensor) -> Any:
    rows = x.shape[0]
    wide = torch.nn.functional.interpolate(x[None], scale_factor=1.7)
    return x.new_zeros(max(rows, 7)), x[: rows // 2], x.repeat(2, 1), wide, x.new_zeros(min(rows**2, 50)), x[::3]


def levels(x: Tensor) -> Any:
    return torch.vmap(lambda row: row.sin().sum())(x)


LEVELS = pytest.param(levels, marks=pytest.mark.skipif(IS_OLD, reason="torch 2.11 cannot save the levels of vmap"))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [unbacked, sizes, LEVELS])
def test_symbolic_programs_load(function: Any, strict: bool, tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Model(), (X.abs(),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "m.pt2")
    mine = compare_with_torch(tmp_path / "m.pt2")
    args = torch.rand(8, 4)
    assert same(mine.module()(args), Model()(args))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Batch:
    first: Tensor
    rest: list[Tensor]


torch.export.register_dataclass(Batch, serialized_type_name="tests.program.archives.test_loading.Batch")


@dataclass
class Rows:
    x: Tensor

    def __post_init__(self) -> None:
        assert self.x.dim() == 2, "rows have columns"


torch.export.register_dataclass(Rows, serialized_type_name="tests.program.archives.test_loading.Rows")
torch.utils._pytree._register_namedtuple(Point, serialized_type_name="tests.program.archives.test_loading.Point")


class TakesTrees(nn.Module):
    def forward(self, batch: Batch, point: Point) -> dict[str, Any]:
        return {"sum": batch.first + batch.rest[0] + point.x, "point": Point(point.y, point.x)}


@torch.compiler.nested_compile_region
def _tripled(x: Tensor) -> Tensor:
    return x * 3


class TakesRows(nn.Module):
    def forward(self, rows: Rows) -> Tensor:
        return rows.x.sin()


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_derive_from_others_load(strict: bool, tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y[1::3].sum()

    rows = torch.export.Dim("rows", min=3, max=20)
    args, shapes = (torch.ones(4, 2), torch.ones(13, 2)), ({0: rows}, {0: 3 * rows + 1})
    program = torch.export.export(Model(), args, dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "m.pt2")
    mine = compare_with_torch(tmp_path / "m.pt2")
    module = Program.of(mine).module()
    assert torch.equal(module(torch.ones(5, 2), torch.ones(16, 2)), torch.tensor(20.0))
    for rows, others in ((5, 17), (5, 19)):
        with pytest.raises(AssertionError, match=r"Guard failed: y.size\(\)\[0\] == 1 \+ 3 \* x.size"):
            module(torch.ones(rows, 2), torch.ones(others, 2))


def test_own_containers_load_where_they_are_registered(tmp_path: Path) -> None:
    args = (Batch(X, [X]), Point(X, X))
    torch.export.save(torch.export.export(TakesTrees(), args), tmp_path / "m.pt2")
    mine = load_exported(tmp_path / "m.pt2")
    assert mine.example_inputs is None
    assert same(Program.of(mine).module()(*args), TakesTrees()(*args))
    with pytest.raises(AssertionError, match=r"Guard failed: batch.rest\[0\].size\(\)\[0\] == 6"):
        Program.of(mine).module()(Batch(X, [X[:5]]), Point(X, X))


def test_a_container_that_takes_nothing_but_tensors_loads(tmp_path: Path) -> None:
    args = (Rows(X),)
    torch.export.save(torch.export.export(TakesRows(), args), tmp_path / "m.pt2")
    module = Program.of(tmp_path / "m.pt2").module()
    assert same(module(*args), TakesRows()(*args))
    with pytest.raises(AssertionError, match=r"Guard failed: rows.x.size\(\)\[0\] == 6"):
        module(Rows(X[:5]))


def test_a_named_tuple_without_one_of_its_items_is_refused(tmp_path: Path) -> None:
    program = torch.export.export(TakesTrees(), (Batch(X, [X]), Point(X, X)))
    program.example_inputs = None
    torch.export.save(program, tmp_path / "m.pt2")

    def change(parsed: Any) -> None:
        signature = parsed["graph_module"]["module_call_graph"][0]["signature"]
        tree = json.loads(signature["in_spec"])
        tree[1]["children_spec"][0]["children_spec"][1]["children_spec"].pop()
        signature["in_spec"] = json.dumps(tree)

    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.program(change)
    with pytest.raises(ArchiveError, match="it has 2 keys and 1 children"):
        load_exported(spoilt.write(tmp_path / "other.pt2"))


def test_a_container_that_nobody_registered_is_named(tmp_path: Path) -> None:
    program = torch.export.export(TakesTrees(), (Batch(X, [X]), Point(X, X)))
    program.example_inputs = None
    torch.export.save(program, tmp_path / "m.pt2")
    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.members["models/model.json"] = spoilt.members["models/model.json"].replace(
        b"test_loading.Batch", b"other.Name"
    )
    with pytest.raises(ArchiveError, match=r"other.Name.*import the module that registers it") as caught:
        load_exported(spoilt.write(tmp_path / "other.pt2"))
    assert not isinstance(caught.value, UntrustedArchiveError)


def test_an_operator_that_nobody_registered_is_named(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.text("torch.ops.aten.sin.default", "torch.ops.elsewhere.sine.default")
    path = spoilt.write(tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"torch.ops.elsewhere.sine.default.*operators=\['elsewhere'\]"):
        load_exported(path)
    with pytest.raises(ArchiveError, match=r"torch.ops.elsewhere.sine.default.*import the library") as caught:
        load_exported(path, operators=["elsewhere"])
    assert not isinstance(caught.value, UntrustedArchiveError)


@pytest.mark.parametrize("allowed", ["partita_tests", "partita_tests::archived"])
def test_a_custom_operator_loads_where_it_is_registered_and_allowed(allowed: str, tmp_path: Path) -> None:
    @torch.library.custom_op("partita_tests::archived", mutates_args=())
    def archived(x: Tensor, mode: str) -> Tensor:
        return x.sin() if mode == "it's" else x.cos()

    archived.register_fake(lambda x, mode: torch.empty_like(x))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return archived(x, "it's")

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"operators=\['partita_tests'\]"):
        Program.of(tmp_path / "m.pt2")
    mine = Program.of(tmp_path / "m.pt2", operators=[allowed])
    assert torch.equal(mine.module()(X), X.sin())
    report = inspect_archive(tmp_path / "m.pt2", operators=[allowed])
    assert report.operators == ("torch.ops.partita_tests.archived.default",)
    with pytest.raises(OptionError, match="a collection of texts, such as"):
        load_exported(tmp_path / "m.pt2", operators=allowed)


_INTERNAL_OPERATORS = {
    "norms": (nn.Sequential(nn.RMSNorm(4), nn.BatchNorm1d(4)), X),
    "spectral norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), X),
    "attention": (nn.TransformerEncoderLayer(4, 2, batch_first=True).eval(), torch.randn(1, 2, 4)),
    "bicubic": (nn.Upsample(scale_factor=2.0, mode="bicubic"), torch.randn(1, 2, 4, 4)),
}


@pytest.mark.parametrize("case", _INTERNAL_OPERATORS)
@pytest.mark.parametrize("decomposed", [False, True])
def test_internal_operators_of_exports_and_decompositions_load(case: str, decomposed: bool, tmp_path: Path) -> None:
    model, x = _INTERNAL_OPERATORS[case]
    program = torch.export.export(model, (x,))
    torch.export.save(program.run_decompositions() if decomposed else program, tmp_path / "m.pt2")
    mine, torchs = Program.of(tmp_path / "m.pt2").module(), torch.export.load(tmp_path / "m.pt2").module()
    assert torch.equal(mine(x), torchs(x))


def test_quantized_programs_load(tmp_path: Path) -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    quantized = torch.ops.quantized_decomposed

    class Rounded(nn.Module):
        def forward(self, x: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, ...]:
            levels = quantized.quantize_per_channel(x, scales, zeros, 1, -128, 127, torch.int8)
            back = quantized.dequantize_per_channel(levels, scales, zeros, 1, -128, 127, torch.int8)
            return back, *quantized.choose_qparams_per_token_asymmetric(x, torch.int8)

    inputs = X, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)
    torch.export.save(torch.export.export(Rounded(), inputs), tmp_path / "m.pt2")
    mine, torchs = Program.of(tmp_path / "m.pt2").module(), torch.export.load(tmp_path / "m.pt2").module()
    assert all(map(torch.equal, mine(*inputs), torchs(*inputs)))


def test_an_index_that_compilers_take_without_a_check_is_checked(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return torch.ops.aten._unsafe_index(x, [rows])

    rows = torch.tensor([0, 1])
    torch.export.save(torch.export.export(Rows(), (X, rows)), tmp_path / "m.pt2")
    loaded = Program.of(tmp_path / "m.pt2")
    assert [node.target for node in loaded.graph.nodes if node.op == "call_function"] == [torch.ops.aten.index.Tensor]
    assert torch.equal(loaded.module()(X, rows), X[rows])


def test_one_program_under_another_name_loads_and_one_of_several_does_not(tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import package_pt2

    package_pt2(str(tmp_path / "one.pt2"), exported_programs={"encoder": exported()})
    assert same(call(load_exported(tmp_path / "one.pt2")), call(exported()))
    package_pt2(str(tmp_path / "two.pt2"), exported_programs={"encoder": exported(), "decoder": exported()})
    with pytest.raises(ArchiveError, match="'decoder', 'encoder'"):
        load_exported(tmp_path / "two.pt2")
    assert inspect_archive(tmp_path / "two.pt2").programs == ("encoder", "decoder")


def test_loading_in_a_new_process_gives_the_same_values(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch; from partita.program.archives import load_exported; "
        "x = torch.linspace(-1, 1, 24).reshape(6, 4); "
        "given = load_exported(sys.argv[1]).module()(x, {'k': x}, scale=2.0, mode='sum'); "
        "torch.save(given['out'].detach(), sys.argv[2])"
    )
    done = run_in_new_process(code, saved, tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "out.pt"), call(load_exported(saved))["out"])


@pytest.mark.parametrize("reader", ["partita.Program.of", "torch.export.load"])
@pytest.mark.parametrize("treatment", [Call(), Mode(), Recompute(), Recompute(KeepExpensive())], ids=repr)
def test_importing_partita_is_enough_to_load_what_it_saves(treatment: Any, reader: str, tmp_path: Path) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().amax()
            return (x / scale).sin() @ x.T

    program = partita.capture(Block(), (torch.randn(3, 4),))
    partita.plan(program, ByMode() if treatment == Mode() else BySize(operators=2), treatment).apply().save(
        tmp_path / "cut.pt2"
    )
    done = run_in_new_process(f"import sys, torch, partita; print({reader}(sys.argv[1]))", tmp_path / "cut.pt2")
    assert done.returncode == 0, done.stderr


def test_old_archives_with_one_pickle_of_weights_need_trust(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    program = torch.export.load(saved)
    for folder, table in (("weights", program.state_dict), ("constants", program.constants)):
        spoilt.members = {name: data for name, data in spoilt.members.items() if not name.startswith(f"data/{folder}/")}
        spoilt.members[f"data/{folder}/model.pt"] = pickled_by_torch(dict(table))
    path = spoilt.write(tmp_path / "old.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"data/weights/model.pt: it is a pickle"):
        load_exported(path)
    assert same(call(load_exported(path, trusted=True)), call(load_exported(saved)))


# The report ------------------------------------------------------------------------------------------------------


def test_a_report_says_what_is_inside(saved: Path) -> None:
    report = inspect_archive(saved)
    assert report.is_plain
    assert report.problems == ()
    assert report.programs == ("model",)
    assert report.torch_version == torch.__version__
    assert {member.name for member in report.of_kind(Kind.PROGRAM)} == {"models/model.json"}
    assert {member.name for member in report.of_kind("extra")} == {"extra/notes.txt"}
    assert sum(member.bytes for member in report.of_kind(Kind.CONSTANT)) == 32
    assert [member.name for member in report.unread] == ["data/sample_inputs/model.pt", "extra/notes.txt"]
    assert "torch.ops.higher_order.cond" in report.operators


def test_a_report_prints_and_does_not_change(saved: Path) -> None:
    report = inspect_archive(saved)
    lines = str(report).splitlines()
    assert lines[0] == f"{saved} can be loaded: torch {torch.__version__}, schema {report.schema_version}"
    assert "  excluded: data/sample_inputs/model.pt, extra/notes.txt" in lines
    assert all(len(line) < 300 for line in lines)
    with pytest.raises(FrozenInstanceError):
        report.problems = ()  # type: ignore[misc]
    assert isinstance(report, ArchiveReport)


def test_a_tensor_subclass_is_a_pickle_that_needs_trust(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"data/weights/weight_0: it is a pickle, of a tensor subclass"):
        load_exported(tmp_path / "m.pt2")
    assert isinstance(load_exported(tmp_path / "m.pt2", trusted=True).state_dict["weight"], TwoTensor)


def test_an_option_of_another_type_is_refused() -> None:
    with pytest.raises(OptionError, match="from a path, not from int"):
        load_exported(3)  # type: ignore[arg-type]


# Files that are no archives --------------------------------------------------------------------------------------


def test_what_is_no_archive_is_named(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    files = {
        "text.pt2": (b"not a zip file", "is no .pt2 archive"),
        "empty.pt2": (b"", "is no .pt2 archive"),
        "half.pt2": (whole[: len(whole) // 2], "is no .pt2 archive, or only a part of one"),
        "state.pt2": (pickled_by_torch(Plain().state_dict()), "a file of torch.save"),
    }
    for name, (data, words) in files.items():
        (tmp_path / name).write_bytes(data)
        for look in (load_exported, inspect_archive):
            with pytest.raises(ArchiveError, match=rf"{name}.*{words}"):
                look(tmp_path / name)
    with pytest.raises(ArchiveError, match="is a directory"):
        load_exported(tmp_path)
    with pytest.raises(ArchiveError, match=r"no file .*nowhere.pt2"):
        load_exported(tmp_path / "nowhere.pt2")
    for trusted in (False, True):
        with pytest.raises(ArchiveError, match=r"text\.pt2"):
            load_exported(tmp_path / "text.pt2", trusted=trusted)


def test_a_damaged_member_is_named(saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        member = archive.getinfo(next(name for name in archive.namelist() if name.endswith("models/model.json")))
    place = data.index(b"graph_module", member.header_offset)
    data[place : place + 5] = b"XXXXX"
    (tmp_path / "damaged.pt2").write_bytes(data)
    with pytest.raises(ArchiveError, match=r"models/model.json.*damaged"):
        load_exported(tmp_path / "damaged.pt2")


@pytest.mark.parametrize("version", [{"major": 999, "minor": 1}, {"major": 1, "minor": 1}])
def test_another_version_of_the_schema_is_named(saved: Path, tmp_path: Path, version: dict[str, int]) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(schema_version=version, torch_version="9.9"))
    with pytest.raises(ArchiveError, match=rf"schema version {version['major']}.1.*9\.9") as caught:
        load_exported(spoilt.write(tmp_path / "m.pt2"))
    assert not isinstance(caught.value, UntrustedArchiveError)


@pytest.mark.parametrize("member", ["archive_version", "archive_format", "byteorder"])
def test_another_format_is_named(saved: Path, tmp_path: Path, member: str) -> None:
    spoilt = Spoilt(saved)
    spoilt.members[member] = b"7"
    with pytest.raises(ArchiveError, match=f"{member}: it says '7'"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_the_format_of_torch_2_7_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("version", "8.8")
        archive.writestr("serialized_exported_program.json", "{}")
    with pytest.raises(ArchiveError, match=r"torch 2\.7 or older"):
        load_exported(tmp_path / "old.pt2")


@pytest.mark.parametrize(
    ("member", "data"),
    [
        ("models/model.json", b"{"),
        ("models/model.json", b"[]"),
        ("models/model.json", b"[" * 100_000),
        ("models/model.json", b'{"graph_module": 3}'),
        ("data/weights/model_weights_config.json", b'{"config": [1]}'),
        ("data/constants/model_constants_config.json", b"\xff\xfe"),
    ],
)
def test_a_text_that_torch_does_not_write_is_named(saved: Path, tmp_path: Path, member: str, data: bytes) -> None:
    spoilt = Spoilt(saved)
    spoilt.members[member] = data
    with pytest.raises(ArchiveError, match=member):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize("member", ["data/weights/weight_0", "data/weights/model_weights_config.json"])
def test_a_missing_member_is_named(saved: Path, tmp_path: Path, member: str) -> None:
    spoilt = Spoilt(saved)
    del spoilt.members[member]
    with pytest.raises(ArchiveError, match=member):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize("numbers", [{"sizes": [1 << 40, 4]}, {"storage_offset": 1 << 40}, {"sizes": [-4, 4]}])
def test_a_tensor_larger_than_its_data_is_refused(saved: Path, tmp_path: Path, numbers: dict[str, Any]) -> None:
    def change(config: Any) -> None:
        meta = config["config"]["linear.weight"]["tensor_meta"]
        for key, value in numbers.items():
            meta[key] = [{"as_int": part} for part in value] if isinstance(value, list) else {"as_int": value}

    spoilt = Spoilt(saved)
    spoilt.json("data/weights/model_weights_config.json", change)
    with pytest.raises(ArchiveError, match=r"data/weights/weight_1: it has"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_compiled_code_alone_is_no_program(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/archive_version", "0")
        archive.writestr("m/extra/notes.txt", "hello")
    with pytest.raises(ArchiveError, match="holds no exported program"):
        load_exported(tmp_path / "m.pt2")
    with pytest.raises(ArchiveError, match="trusted, but torch cannot load it"):
        load_exported(tmp_path / "m.pt2", trusted=True)


@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_loaded_in_inference_mode_can_be_trained_and_written(saved: Path, trusted: bool) -> None:
    with torch.inference_mode():
        loaded = load_exported(saved, trusted=trusted)
    assert loaded.state_dict
    assert not any(tensor.is_inference() for tensor in loaded.state_dict.values())


# Conditions ------------------------------------------------------------------------------------------------------


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) / x.shape[0] if x.shape[0] % 2 == 0 else x.sum(0) * 100


def test_a_branch_may_read_a_dynamic_size(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            count = y.shape[0]
            return torch.cond(x.sum() > 0, lambda x: x * count, lambda x: x + count, (x,))

    sizes = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    exported = torch.export.export(Model(), (torch.ones(3, 4), torch.ones(5)), dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "m.pt2")
    loaded = compare_with_torch(tmp_path / "m.pt2").module()
    assert torch.equal(loaded(torch.ones(2, 4), torch.ones(3)), torch.full((2, 4), 3.0))
    assert torch.equal(loaded(-torch.ones(2, 4), torch.ones(6)), torch.full((2, 4), 5.0))


def test_what_is_loaded_checks_the_conditions_of_its_trace(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(Even(), (X,), dynamic_shapes=shapes), tmp_path / "m.pt2")
    module = load_exported(tmp_path / "m.pt2").module()
    assert torch.equal(module(X[:4]), Even()(X[:4]))
    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[0\] % 2 == 0"):
        module(X[:5])


class Keyed:
    """A container with names for its parts that its context does not have."""

    def __init__(self, a: Tensor) -> None:
        self.a = a


torch.utils._pytree.register_pytree_node(
    Keyed,
    lambda keyed: ([keyed.a], "context"),
    lambda values, _: Keyed(*values),
    serialized_type_name="tests.program.archives.test_loading.Keyed",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: context,
    flatten_with_keys_fn=lambda keyed: ([(torch.utils._pytree.GetAttrKey("a"), keyed.a)], "context"),
)


def test_a_condition_on_a_part_of_an_argument_is_not_taken_for_one_on_its_namesake() -> None:
    class Model(nn.Module):
        def forward(self, c: Keyed, a: Tensor) -> Tensor:
            return (c.a.sum(0) if c.a.shape[0] % 2 == 0 else c.a.sum(0) * 100) + a.sum(0)

    rows = torch.export.Dim.AUTO
    program = Program.of(
        torch.export.export(Model(), (Keyed(X), X[:3]), dynamic_shapes=([{0: rows}], {0: rows})),
    )
    module = program.module()
    module(Keyed(X[:4]), X[:5])
    with pytest.raises(AssertionError, match=r"c\.a\.size\(\)\[0\] % 2 == 0"):
        module(Keyed(X[:5]), X[:4])


@pytest.mark.parametrize("strict", [False, True])
def test_conditions_are_kept_as_they_are_by_another_export(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, k: Tensor) -> Tensor:
            return x.sum() + k.sum() if max(x.shape[0], k.shape[0]) < 40 else x.sum()

    shapes = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})
    first = torch.export.export(Model(), (torch.ones(8, 2), torch.ones(6, 2)), dynamic_shapes=shapes)
    module = Program.of(first).module()
    again = torch.export.export(
        module, (torch.ones(8, 2), torch.ones(6, 2)), dynamic_shapes=shapes, strict=strict
    ).module()
    for rows, others in ((5, 8), (4, 4), (8, 5)):
        again(torch.ones(rows, 2), torch.ones(others, 2))
    with pytest.raises(AssertionError):
        again(torch.ones(41, 2), torch.ones(4, 2))


class LoadsAnother:
    """A pickle of this loads another file, as a trusted one may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return load_exported, (self.path,)


def test_a_trusted_file_may_load_another(tmp_path: Path) -> None:
    torch.export.save(exported(), tmp_path / "inner.pt2")
    outer = exported()
    outer._example_inputs = ((LoadsAnother(tmp_path / "inner.pt2"),), {})
    torch.export.save(outer, tmp_path / "outer.pt2")
    code = "import sys; from partita.program.archives import load_exported; load_exported(sys.argv[1], trusted=True)"
    done = run_in_new_process(code, tmp_path / "outer.pt2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["enc.graph", "enc.code", "head.forwarded"])
def test_a_parameter_may_be_named_like_an_attribute_of_graph_modules_deeper_down(name: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name.partition(".")[0], nn.ModuleDict({name.partition(".")[2]: nn.Linear(4, 4)}))

        def forward(self, x: Tensor) -> Tensor:
            first, _, second = name.partition(".")
            return self.get_submodule(first)[second](x)

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "m.pt2")
    assert f"{name}.weight" in load_exported(tmp_path / "m.pt2").state_dict


def test_sums_of_many_sizes_and_many_outputs_load(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return torch.cat(xs), [xs[0] * number for number in range(600)]

    args = tuple(torch.ones(2 + number, 2) for number in range(30))
    program = torch.export.export(Model(), args, dynamic_shapes=(tuple({0: torch.export.Dim.DYNAMIC} for _ in args),))
    torch.export.save(program, tmp_path / "m.pt2")
    joined, many = Program.of(tmp_path / "m.pt2").module()(*args)
    assert joined.shape[0] == sum(len(x) for x in args)
    assert len(many) == 600


def test_calls_of_a_repeated_body_have_identifiers_of_their_own(tmp_path: Path) -> None:
    """Compilers take the body that they traced first for all with its identifier, whatever their operands are."""

    class Repeated(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return _tripled(x), _tripled(y)

    args = (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    torch.export.save(torch.export.export(Repeated(), args, strict=True), tmp_path / "m.pt2")
    program = Program.of(tmp_path / "m.pt2")
    calls = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    assert len({node.args[1] for node in calls}) == len(calls) == 2
    assert same(program.module()(*args), Repeated()(*args))


def test_an_identifier_by_keyword_is_replaced_too(tmp_path: Path) -> None:
    class Repeated(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return _tripled(x), _tripled(y)

    args = (torch.ones(4), torch.zeros(4))
    torch.export.save(torch.export.export(Repeated(), args, strict=True), tmp_path / "m.pt2")
    spoilt = Spoilt(tmp_path / "m.pt2")

    def change(program: Any) -> None:
        nodes = [one for one in program["graph_module"]["graph"]["nodes"] if "invoke_subgraph" in one["target"]]
        assert len(nodes) == 2
        for made in nodes:
            made["inputs"][1] = {"name": "identifier", "arg": {"as_string": "same"}, "kind": 2}

    spoilt.program(change)
    program = Program.of(spoilt.write(tmp_path / "spoilt.pt2"))
    made = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    assert [(node.args[1], node.kwargs) for node in made] == [("call_0", {}), ("call_1", {})]
    assert same(program.module()(*args), Repeated()(*args))


@pytest.mark.parametrize("given", [{"as_none": True}, {"as_int": 3}, {"as_string": "sum"}])
def test_an_input_without_a_name_is_refused_as_a_part_of_the_file(given: Any, saved: Path, tmp_path: Path) -> None:
    """torch's verifier compares the names of tensors and sizes alone."""
    spoilt = Spoilt(saved)

    def change(program: Any) -> None:
        module = program["graph_module"]
        (place,) = [at for at, one in enumerate(module["graph"]["inputs"]) if "as_string" in one]
        module["graph"]["inputs"][place] = given
        module["signature"]["input_specs"][place] = {"user_input": {"arg": given}}

    spoilt.program(change)
    path = spoilt.write(tmp_path / "m.pt2")
    with pytest.raises(ArchiveError, match=r"graph_module\.signature: the signature does not fit the graph"):
        Program.of(path)
    assert not inspect_archive(path).is_plain


def test_weights_can_be_resized_as_those_of_a_model(saved: Path) -> None:
    loaded = load_exported(saved)
    for tensor in (*loaded.state_dict.values(), *loaded.constants.values()):
        assert tensor.untyped_storage().resizable()


def test_a_symbol_without_a_range_has_one_for_torch(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program["range_constraints"].clear())
    program = Program.of(spoilt.write(tmp_path / "m.pt2"))
    assert not program.exported().range_constraints
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    out = dissolve(program).module()(x, {"k": x}, scale=2.0, mode="sum")
    assert out["half"] == 1
