"""Spoilt archives by the thousand, loaded in a process with limits that watches what is run.

`main(folder, first, count)` looks at so many seeds and prints `seed phase` before each step, so that whoever started
the process knows where it was killed. What is wrong is said in a line that begins with `broken`.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import warnings
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from tests.program.archives.hard_sizes import HARD_SIZES
from tests.program.archives.helpers import Plain, Spoilt, X
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.traceback import annotate
from torch.utils._pytree import tree_leaves

import partita
from partita.errors import PartitaError
from partita.policies import ByMode, BySize
from partita.treatments import Call, Lower, Mode, Recompute

SECONDS_EACH = 30
BYTES_MORE = 3 << 30


# Programs that load ----------------------------------------------------------------------------------------------


class Key(Enum):
    LEFT = "left"


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Any:
        rows = x.shape[0]
        count = x.abs().sum().to(torch.int64).item()
        torch._check(count >= 0)
        torch._check(count < 100)
        with annotate({"stage": 3}):
            half = x[: rows // 2] * torch.sym_float(rows)
        return {Key.LEFT: torch.zeros(count + 2), "half": half, "rest": [x.new_zeros(max(rows, 7)), x.flatten()]}


class Derived(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y[1::2].sum()


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            frozen = self.body[0](x)
        return self.body(x) + frozen.float().sum()


def programs() -> dict[str, tuple[Callable[[], Any], tuple[Any, ...], dict[str, Any]]]:
    """What is spoilt: an exported program, and how it is called."""
    rows = Dim("rows", min=2, max=64)
    plain = ((X, {"k": X + 1}), {"scale": 2.0, "mode": "sum"})
    shapes = {"x": {0: rows}, "pair": {"k": {0: rows}}, "scale": None, "mode": None}
    derived, longer = ({0: rows}, {0: 2 * rows + 1}), torch.ones(13, 2)
    trained = Trained()

    def cut(policy: Any, treatment: Any) -> Any:
        return partita.plan(partita.capture(trained, (X,)), policy, treatment).apply().exported()

    return {
        "plain": (lambda: torch.export.export(Plain(), *plain, dynamic_shapes=shapes), *plain),
        "decomposed": (lambda: torch.export.export(Plain(), *plain).run_decompositions(), *plain),
        "sized": (lambda: torch.export.export(Sized(), (X,), dynamic_shapes=({0: Dim.DYNAMIC},)), (X,), {}),
        "derived": (lambda: torch.export.export(Derived(), (X, longer), dynamic_shapes=derived), (X, longer), {}),
        "call": (lambda: cut(BySize(parts=2), Call()), (X,), {}),
        "mode": (lambda: cut(ByMode(), Mode()), (X,), {}),
        "recompute": (lambda: cut(BySize(parts=1), Recompute()), (X,), {}),
    }


def write_programs(folder: Path) -> None:
    for name, (build, _, _) in programs().items():
        torch.export.save(build(), folder / f"{name}.pt2")


# Spoiling --------------------------------------------------------------------------------------------------------

PAYLOADS = (
    "open({c!r}, 'w')",
    "') or open({c!r}, 'w') or ('",
    '") or open({c!r}, "w") or ("',
    "x=open({c!r}, 'w')",
    "x\n    open({c!r}, 'w')\n#",
    "__import__('os').system('touch {c}')",
    "torch.os.system",
    '"); system("touch {c}"); ("',
    "{{open({c!r}, 'w')}}",
    "collections.OrderedDict",
    "torch.fx.immutable_collections.immutable_dict",
    "__class__.__init__.__globals__",
    "L['x'].__class__",
)
NEW_MEMBERS = ("extra/a", "data/x", "models/other.json", "../up", "data/weights/weight_9")
FUNCTIONS = """
    Add Mul Add Mul Max Min FloorDiv Mod PythonMod Pow CleanDiv CeilDiv IntTrueDiv ToFloat TruncToInt Equality LessThan
    And exp factorial floor Piecewise
