"""The names that expressions of sizes may use; every other name is refused."""

from __future__ import annotations

import re

__all__ = [
    "ATOMS",
    "CONSTANTS",
    "FUNCTIONS",
    "FUNCTION_FAMILIES",
    "NUMBER",
    "OF_MODULES",
    "PLAIN_TEXT",
    "POWERS",
    "PYTHON_FUNCTIONS",
    "QUESTIONS",
    "SYMBOL",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SYMBOL = re.compile(r"[a-z_]{1,8}\d{1,6}")
NUMBER = re.compile(r"[+-]?\d{1,30}(\.\d{0,40})?([eE][+-]?\d{1,3})?")
#: Text that cannot end a string literal of the code that torch generates around it.
PLAIN_TEXT = re.compile(r"[^'\"\\{}\x00-\x1f\x7f]*")
CONSTANTS = frozenset(("oo", "int_oo", "inf", "true", "false", "nan", "zoo"))
ATOMS = frozenset(("Integer", "Float", "Rational", "Symbol"))
POWERS = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))
#: torch's opaque functions of one argument, and of bits.
FUNCTION_FAMILIES = re.compile(r"(OpaqueUnaryFn|BitwiseFn)_[a-z0-9_]{1,20}")
FUNCTIONS = _words(
    """
    Add Mul Max Min Mod Abs floor ceiling sqrt log exp sin cos tan asin acos atan sinh cosh tanh
    Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan Eq Ne Lt Le Gt Ge And Or Not Xor ITE
    Piecewise ExprCondPair FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv RShift
    FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat
    Identity
    """
)
#: What a guard asks a tensor.
QUESTIONS = frozenset(("size", "stride", "storage_offset"))
PYTHON_FUNCTIONS = _words(
    "max min abs round int float bool cast_symbool_to_symint_guardless IsNonOverlappingAndDenseIndicator"
)
OF_MODULES = {
    "math": _words("floor ceil trunc sqrt log log2 exp sin cos tan asin acos atan sinh cosh tanh isnan isinf"),
    "torch": _words("sym_max sym_min sym_float sym_int sym_not sym_ite sym_sqrt _sym_sqrt _sym_log2"),
}
