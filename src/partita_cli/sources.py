"""What commands read: programs, plans, functions that make models, and inputs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_cli.choices import Treatments, choose, choose_treatments
from partita_cli.errors import CommandError
from partita_cli.output import one_line, working

if TYPE_CHECKING:
    from torch import nn

    from partita import Plan, Program


def read_program(
    path: Path, *, trusted: bool = False, operators: Sequence[str] | None = None, imports: Sequence[str] | None = None
) -> Program:
    """The program in a file, which is read as data unless it is trusted."""
    with working(f"reading {path}"):
        import_modules(imports)
        from partita import Program
        from partita.errors import ArchiveError

        try:
            return Program.of(path, trusted=trusted, operators=tuple(operators or ()))
        except ArchiveError as error:
            raise CommandError(f"{error}{_hint(str(error))}") from error


def _hint(message: str) -> str:
    """The option that helps, where a file names what no imported module has registered, or is more than data."""
    container = re.search(r"no container '([\w.]+)\.\w+' is registered", message)
    if container is not None:
        return f": add --import {container[1]}"
    if "is registered; import the library" in message:
        return ": add --import with the name of that library"
    return " (the option --trusted)" if "trusted=True" in message else ""


def import_modules(names: Sequence[str] | None) -> None:
    """Imports modules, which register operators or backends."""
    for name in names or ():
        _imported(name)


def planner(
    *,
    policy: str | None,
    treatments: Sequence[str] | None,
    plan: Path | None = None,
    imports: Sequence[str] | None = None,
) -> Callable[[Program], Plan]:
    """Makes a plan for a program: that of a file, or of a policy and treatments; wrong words are refused at once."""
    if plan is not None:
        if policy or treatments:
            raise CommandError("a plan has its policy and treatment in it: give --plan, or --policy and --treatment")
        return partial(_loaded_plan, plan)
    if policy is None:
        raise CommandError("give --policy, for example --policy size:parts=2; partita list policies has all of them")
    with working("importing torch"):
        import_modules(imports)  # They may register backends.
        chosen, treated = choose("policy", policy), choose_treatments(treatments or ())
    return partial(_made_plan, chosen, treated)


def _loaded_plan(path: Path, program: Program) -> Plan:
    import partita

    with working(f"reading {path}"):
        return partita.load_plan(path, program)


def _made_plan(policy: Any, treatments: Treatments, program: Program) -> Plan:
    import partita

    with working("planning"):
        # Without any region, a plan asks its treatment whether it restores modes.
        made = partita.plan(program, policy, treatments.of if treatments.rules else treatments.default)
        treatments.check_used(made.partition)
        return made


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model and the arguments it is called with."""

    model: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read_model(text: str) -> ModelCall:
    """What the function that a text such as `pkg.module:function` names returns: a model and its inputs."""
    function = _function(text)
    with working(f"calling {text}"):
        try:
            found = function()
        except (Exception, SystemExit) as error:
            raise CommandError(f"{text} raised {type(error).__name__}: {one_line(str(error))}") from error
    is_call = isinstance(found, tuple | list) and len(found) in (2, 3) and callable(found[0])
    if not is_call or (len(found) == 3 and not (isinstance(found[1], tuple | list) and _is_keywords(found[2]))):
        raise CommandError(
            f"{text} returns {_kind(found)}; it should return a model and its inputs: (model, args), (model, "
            "args, kwargs) or (model, (args, kwargs)), with args in a tuple"
        )
    args, kwargs = arguments(found[1] if len(found) == 2 else tuple(found[1:]))
    return ModelCall(found[0], args, kwargs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments out of a tuple of them, `(args, kwargs)`, a dict, or a single tensor."""
    if isinstance(inputs, dict):
        if set(inputs) == {"args", "kwargs"}:
            return tuple(inputs["args"]), dict(inputs["kwargs"])
        return (), inputs
    if not isinstance(inputs, tuple | list):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], tuple | list) and _is_keywords(inputs[1]):
        return tuple(inputs[0]), dict(inputs[1])
    return tuple(inputs), {}


def read_inputs(path: Path | None, program: Program, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in a file, or random ones of the sizes and dtypes that the program was captured with."""
    import torch

    if path is None:
        from partita.equivalence.random_inputs import random_inputs

        return random_inputs(program, seed=seed)
    if not path.is_file():
        raise CommandError(f"there is no file {path}; inputs are saved with torch.save((x, ...), {str(path)!r})")
    with working(f"reading {path}"):
        try:
            return arguments(
                torch.load(path, weights_only=True, map_location=None if torch.cuda.is_available() else "cpu")
            )
        except Exception as error:
            raise CommandError(
                f"{path} cannot be read as data ({type(error).__name__}: {one_line(str(error))}); save tensors, numbers"
                " and texts in tuples, lists and dicts with torch.save"
            ) from error


def _function(text: str) -> Callable[[], Any]:
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise CommandError(f"{text!r} is no function; write it as package.module:function, or file.py:function")
    with working(f"importing {module_name}"):
        module = _imported(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=3)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise CommandError(f"{module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{text} is {_kind(found)}, and no function")
    return found  # type: ignore[no-any-return]


def _imported(name: str) -> Any:
    """A module by its name, or that of a file; the current folder counts, and that of the file.

    A file is run once, as a module is: what it registers would be there already.
    """
    if name.endswith(".py") and (module := _module_of(Path(name))) is not None:
        return module
    module_name = _free_name(Path(name).stem) if name.endswith(".py") else name
    for folder in (Path.cwd(), *((Path(name).parent.absolute(),) if name.endswith(".py") else ())):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # At the end: a file there must not hide a module that torch imports later.
    try:
        return _from_file(Path(name), module_name) if name.endswith(".py") else import_module(name)
    except CommandError:
        raise
    except ModuleNotFoundError as error:
        why = "" if error.name is None or name.startswith(error.name) else f", which {name} imports"
        raise CommandError(
            f"there is no module {error.name or name!r}{why}; modules are found in the current folder and where Python "
            "looks for them (PYTHONPATH)"
        ) from error
    except (Exception, SystemExit) as error:
        raise CommandError(f"importing {name} raised {type(error).__name__}: {one_line(str(error))}") from error


def _module_of(path: Path) -> Any:
    """The module that was made of a file before; None if there is none."""
    for name in (path.stem, _taken_name(path.stem)):
        made = sys.modules.get(name)
        file = Path(getattr(made, "__file__", None) or "")
        if file.is_file() and path.is_file() and path.samefile(file):
            return made
    return None


def _free_name(stem: str) -> str:
    """The name for the module of a file, which hides no module of Python or torch."""
    try:
        is_taken = stem in sys.modules or find_spec(stem) is not None
    except ValueError:
        is_taken = True
    return _taken_name(stem) if is_taken else stem


def _taken_name(stem: str) -> str:
    return f"{stem}_of_file"


def _from_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} is no Python module")
    module = module_from_spec(spec)
    # Classes are looked up by the name of their module, by pickle and dataclasses.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_keywords(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