"""
JUNK = (
    *(None, 0, -1, 1, 1 << 40, 1 << 62, 1 << 70, 1e308, "", "x", "a'b", [], {}, True, [[]], {"a": 1}, "\ud800", "é"),
    *("self", "torch", "__globals__", "_guards_fn", "recompile", "_operator.getitem", "torch.sym_ite"),
)


def spoil(path: Path, seed: int, canary: Path, target: Path) -> None:
    """Writes a spoilt copy of an archive; the seed says how."""
    dice = random.Random(seed)
    if seed % 10 == 0:
        _spoil_bytes(path, dice, target)
        return
    spoilt = Spoilt(path)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        kinds = (_spoil_members, *[_spoil_json] * 4, *[_spoil_keys] * 2, *[_spoil_sizes] * 3, *[_spoil_texts] * 4)
        kinds += (_spoil_metadata,)
        dice.choice(kinds)(spoilt, dice, str(canary))
    compression = zipfile.ZIP_DEFLATED if dice.random() < 0.02 else zipfile.ZIP_STORED
    spoilt.write(target, compression=compression)


def _spoil_bytes(path: Path, dice: random.Random, target: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 10, 100))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    start, length = dice.randrange(len(data)), dice.randrange(1000)
    changed = dice.choice((data, data[:start], data + data, data[:start] + data[start + length :]))
    target.write_bytes(changed)


def _spoil_members(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    names = list(spoilt.members) or [""]
    name, other = dice.choice(names), dice.choice(names)
    match dice.randrange(5):
        case 0:
            spoilt.members.pop(name)
        case 1:
            spoilt.members[name] = spoilt.members[other]
        case 2:
            spoilt.members[dice.choice(NEW_MEMBERS)] = spoilt.members[other]
        case 3:
            spoilt.members[name] = spoilt.members[name] * dice.choice((0, 2, 3))
        case 4:
            spoilt.members[name] = dice.randbytes(dice.randrange(200))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    found, waiting = [], [value]
    while waiting:
        owner = waiting.pop()
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner))) if isinstance(owner, list) else []
        found += [(owner, key) for key in keys]
        waiting += [owner[key] for key in keys]
    return found


def _changing(spoilt: Spoilt, dice: random.Random, change: Callable[[Any], None]) -> None:
    texts = [name for name in spoilt.members if name.endswith(".json")]
    member = "models/model.json" if dice.random() < 0.8 and "models/model.json" in texts else dice.choice(texts or [""])
    try:
        parsed = json.loads(spoilt.members.get(member, b""))
    except ValueError:
        return
    change(parsed)
    spoilt.members[member] = json.dumps(parsed).encode()


def _spoil_json(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    def change(parsed: Any) -> None:
        found = places(parsed)
        if not found:
            return
        (owner, key), (donor, taken) = dice.choice(found), dice.choice(found)
        match dice.randrange(6):
            case 0:
                owner[key] = dice.choice(JUNK)
            case 1:
                owner[key] = json.loads(json.dumps(donor[taken]))
            case 2:
                del owner[key]
            case 3 if isinstance(owner[key], list):
                owner[key] = owner[key] * dice.choice((2, 100, 2_000 // (len(owner[key]) + 1)))
            case 4:
                for _ in range(dice.choice((1, 50, 300))):
                    owner[key] = [owner[key]] if dice.random() < 0.5 else {"as_graph": owner[key]}
            case _:
                owner[key] = {str(taken): donor[taken]} if not isinstance(donor[taken], dict | list) else {}

    _changing(spoilt, dice, change)


def _spoil_keys(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    """Gives a value another key, such as another kind of argument, input or output."""

    def change(parsed: Any) -> None:
        found = [(owner, key) for owner, key in places(parsed) if isinstance(owner, dict)]
        single = [(owner, key) for owner, key in found if len(owner) == 1]
        pool = single if single and dice.random() < 0.7 else found
        if pool:
            (owner, key), (_, other) = dice.choice(pool), dice.choice(pool)
            owner[other] = owner.pop(key)

    _changing(spoilt, dice, change)


def _spoil_metadata(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    """Gives a tensor of the graph the metadata of another, or other sizes and strides."""

    def change(parsed: Any) -> None:
        held = [owner[key] for owner, key in places(parsed) if isinstance(owner[key], dict) and "strides" in owner[key]]
        if held:
            one, other = dice.choice(held), dice.choice(held)
            key = dice.choice(("dtype", "sizes", "strides", "device", "requires_grad"))
            one[key] = json.loads(json.dumps(other.get(key)))

    _changing(spoilt, dice, change)


def _spoil_texts(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    payload = dice.choice(PAYLOADS).replace("{c!r}", repr(canary)).replace("{c}", canary)

    def change(parsed: Any) -> None:
        texts = [(owner, key) for owner, key in places(parsed) if isinstance(owner[key], str)]
        if not texts:
            return
        owner, key = dice.choice(texts)
        old = owner[key]
        start = dice.randrange(len(old) + 1)
        new = dice.choice((payload, old + payload, payload + old, old[:start] + payload + old[start:]))
        if dice.random() < 0.3:
            owner[key] = new
            return
        for owner, key in texts:  # Names must agree, so the same text is changed wherever it stands.
            if owner[key] == old:
                owner[key] = new
        for owner, key in places(parsed):
            if key == old:
                owner[new] = owner.pop(key)

    _changing(spoilt, dice, change)


def _spoil_sizes(spoilt: Spoilt, dice: random.Random, canary: str) -> None:
    def change(parsed: Any) -> None:
        written = [owner for owner, key in places(parsed) if key == "expr_str"]
        if written and dice.random() < 0.7:
            owner = dice.choice(written)
            old, new = owner["expr_str"], _expression(dice, dice.choice((1, 2, 4, 8, 60)), is_infix=dice.random() < 0.2)
            if dice.random() < 0.4:
                _spoil_all_sizes(written, dice)
                return
            for each in written:
                if each["expr_str"] == old:
                    each["expr_str"] = new
        elif isinstance(parsed, dict) and "guards_code" in parsed:
            left, right = (_expression(dice, dice.choice((1, 3, 9)), is_infix=True, leaf=_read) for _ in range(2))
            parsed["guards_code"] = [f"{left} {dice.choice(('==', '<=', '!=', 'and'))} {right}"]

    _changing(spoilt, dice, change)


def _spoil_all_sizes(written: list[Any], dice: random.Random) -> None:
    """Gives every size one of the forms that take long, of symbols of its own."""
    form, length = HARD_SIZES[dice.choice(sorted(HARD_SIZES))], dice.choice((2, 6, 12, 40))
    for at, owner in enumerate(written):
        symbols = [f"Symbol('s{at + number + 100}', positive=True, integer=True)" for number in range(length)]
        owner["expr_str"] = form(symbols)


def _symbol(dice: random.Random) -> str:
    return f"Symbol('{dice.choice(('s77', 's47', 's0', 'u0', 'u1', 'zuf0', 'q'))}', positive=True, integer=True)"


def _read(dice: random.Random) -> str:
    return dice.choice(("L['x'].size()[0]", "L['y'].size()[0]", "L['pair']['k'].size()[0]", "L['flat_args'][0]", "2"))


def _expression(
    dice: random.Random, size: int, *, is_infix: bool, leaf: Callable[[random.Random], str] = _symbol
) -> str:
    """An expression of about this many operations, most of them in the grammar of sizes."""
    if size <= 1:
        number = dice.choice(("1", "2", "3", "64", "9223372036854775807", "99999999999999999999", "-1", "1.5"))
        return leaf(dice) if dice.random() < 0.7 else number if is_infix else f"Integer({number})"
    split = dice.randrange(1, size) if size > 2 else 1
    left, right = (_expression(dice, part, is_infix=is_infix, leaf=leaf) for part in (split, size - split))
    if is_infix:
        sign = dice.choice(("+", "-", "*", "//", "%", "**", "/", "<<"))
        return f"({left} {sign} {dice.randrange(9) if sign == '**' else right})"
    name = dice.choice(FUNCTIONS.split())
    if name == "Pow":
        right = f"Integer({dice.randrange(9)})"
    return f"{name}({left}, {right})" if name not in ("ToFloat", "TruncToInt", "exp", "floor") else f"{name}({left})"


# Looking ---------------------------------------------------------------------------------------------------------

_WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class", "socket")
#: Python's named tuples, dataclasses and tracebacks, and how torch wraps functions and reads types of operators.
_HARMLESS = ("namedtuple", "_create_fn", "parse", "fake_signature", "_torchscript_type_to_python_type")
_seen: list[str] = []
_is_watching = False


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """What Python itself tells of: code is made of texts by torch.fx alone, and nothing else is started or opened."""
    if not _is_watching:
        return
    if event in ("compile", "exec"):
        caller = sys._getframe(1).f_code
        made = str(args[1]) if event == "compile" else getattr(args[0], "co_filename", "")
        if caller.co_name not in _HARMLESS and not made.startswith(("<eval_with_key>", "/", "<frozen")):
            _seen.append(f"{event} {args[0]!r:.100} by {caller.co_filename}:{caller.co_name}")
    elif event.startswith(_WATCHED) or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
        _seen.append(f"{event} {args!r}"[:300])


def _check_conditions(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the conditions on the inputs alone: they are data, so they cost no more than they are long."""
    try:
        module._guards_fn(*tree_leaves((args, kwargs)))
    except MemoryError as error:
        raise SystemExit("a condition takes all memory") from error
    except Exception:  # A condition that does not hold, or is of a program without any.
        pass


