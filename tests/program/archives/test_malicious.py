"""Archives made to run code: each one really does so through torch, and none does through ours.

Every attack touches a canary file. The first test shows that torch falls for it, so that the others could fail.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.torch_versions import IS_OLD
from tests.program.archives.helpers import Spoilt, X, call, exported, plain_poison, poison
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import partita
from partita import Program
from partita.errors import ArchiveError, OptionError, UntrustedArchiveError
from partita.policies import BySize
from partita.program.archives import inspect_archive, load_exported
from partita.treatments import KeepExpensive, Recompute

Attack = Callable[[Spoilt, Path], None]


class Small(nn.Module):
    """One input and nothing else, so that its name comes last in generated code."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "plain.pt2"
    torch.export.save(exported(), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "small.pt2"
    torch.export.save(torch.export.export(Small(), (X,)), path)
    return path


def touching(canary: Path) -> str:
    """A Python expression that touches the canary, without double quotes."""
    return f"__import__('os').system('touch {canary}')"


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


# Pickles ---------------------------------------------------------------------------------------------------------


def in_sample_inputs(spoilt: Spoilt, canary: Path) -> None:
    spoilt.members["data/sample_inputs/model.pt"] = poison(canary)


def in_a_weight(spoilt: Spoilt, canary: Path) -> None:
    def change(config: Any) -> None:
        entry = config["config"]["named.a-b.weight"]
        entry["use_pickle"] = True
        spoilt.members[f"data/weights/{entry['path_name']}"] = poison(canary)

    spoilt.json("data/weights/model_weights_config.json", change)


def in_a_constant(spoilt: Spoilt, canary: Path) -> None:
    spoilt.members["data/constants/tensor_0"] = poison(canary)
    spoilt.json(
        "data/constants/model_constants_config.json",
        lambda config: next(iter(config["config"].values())).update(use_pickle=True),
    )


def in_an_opaque_object(spoilt: Spoilt, canary: Path) -> None:
    spoilt.members["data/constants/opaque_obj_0"] = plain_poison(canary)
    add_object(spoilt, "opaque_obj_0")


def add_object(spoilt: Spoilt, name: str) -> None:
    entry = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    spoilt.json("data/constants/model_constants_config.json", lambda config: config["config"].update(object=entry))


def in_old_weights(spoilt: Spoilt, canary: Path) -> None:
    spoilt.members["data/weights/model.pt"] = poison(canary)


def in_old_constants(spoilt: Spoilt, canary: Path) -> None:
    spoilt.members["data/constants/model.pt"] = poison(canary)


# Texts -----------------------------------------------------------------------------------------------------------


def in_an_expression(spoilt: Spoilt, canary: Path) -> None:
    def change(program: Any) -> None:
        sizes = graph(program)["tensor_values"]["x"]["sizes"]
        sizes[0] = {"as_expr": {"expr_str": touching(canary), "hint": None}}

    spoilt.program(change)


def in_a_guard(spoilt: Spoilt, canary: Path) -> None:
    spoilt.program(lambda program: program.update(guards_code=[f"{touching(canary)} == 0"]))


def in_the_name_of_an_input(spoilt: Spoilt, canary: Path) -> None:
    spoilt.text("x", f"x={touching(canary)}")


def in_the_name_of_a_target(spoilt: Spoilt, canary: Path) -> None:
    def change(program: Any) -> None:
        node = next(node for node in graph(program)["nodes"] if node["target"].endswith("aten.reshape.default"))
        node["target"] = "torch.os.system"
        node["inputs"] = [{"name": "", "arg": {"as_string": f"touch {canary}"}, "kind": 1}]

    spoilt.program(change)


def in_an_operator_argument(spoilt: Spoilt, canary: Path) -> None:
    def change(program: Any) -> None:
        node = next(node for node in graph(program)["nodes"] if node["target"].endswith("aten.reshape.default"))
        node["target"] = "torch.ops.higher_order.wrap"
        command = {"as_string": f"touch {canary}"}
        arguments = ({"as_operator": "torch.os.system"}, command)
        node["inputs"] = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]

    spoilt.program(change)


def in_a_text_input(spoilt: Spoilt, canary: Path) -> None:
    spoilt.text("sum", f"no' or {touching(canary)} or 'no")


def in_the_name_of_a_parameter(spoilt: Spoilt, canary: Path) -> None:
    command = f'getattr(__import__("os"), "system")("touch {canary}")'
    evil = f'__class__") and {command} or getattr(self, "__class__'
    spoilt.text("linear.bias", evil)
    member = "data/weights/model_weights_config.json"
    spoilt.members[member] = spoilt.members[member].replace(b'"linear.bias"', json.dumps(evil).encode())


