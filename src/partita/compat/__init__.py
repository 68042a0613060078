"""Drop-in replacements under torch's own names and signatures, one module for each of torch's."""

from pkgutil import iter_modules

from partita._lazy_imports import lazy_attributes

_MODULES = frozenset(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))

# Some of torch's counterparts are slow to import.
__getattr__, __dir__ = lazy_attributes(__name__, modules=_MODULES, names={})