TREATMENTS = (None, Call(), Lower("eager"), Recompute())


def look_at(
    path: Path, args: tuple[Any, ...], kwargs: dict[str, Any], say: Callable[[str], None], treatment: Any
) -> bool:
    """Loads an archive, and uses what was loaded as far as it goes; whether it was loaded."""
    say("load")
    try:
        program = partita.Program.of(path)
    except PartitaError:
        return False
    say("use")
    try:
        str(partita.plan(program, BySize(operators=1), Recompute()))
        after = program if treatment is None else partita.plan(program, BySize(parts=1), treatment).apply()
        module = after.module()
        _check_conditions(module, args, kwargs)
        say("call")
        module(*args, **kwargs)
        if treatment is None:
            torch.export.unflatten(program.exported())
    except Exception:  # What a spoilt program does is its own affair.
        pass
    return True


def main(folder: Path, first: int, count: int) -> None:
    global _is_watching
    warnings.simplefilter("ignore")
    canary, target = folder / f"canary_{first}", folder / f"spoilt_{first}.pt2"
    known = programs()
    for name, (_, args, kwargs) in known.items():  # Imports what is imported late, and shows that these load.
        for treatment in TREATMENTS:
            if not look_at(folder / f"{name}.pt2", args, kwargs, lambda phase: None, treatment):
                print(f"broken: {name} does not load", flush=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES_MORE, used + BYTES_MORE))
    sys.addaudithook(_watch)
    loaded = 0
    for seed in range(first, first + count):
        name = list(known)[seed % len(known)]
        spoil(folder / f"{name}.pt2", seed, canary, target)
        _, args, kwargs = known[name]
        signal.alarm(SECONDS_EACH)
        _is_watching = True
        try:
            treatment = random.Random(seed).choice(TREATMENTS)
            loaded += look_at(target, args, kwargs, lambda phase, seed=seed: print(seed, phase, flush=True), treatment)
        except BaseException as error:  # Anything but an error of ours is a fault.
            print(f"broken: seed {seed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        _is_watching = False
        signal.alarm(0)
        if _seen or canary.exists():
            print(f"broken: seed {seed} ran {_seen or 'its payload'}", flush=True)
            _seen.clear()
            canary.unlink(missing_ok=True)
    print(f"done: {loaded} of {count} loaded", flush=True)