def in_the_name_of_an_argument(spoilt: Spoilt, canary: Path) -> None:
    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"][-1] = f"mode={touching(canary)}"

    spoilt.program(change)


def in_a_keyword_of_the_inputs(spoilt: Spoilt, canary: Path) -> None:
    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        key = f"mode': {touching(canary)}, 'mode"
        signature["in_spec"] = signature["in_spec"].replace("mode", key)

    spoilt.program(change)


def tree(kind: str, context: Any) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf, leaf, leaf, leaf]}])


def in_a_key_of_the_outputs(spoilt: Spoilt, canary: Path) -> None:
    """Reading the key imports a module that touches the canary."""
    module = f"partita_evil_{canary.stem}"
    folder = canary.parent / "modules"
    folder.mkdir()
    (folder / f"{module}.py").write_text(f"open({str(canary)!r}, 'w').close()")
    sys.path.insert(0, str(folder))
    context = json.dumps([{"__enum__": True, "fqn": f"{module}:Evil", "name": "A"}, "b", "c", "d"])
    spoilt.program(
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            out_spec=tree("builtins.dict", context)
        )
    )


def in_a_factory_of_the_outputs(spoilt: Spoilt, canary: Path) -> None:
    module = f"partita_evil_{canary.stem}"
    folder = canary.parent / "modules"
    folder.mkdir()
    (folder / f"{module}.py").write_text(f"open({str(canary)!r}, 'w').close()")
    sys.path.insert(0, str(folder))
    context = {"default_factory_module": module, "default_factory_name": "run", "dict_context": ["a", "b", "c", "d"]}
    spoilt.program(
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            out_spec=tree("collections.defaultdict", context)
        )
    )


class Job:
    """A container of somebody's that was registered for vmap, and not to be saved: its context is its own."""

    def __init__(self, parts: list[Any], command: Any) -> None:
        self.parts = parts
        self.command = command


def in_a_container_without_a_name(spoilt: Spoilt, canary: Path) -> None:
    if Job not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Job,
            lambda job: (job.parts, job.command),
            lambda parts, command: os.system(command[0]),  # type: ignore[arg-type, return-value]
        )
    spoilt.program(
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            out_spec=tree("NO_SERIALIZED_TYPE_NAME_FOUND", json.dumps([f"touch {canary}"]))
        )
    )


#: The attack, and the member that the error must name.
ATTACKS: dict[str, tuple[Attack, str]] = {
    "weight": (in_a_weight, "data/weights/weight_"),
    "constant": (in_a_constant, "data/constants/tensor_0"),
    "opaque object": (in_an_opaque_object, "data/constants/opaque_obj_0"),
    "old weights": (in_old_weights, "data/weights/model.pt"),
    "old constants": (in_old_constants, "data/constants/model.pt"),
    "container": (in_a_container_without_a_name, "models/model.json"),
    "expression": (in_an_expression, "models/model.json"),
    "guard": (in_a_guard, "models/model.json"),
    "input": (in_the_name_of_an_input, "models/model.json"),
    "operator": (in_an_operator_argument, "models/model.json"),
    "text": (in_a_text_input, "models/model.json"),
    "parameter": (in_the_name_of_a_parameter, "data/weights/model_weights_config.json"),
    "key": (in_a_key_of_the_outputs, "models/model.json"),
    "factory": (in_a_factory_of_the_outputs, "models/model.json"),
    "target": (in_the_name_of_a_target, "models/model.json"),
    "argument": (in_the_name_of_an_argument, "models/model.json"),
    "keyword": (in_a_keyword_of_the_inputs, "models/model.json"),
}
#: What torch 2.13 itself stops, later, by its verifier or by a syntax error; older ones know no opaque objects.
STOPPED_BY_TORCH = ("operator", "target", "argument", "keyword", *(["opaque object"] if IS_OLD else []))


