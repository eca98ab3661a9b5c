"""What a script does before it imports torch, as its text says. Pure; runs nothing.

A script cannot tell whether torch was imported before its first line if nothing that it does until it imports it itself changes
what torch finds: variables, import path, modules, warnings, logging. So only what certainly changes nothing is passed over.
"""

from __future__ import annotations

import _ast  # what `ast` is made of, without the import of `re`
import sys
import warnings
from collections.abc import Iterable

# imported before torch by many scripts; none of them sets a variable that torch reads, or replaces a module
_HARMLESS = sys.stdlib_module_names | {"ddplaunch", "numpy", "packaging", "psutil", "tqdm", "yaml"}

# what torch._dynamo reads at its import comes after the script's own import of torch
_TELLTALES = (b"TORCH", b"TRITON", b"INDUCTOR", b"sys.modules", b"meta_path", b"path_hooks", b"load_dotenv")
_NO_TELLTALES = (b"TORCHELASTIC",)

_PLAIN = (
    _ast.Constant, _ast.Name, _ast.Attribute, _ast.Subscript, _ast.Tuple, _ast.List, _ast.Dict, _ast.Compare, _ast.BoolOp,
    _ast.BinOp, _ast.UnaryOp, _ast.expr_context, _ast.cmpop, _ast.boolop, _ast.operator, _ast.unaryop,
)  # fmt: skip


def import_torch(text: bytes) -> bool:
    """Whether this script imports torch before it does anything that torch could notice."""
    for harmless in _NO_TELLTALES:
        text = text.replace(harmless, b"")
    if any(telltale in text for telltale in _TELLTALES):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show them
            tree = compile(text, "", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        return isinstance(tree, _ast.Module) and bool(_before_torch(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _before_torch(statements: Iterable[_ast.stmt]) -> bool | None:
    """True if torch is imported after harmless statements alone, False if another comes first, None if neither comes."""
    return next((step for step in map(_step, statements) if step is not None), None)


def _step(statement: _ast.stmt) -> bool | None:
    """The same for one statement."""
    imported: list[str] = []
    match statement:
        case _ast.Import(names=names):
            imported = [one.name for one in names]
        case _ast.ImportFrom(module=str(module), level=0):
            imported = [module]
        case _ast.Expr(value=_ast.Constant()) | _ast.Pass():
            pass
        case _ast.Assign(targets=[_ast.Name()], value=value) if _is_plain(value):
            pass
        case _ast.If(test=test, body=body, orelse=orelse) if _is_plain(test):
            return _either(_before_torch(body), _before_torch(orelse))
        case _ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            if (step := _before_torch(body)) is not None:
                return step  # where torch cannot be imported there is no job
            handled = (_before_torch(handler.body) for handler in handlers)
            return _before_torch(last) if (step := _either(_before_torch(orelse), *handled)) is None else step
        case _:
            return False
    for name in imported:
        package = name.partition(".")[0]
        if package == "torch":
            return True
        if package not in _HARMLESS:
            return False
    return None


def _either(*branches: bool | None) -> bool | None:
    """The same for statements of which some run: torch is imported if all of them import it."""
    return False if False in branches else (True if all(branches) else None)


def _is_plain(expression: _ast.AST) -> bool:
    """Whether this calls nothing."""
    parts = (getattr(expression, name) for name in expression._fields)
    inner = [one for part in parts for one in (part if isinstance(part, list) else [part]) if isinstance(one, _ast.AST)]
    return isinstance(expression, _PLAIN) and all(map(_is_plain, inner))
