"""Drop-in replacements under torch's own names and signatures, one module for each of torch's."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

_MODULES = frozenset(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def __getattr__(name: str) -> ModuleType:
    """The module of that name, imported when it is first used: some of torch's counterparts are slow to import."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_MODULES))