@pytest.fixture(params=ATTACKS)
def attack(
    request: pytest.FixtureRequest, saved: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path, str]:
    """A malicious archive, the canary that it touches, and the member to blame."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spoil, member = ATTACKS[request.param]
    canary = tmp_path / f"canary_{request.param.replace(' ', '_')}"
    spoilt = Spoilt(small if request.param == "input" else saved)
    spoil(spoilt, canary)
    return spoilt.write(tmp_path / "evil.pt2"), canary, member


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in STOPPED_BY_TORCH], indirect=True)
def test_torch_falls_for_the_attack(attack: tuple[Path, Path, str]) -> None:
    path, canary, _ = attack
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        program = torch.export.load(path)
        call(program)
    assert canary.exists(), "this attack does nothing, so refusing it proves nothing"


def test_the_attack_is_refused_by_name_and_nothing_runs(attack: tuple[Path, Path, str]) -> None:
    path, canary, member = attack
    with pytest.raises(UntrustedArchiveError) as caught:
        load_exported(path)
    told = str(caught.value)
    assert str(path) in told
    assert member in told
    assert "trusted=True" in told
    assert not canary.exists()


def test_looking_at_the_attack_runs_nothing(attack: tuple[Path, Path, str]) -> None:
    path, canary, member = attack
    report = inspect_archive(path)
    assert any(problem.member.startswith(member) and problem.is_danger for problem in report.problems)
    assert f"! {member}" in str(report)
    assert not canary.exists()


def test_trusting_the_attack_runs_it(saved: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    spoilt = Spoilt(saved)
    in_sample_inputs(spoilt, canary)
    with suppress(ArchiveError):
        load_exported(spoilt.write(tmp_path / "evil.pt2"), trusted=True)
    assert canary.exists()


# Example inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [poison, plain_poison, lambda _: b"garbage", lambda _: b""])
def test_example_inputs_are_left_out_whatever_they_are(
    saved: Path, tmp_path: Path, data: Callable[[Path], bytes]
) -> None:
    spoilt, canary = Spoilt(saved), tmp_path / "canary"
    spoilt.members["data/sample_inputs/model.pt"] = data(canary)
    path = spoilt.write(tmp_path / "m.pt2")
    loaded = load_exported(path)
    assert loaded.example_inputs is None
    call(loaded)
    report = inspect_archive(path)
    assert report.is_plain
    assert [member.name for member in report.unread] == ["data/sample_inputs/model.pt"]
    assert not canary.exists()


# Containers ------------------------------------------------------------------------------------------------------


def written(saved: Path, path: Path, add: Callable[[zipfile.ZipFile, str], None]) -> Path:
    spoilt = Spoilt(saved)
    spoilt.write(path)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as archive:
        add(archive, spoilt.root)
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}/../../etc/passwd", "leads out of the archive"),
        ("/etc/passwd", "not in the folder"),
        ("..\\evil", "not in the folder"),
        ("other/models/model.json", "not in the folder"),
        ("{}/models/model.json", "2 times"),
        ("{}/data/surprise", "it is an unknown kind of member"),
        ("{}/models/evil.py", "it is an unknown kind of member"),
        ("{}/data/aotinductor/model/model.so", "code of AOTInductor"),
        ("{}/data/executorch/model.pte", "code of AOTInductor"),
        ("{}/data/constants/custom_obj_0", "custom object"),
    ],
)
def test_members_that_no_program_needs_are_refused(saved: Path, tmp_path: Path, name: str, words: str) -> None:
    path = written(saved, tmp_path / "m.pt2", lambda archive, root: archive.writestr(name.format(root), b"x"))
    with pytest.raises(UntrustedArchiveError, match=words) as caught:
        load_exported(path)
    assert name.removeprefix("{}/") in str(caught.value)


def test_compressed_members_are_refused_unread(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.members["extra/zeros"] = bytes(50_000_000)
    path = spoilt.write(tmp_path / "bomb.pt2", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    with pytest.raises(UntrustedArchiveError, match=r"it is compressed: \d+ bytes become"):
        load_exported(path)


@pytest.mark.parametrize("member", ["archive_format", "byteorder", "models/model.json"])
def test_a_bomb_is_never_unpacked(saved: Path, tmp_path: Path, member: str) -> None:
    """bzip2 makes gigabytes of a few bytes at once, whatever the header says of their number."""
    spoilt = Spoilt(saved)
    spoilt.members[member] = bytes(1_000_000)
    path = spoilt.write(tmp_path / "bomb.pt2", compression=zipfile.ZIP_BZIP2)

    def never(*_: Any) -> Any:
        raise AssertionError("a compressed member was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile, "_get_decompressor", never)
        with pytest.raises(UntrustedArchiveError, match="it is compressed"):
            load_exported(path)
        assert not inspect_archive(path).is_plain


def test_a_member_outside_the_folder_is_no_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/models/model.json", "{}")
        archive.writestr("archive_format", "pt2")
    for look in (load_exported, inspect_archive):
        with pytest.raises(ArchiveError, match=r"no \.pt2 archive"):
            look(tmp_path / "m.pt2")


def test_nothing_of_a_file_reaches_the_terminal_as_it_is(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(torch_version="\x1b[31m\nnew line"))
    spoilt.members["extra/\x1b[2J\ny"] = b""
    path = spoilt.write(tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError) as caught:
        load_exported(path)
    for told in (str(caught.value), *str(inspect_archive(path)).splitlines()):
        assert told.isprintable()


@pytest.mark.parametrize("device", ["hpu", "privateuseone", "cuda", "mtia", "lazy"])
def test_weights_on_a_device_that_is_not_here_are_refused_in_words(saved: Path, tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    spoilt = Spoilt(saved)
    spoilt.json(
        "data/weights/model_weights_config.json",
        lambda config: config["config"]["linear.weight"]["tensor_meta"].update(device={"type": device, "index": 0}),
    )
    with pytest.raises(ArchiveError, match=f"its weights are on {device}:0, which is not available here") as caught:
        load_exported(spoilt.write(tmp_path / "m.pt2"))
    assert "\n" not in str(caught.value)


def test_more_members_than_any_program_has_are_refused(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("partita.program.archives.container.MOST_MEMBERS", 3)
    with pytest.raises(ArchiveError, match="no archive of a program has more than 3"):
        load_exported(saved)
    monkeypatch.undo()
    monkeypatch.setattr("partita.program.archives.container.MOST_TEXT_BYTES", 100)
    with pytest.raises(ArchiveError, match="which no graph needs"):
        load_exported(saved)


def test_members_that_overlap_are_refused(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        entry = archive.getinfo(archive.namelist()[0])
    directory = data.rindex(b"PK\x05\x06")
    first = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x01\x02", first + 4)
    record = data[first:end]
    copies = b"".join(record.replace(b"weight_0", b"weigh%03d" % at) for at in range(500))
    assert entry.filename.endswith("weight_0")
    tail = bytearray(data[directory:])
    count = int.from_bytes(tail[8:10], "little") + 500
    tail[8:10] = tail[10:12] = count.to_bytes(2, "little")
    tail[12:16] = (directory - first + len(copies)).to_bytes(4, "little")
    (tmp_path / "overlap.pt2").write_bytes(data[:first] + copies + data[first:directory] + bytes(tail))
    with pytest.raises(ArchiveError):
        load_exported(tmp_path / "overlap.pt2")


def test_custom_objects_are_named(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)

    def change(program: Any) -> None:
        graph(program)["custom_obj_values"] = {"held": {"name": "held", "class_fqn": "torch.classes.evil.Thing"}}

    spoilt.program(change)
    path = spoilt.write(tmp_path / "m.pt2")
    with pytest.raises(UntrustedArchiveError, match=r"custom_obj_values: custom objects are rebuilt by code"):
        load_exported(path)


# Texts that exhaust or surprise ----------------------------------------------------------------------------------


def size(number: int) -> str:
    return f"Symbol('s{number}', positive=True, integer=True)"


@pytest.mark.parametrize(
    "text",
    [
        "Pow(Integer(9), Pow(Integer(9), Integer(99)))",
        "9**9**9**9",
        "Integer(9)^Integer(9)^Integer(99)",
        "LShift(Integer(1), Integer(10000000000))",
        "Float('1.0', precision=10000000000)",
        "(" * 5000 + "s0" + ")" * 5000,
        "s0 + " * 5_000 + "1",
        "Symbol('s0').__class__.__mro__",
        "sympify('1')",
        "(lambda: 1)()",
        "[s0 for s0 in (1, 2)]",
        "s0\n",
        "s0 # comment",
        "factorial(1000000000)",
        "*".join(f"s{number}" for number in range(24)),
        "Pow(" * 12 + "Symbol('s47', positive=True, integer=True)" + ", Integer(8))" * 12,
        "Pow(" * 12 + "Integer(9)" + ", Integer(8))" * 12,
        "*".join(f"(s{number} + s{number + 1})" for number in range(0, 12, 2)),
        "*".join(f"(-(s{number} + s{number + 1}))" for number in range(0, 24, 2)),
        "*".join(f"FloorDiv({size(number)} + {size(number + 1)}, 1)" for number in range(0, 24, 2)),
        "*".join(f"max(s{number} + s{number + 1}, s{number} + s{number + 1})" for number in range(0, 24, 2)),
        "FloorDiv(" * 6 + "s0" + "".join(f", s0 + s1 + s2 + s3 + {number})" for number in range(6)),
        "CleanDiv(" * 6 + "s0" + "".join(f", s0 + s1 + s2 + s3 + {number})" for number in range(6)),
        "Equality(s0, Integer(3))",
        "ModularIndexing(s0 + s1, s2 + s3, s4 + s5)",
    ],
)
def test_expressions_that_are_none_are_refused(saved: Path, tmp_path: Path, text: str) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(
        lambda p: graph(p)["tensor_values"]["x"]["sizes"].insert(0, {"as_expr": {"expr_str": text, "hint": None}})
    )
    with pytest.raises(UntrustedArchiveError, match=r"tensor_values\.x\.sizes\[0\]\.as_expr\.expr_str"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].__class__ == 1",
        "L['x'].numpy().tofile('a') == 1",
        "torch.os.system('a') == 0",
        "exec('1') == 0",
        "L['x\"'] == 1",
        "L == 1",
        "(x := 1) == 1",
        "L['x'].size()[0] ** 100000 > 1",
        "print(L['x']) == 1",
        "(((L['x'].size()[0] ** 8) ** 8) ** 8) ** 8 > 1",
        "'a' * 3000000000 == 'b'",
        "'%2000000000d' % L['x'].size()[0] == 'b'",
        "L['x'].size() * 200000000 == 3",
        "1 << 60 << 60 == 3",
        "round(L['x'].size()[0], -9999999999999) == 0",
    ],
)
def test_guards_that_are_none_are_refused(saved: Path, tmp_path: Path, text: str) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(guards_code=[text]))
    with pytest.raises(UntrustedArchiveError, match="guards_code"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_conditions_compute_with_no_texts(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(guards_code=["L['mode'] * 10000000000 == 1"]))
    with pytest.raises(TypeError, match="conditions compute with numbers"):
        call(load_exported(spoilt.write(tmp_path / "m.pt2")))


def test_more_conditions_than_any_program_has_are_refused(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(guards_code=["L['x'].size()[0] >= 2"] * 20_000))
    with pytest.raises(ArchiveError, match="guards_code: its conditions have more than 400000 letters"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_more_ranges_than_any_program_has_are_refused(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    ranges = {f"u{number}": {"min_val": 0, "max_val": 1} for number in range(100_001)}
    spoilt.program(lambda program: program["range_constraints"].update(ranges))
    with pytest.raises(ArchiveError, match="range_constraints: it has more than 100000 ranges"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def set_constraint(program: Any) -> None:
    program["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 1}


def set_number(program: Any) -> None:
    for node in graph(program)["nodes"]:
        for given in node["inputs"]:
            if "as_int" in given["arg"]:
                given["arg"] = {"as_int": "__import__('os')"}


def set_unknown_text(program: Any) -> None:
    program["graph_module"]["graph"]["is_single_tensor_return"] = "yes"


def set_files(program: Any) -> None:
    node = next(node for node in graph(program)["nodes"] if node["target"].endswith("aten.reshape.default"))
    node["target"] = "torch.ops.aten.from_file.default"


def set_extension(program: Any) -> None:
    graph(program)["nodes"][0]["target"] = "#evil:run"


def set_text_for_a_number(program: Any) -> None:
    """Compilers paste numbers into C++: `mul(x, "2; system(...)")`."""
    node = next(node for node in graph(program)["nodes"] if node["target"].endswith("aten.mul.Tensor"))
    node["inputs"][1]["arg"] = {"as_string": "2"}


def set_text_for_an_operator_with_a_body(program: Any) -> None:
    """Inductor pastes the scale of flex_attention into C++."""
    node = next(node for node in graph(program)["nodes"] if node["target"].endswith("higher_order.cond"))
    node["inputs"].append({"name": "", "arg": {"as_string": "0.25; system(c)"}, "kind": 1})


def set_compiler_options(program: Any) -> None:
    custom = {"compile_with_inductor": {"inductor_configs": {"cpp.cxx": ["evil"]}}}
    graph(program)["nodes"][1]["metadata"]["custom"] = json.dumps(custom)


def set_stream(program: Any) -> None:
    """Inductor pastes the stream of a node into the Python that it generates for a GPU."""
    graph(program)["nodes"][1]["metadata"]["custom"] = json.dumps({"stream": "0"})


def set_code_in_an_annotation(program: Any) -> None:
    graph(program)["nodes"][1]["metadata"]["custom"] = json.dumps({"future": "0) if not f() else (0"})


def set_module(program: Any) -> None:
    graph(program)["nodes"][1]["metadata"]["nn_module_stack"] = 'k,a") + evil + ("b,t'


@pytest.mark.parametrize(
    "change",
    [
        *(set_number, set_unknown_text, set_files, set_extension, set_module),
        *(set_text_for_a_number, set_text_for_an_operator_with_a_body, set_compiler_options),
        *(set_stream, set_code_in_an_annotation),
    ],
)
def test_other_texts_that_torch_does_not_write_are_refused(saved: Path, tmp_path: Path, change: Any) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(ArchiveError, match=r"models/model\.json"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_the_message_of_an_assertion_cannot_end_a_string(tmp_path: Path) -> None:
    """Inductor pastes it into C++: `throw std::runtime_error("...")`."""

    class Asserting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._assert_async(x.sum() > 0, 'no"); system("touch it"); ("')
            return x.sin()

    torch.export.save(torch.export.export(Asserting(), (X.abs(),)), tmp_path / "m.pt2")
    loaded = load_exported(tmp_path / "m.pt2")
    (node,) = loaded.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    assert node.args[1] == "no`); system(`touch it`); (`"


def test_a_dialect_is_verified_once(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(verifiers=program["verifiers"] * 10_000))
    assert len(load_exported(spoilt.write(tmp_path / "m.pt2")).verifiers) == 1


def test_a_range_of_a_symbol_that_no_size_has_means_nothing(saved: Path, tmp_path: Path) -> None:
    """torch counts up to the number in its name."""
    spoilt = Spoilt(saved)
    spoilt.program(set_constraint)
    assert "u99999999999" not in map(str, load_exported(spoilt.write(tmp_path / "m.pt2")).range_constraints)


# Chance ----------------------------------------------------------------------------------------------------------

JUNK = (None, 0, -1, 1 << 70, "", "x", "a'b", [], {}, True, 1.5, ["x"], {"a": 1}, "torch.ops.aten.sin.default")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@pytest.mark.parametrize("member", ["models/model.json", "data/weights/model_weights_config.json"])
def test_texts_spoilt_by_chance_load_or_are_refused_in_words(saved: Path, tmp_path: Path, member: str) -> None:
    refused = 0
    for seed in range(40):
        dice, spoilt = random.Random(seed), Spoilt(saved)
        parsed = json.loads(spoilt.members[member])
        owner, key = dice.choice(places(parsed))
        owner[key] = dice.choice(JUNK)
        spoilt.members[member] = json.dumps(parsed).encode()
        try:
            load_exported(spoilt.write(tmp_path / "m.pt2"))
        except ArchiveError:
            refused += 1
    assert refused > 20


def test_bytes_spoilt_by_chance_load_or_are_refused_in_words(saved: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(40):
        dice, data = random.Random(seed), bytearray(saved.read_bytes())
        for _ in range(10):
            data[dice.randrange(len(data))] = dice.randrange(256)
        (tmp_path / "m.pt2").write_bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
        try:
            load_exported(tmp_path / "m.pt2")
        except ArchiveError:
            refused += 1
    assert refused > 20


# Costs after loading -----------------------------------------------------------------------------------------------


def _product(count: int) -> str:
    return " * ".join(f"(L['x'].size()[0] + {number})" for number in range(1, count + 1)) + " != 0"


def test_a_condition_that_torch_would_multiply_out_for_ever_is_refused(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: program.update(guards_code=[_product(9)]))
    with pytest.raises(UntrustedArchiveError, match=r"guards_code.*more than 256 terms"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))
    spoilt.program(lambda program: program.update(guards_code=[_product(5)] * 200))
    with pytest.raises(ArchiveError, match="conditions are too many or too complex"):
        load_exported(spoilt.write(tmp_path / "n.pt2"))


class _Nested(nn.Module):
    """Branches in branches."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        def branch(depth: int) -> Callable[[Tensor], Tensor]:
            if depth == 0:
                return torch.sin
            return lambda x: torch.cond(x.sum() > depth, branch(depth - 1), torch.cos, (x,))

        return branch(self.depth)(x)


def test_branches_are_nested_a_few_deep(tmp_path: Path) -> None:
    for depth in (4, 5):
        torch.export.save(torch.export.export(_Nested(depth), (X,)), tmp_path / f"{depth}.pt2")
    assert torch.equal(load_exported(tmp_path / "4.pt2").module()(X), _Nested(4)(X))
    with pytest.raises(ArchiveError, match="branches, loops and the like are nested more than 4 deep"):
        load_exported(tmp_path / "5.pt2")


@pytest.mark.parametrize("index", [128, 300, -1, 2**70])
def test_no_machine_has_so_many_devices(saved: Path, tmp_path: Path, index: int) -> None:
    def change(program: Any) -> None:
        graph(program)["tensor_values"]["x"]["device"] = {"type": "cuda", "index": index}

    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(ArchiveError, match="device"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_parameter_without_a_tensor_is_refused(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.json("data/weights/model_weights_config.json", lambda config: config["config"].pop("named.a-b.weight"))
    with pytest.raises(ArchiveError, match=r"there is no tensor for 'named\.a-b\.weight'"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def _transposed(meta: Any) -> None:
    meta.update(strides=[{"as_int": 1}, {"as_int": 4}])


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(dtype=8),
        lambda meta: meta.update(sizes=[{"as_int": 2}, {"as_int": 8}]),
        lambda meta: meta.update(sizes=[{"as_int": 16}], strides=[{"as_int": 1}]),
        lambda meta: meta.update(sizes=[{"as_expr": {"expr_str": size(7), "hint": {"as_int": 4}}}, {"as_int": 4}]),
        _transposed,
    ],
    ids=["dtype", "sizes", "rank", "symbol", "strides"],
)
def test_a_graph_reads_the_weights_that_the_file_has(saved: Path, tmp_path: Path, change: Any) -> None:
    """Compiled code relies on what the graph says of them."""
    spoilt = Spoilt(saved)
    spoilt.program(lambda program: change(graph(program)["tensor_values"]["p_linear_weight"]))
    with pytest.raises(ArchiveError, match=r"'linear\.weight' is not the tensor that the graph reads: .*, and there"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_strides_between_no_elements_are_not_compared(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    meta = {"strides": [{"as_int": 77}, {"as_int": 1}]}
    spoilt.program(lambda program: graph(program)["tensor_values"]["p_empty"].update(meta))
    assert load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    [
        ({"as_int": 3}, "arg0", "int"),
        ({"as_sym_int": {"as_name": "n"}}, "n", "SymInt"),
        ({"as_sym_float": {"as_name": "f"}}, "f", "float"),
    ],
)
def test_a_parameter_is_no_number(saved: Path, tmp_path: Path, given: Any, name: str, kind: str) -> None:
    """Saving a program in which nothing reads it raised a KeyError."""
    spoilt = Spoilt(saved)
    weight = json.loads(spoilt.members["data/weights/model_weights_config.json"])["config"]["linear.bias"]
    spoilt.json("data/weights/model_weights_config.json", lambda parsed: parsed["config"].update(unused=weight))
    spec: Any = {"parameter": {"arg": {"name": "p_unused"}, "parameter_name": "unused"}}

    def add(program: Any) -> None:
        program["graph_module"]["signature"]["input_specs"].insert(0, spec)
        graph(program)["inputs"].insert(0, {"as_tensor": {"name": "p_unused"}})
        graph(program)["tensor_values"]["p_unused"] = graph(program)["tensor_values"]["p_linear_bias"]

    def change(program: Any) -> None:
        program["graph_module"]["signature"]["input_specs"][0]["parameter"]["arg"]["name"] = name
        graph(program)["inputs"][0] = given
        graph(program)["sym_int_values"]["n"] = {"as_int": 3}
        graph(program)["sym_float_values"]["f"] = {"as_float": 3.0}

    spoilt.program(add)
    assert load_exported(spoilt.write(tmp_path / "unused.pt2"))
    spoilt.program(change)
    with pytest.raises(ArchiveError, match=f"'{name}' is of the type {kind} in the graph"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_tensor_is_no_weight_and_constant_at_once(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    listed = json.loads(spoilt.members["data/weights/model_weights_config.json"])["config"]
    entry = listed["linear.bias"]
    spoilt.members[f"data/constants/{entry['path_name']}_again"] = spoilt.members[f"data/weights/{entry['path_name']}"]
    entry = {**entry, "path_name": f"{entry['path_name']}_again"}
    spoilt.json("data/constants/model_constants_config.json", lambda parsed: parsed["config"].update(x=entry))
    assert load_exported(spoilt.write(tmp_path / "beside.pt2")) is not None
    spoilt.json(
        "data/constants/model_constants_config.json", lambda parsed: parsed["config"].update({"linear.bias": entry})
    )
    with pytest.raises(ArchiveError, match="bias' is among the weights and among the constants"):
        load_exported(spoilt.write(tmp_path / "twice.pt2"))


def test_a_keyword_of_python_is_no_name_of_a_parameter(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    spoilt.text("named.a-b.weight", "named.import.weight")
    with pytest.raises(ArchiveError, match="is no path of a parameter"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_body_that_raises_leaves_the_grad_mode_as_it_was(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.ops.aten.index_select(x, 0, y)
            return z + 1

    rows = torch.tensor([0, 1])
    torch.export.save(torch.export.export(Frozen(), (X, rows)), tmp_path / "m.pt2")
    module = Program.of(tmp_path / "m.pt2").module()
    with pytest.raises(IndexError):
        module(X, rows + 100)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "target", ["_foreach_abs.out", "_foreach_abs.default", "_fused_adam.out", "_stack.default", "unbind_copy.int_out"]
)
def test_operators_whose_arguments_torch_does_not_check_are_refused(saved: Path, tmp_path: Path, target: str) -> None:
    def change(program: Any) -> None:
        graph(program)["nodes"][0]["target"] = f"torch.ops.aten.{target}"

    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(UntrustedArchiveError, match="does more than compute on tensors and numbers"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_gradients_of_other_processes_are_refused(saved: Path, tmp_path: Path) -> None:
    importlib.import_module("torch.distributed.rpc")

    def change(program: Any) -> None:
        graph(program)["nodes"][0]["target"] = "torch.ops.aten.get_gradients.default"

    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(UntrustedArchiveError, match="does more than compute on tensors and numbers"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


@pytest.mark.parametrize("name", ["inductor_lookup_seed", "_unsafe_index_put_", "_low_memory_max_pool_with_offsets"])
def test_operators_that_only_a_compiler_writes_are_refused(saved: Path, tmp_path: Path, name: str) -> None:
    """Inductor reads a seed at any index, without a check; importing it adds such operators to `prims`."""
    importlib.import_module("torch._inductor.inductor_prims")

    def change(program: Any) -> None:
        graph(program)["nodes"][0]["target"] = f"torch.ops.prims.{name}.default"

    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(UntrustedArchiveError, match="does more than compute on tensors and numbers"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_report_judges_every_program_of_an_archive(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)
    for member in (
        "models/{}.json",
        "data/weights/{0}_weights_config.json",
        "data/constants/{0}_constants_config.json",
    ):
        spoilt.members[member.format("other")] = spoilt.members[member.format("model")]
    both = inspect_archive(spoilt.write(tmp_path / "both.pt2"))
    assert both.is_plain
    assert both.programs == ("model", "other")
    spoilt.json("models/other.json", lambda program: graph(program)["nodes"][0].update(target="torch.os.system"))
    report = inspect_archive(spoilt.write(tmp_path / "bad.pt2"))
    assert [problem.member for problem in report.problems] == ["models/other.json"]
    assert not report.is_plain
    assert load_exported(tmp_path / "bad.pt2").constants, "the other program is not read"


def test_more_programs_than_are_inspected_are_named(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("partita.program.archives.loading._MOST_PROGRAMS", 0)
    assert "models/model.json: it is not inspected" in str(inspect_archive(saved))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("_reshape_alias.default", "does more than compute on tensors and numbers"),
        ("random.from", "cannot be written in Python"),
    ],
)
def test_a_view_that_nobody_checks_and_a_keyword_are_no_operators(
    saved: Path, tmp_path: Path, target: str, message: str
) -> None:
    def change(program: Any) -> None:
        graph(program)["nodes"][0]["target"] = f"torch.ops.aten.{target}"

    spoilt = Spoilt(saved)
    spoilt.program(change)
    with pytest.raises(UntrustedArchiveError, match=message):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_two_keywords_have_two_names(saved: Path, tmp_path: Path) -> None:
    spoilt = Spoilt(saved)

    def change(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        assert "mode" in signature["in_spec"]
        signature["in_spec"] = signature["in_spec"].replace("mode", "scale")

    spoilt.program(change)
    with pytest.raises(ArchiveError, match="two of its keys are equal"):
        load_exported(spoilt.write(tmp_path / "m.pt2"))


def test_a_graph_has_the_results_that_its_call_returns(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                y, z = x.sin(), x.cos()
            return y + x, z + x

    torch.export.save(torch.export.export(Frozen(), (X,)), tmp_path / "m.pt2")

    def change(program: Any) -> None:
        (call,) = [node for node in graph(program)["nodes"] if "set_grad" in node["target"]]
        (body,) = [given["arg"]["as_graph"]["graph"] for given in call["inputs"] if "as_graph" in given["arg"]]
        del body["outputs"][1]

    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.program(change)
    with pytest.raises(ArchiveError, match="the graph that it runs has other results"):
        load_exported(spoilt.write(tmp_path / "n.pt2"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch supports the device")
def test_a_program_for_another_device_is_planned_without_a_crash(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(4, 4), (X,)), tmp_path / "m.pt2")

    def change(program: Any) -> None:
        for value in graph(program)["tensor_values"].values():
            value["device"] = {"type": "cuda", "index": 0}

    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.program(change)
    program = Program.of(spoilt.write(tmp_path / "n.pt2"))
    plan = partita.plan(program, BySize(parts=1), Recompute(KeepExpensive(2)))
    assert "it is on cuda, which this build of torch does not support" in str(plan.saved_memory())
    plan.apply()
    with pytest.raises(OptionError, match="cannot be decomposed here, since it is on cuda"):
        program.decomposed()
