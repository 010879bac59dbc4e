"""Which type an annotation means, as far as it can be known without importing the module that states it."""

import ast
import collections.abc
import pathlib
import re
import typing
from collections.abc import Callable
from typing import Any, Union

from runner.signature.find import dotted
from runner.signature.source import Import, Module, locate, scope_of

MAX_DEPTH = 8
_BUILTINS: dict[str, Any] = {t.__name__: t for t in (int, float, str, bool, bytes, list, dict, tuple, set, frozenset)}
_TYPING = {"Literal", "Optional", "Union", "List", "Dict", "Tuple", "Set", "FrozenSet", "Sequence", "Mapping"}
_WRAPPERS = {"Annotated", "Final", "Required", "NotRequired", "InitVar"}  # mean their first argument
_PYDANTIC = {"PositiveInt", "NonNegativeInt", "NegativeInt", "NonPositiveInt", "DirectoryPath", "FilePath"}
_PYDANTIC |= {"PositiveFloat", "NonNegativeFloat", "NegativeFloat", "NonPositiveFloat", "FiniteFloat"}
_PYDANTIC |= {"StrictInt", "StrictFloat", "StrictStr", "StrictBool"}


class _Wrapper:
    """Stands for `Annotated` and its like."""


def _pydantic(name: str) -> Any:
    import pydantic  # costs 0.1 s, and many targets do without it

    return getattr(pydantic, name) if name in _PYDANTIC else Any


def _typing(name: str) -> Any:
    if name in _WRAPPERS:
        return _Wrapper
    return getattr(typing, name) if name in _TYPING else Any


def _abc(name: str) -> Any:
    return getattr(collections.abc, name) if name in {"Sequence", "Mapping"} else Any


def _pathlib(name: str) -> Any:
    return getattr(pathlib, name) if name in {"Path", "PurePath"} else Any


# Modules whose names are taken from the real thing, since it is at hand; all other modules are only read.
_MODULES: dict[str, Callable[[str], Any]] = {
    "typing": _typing,
    "typing_extensions": _typing,
    "dataclasses": _typing,
    "collections.abc": _abc,
    "pathlib": _pathlib,
    "pydantic": _pydantic,
    "pydantic.types": _pydantic,
}


def evaluate(node: ast.expr | None, module: Module, *, depth: int = 0) -> Any:
    """The annotation as an object; what cannot be known is ``typing.Any``, and so is a union that holds it."""
    if depth > MAX_DEPTH:
        return Any
    annotation = _evaluate(node, module, depth=depth + 1)
    return Any if annotation in (_Wrapper, typing.Literal, typing.Optional, Union) else annotation  # stated bare


def _evaluate(node: ast.expr | None, module: Module, *, depth: int) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            try:
                return evaluate(ast.parse(text.strip(), mode="eval").body, module, depth=depth)
            except (SyntaxError, ValueError):
                return Any
        case ast.Name() | ast.Attribute():
            parts = dotted(node)
            return _named(parts, module, depth=depth) if parts else Any
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return union(*(evaluate(side, module, depth=depth) for side in (left, right)))
        case ast.Subscript(value=value, slice=index):
            arguments = index.elts if isinstance(index, ast.Tuple) else [index]
            return _subscripted(_evaluate(value, module, depth=depth), arguments, module, depth=depth)
    return Any


def union(*members: Any) -> Any:
    """``a | b``, which is ``Any`` where a member is."""
    return Any if any(member is Any for member in members) else Union[members]  # noqa: UP007 - of any number


def _subscripted(origin: Any, arguments: list[ast.expr], module: Module, *, depth: int) -> Any:
    if origin is Any or not arguments:
        return Any
    if origin is typing.Literal:
        values = [_literal(argument) for argument in arguments]
        return Any if any(value is Any for value in values) else typing.Literal[tuple(values)]
    if origin is _Wrapper:
        return evaluate(arguments[0], module, depth=depth)
    members = [
        ... if isinstance(a, ast.Constant) and a.value is ... else evaluate(a, module, depth=depth) for a in arguments
    ]
    if origin is Union:
        return union(*members)
    if origin is typing.Optional:
        return union(members[0], None)
    if getattr(origin, "__name__", "").lower() == "tuple" and len(members) == 1:  # often meant as tuple[X, ...]
        members.append(...)
    try:
        return origin[tuple(members) if len(members) > 1 else members[0]]
    except TypeError:
        return Any


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return Any


def _named(parts: list[str], module: Module, *, depth: int) -> Any:
    bindings = [b for b in scope_of(module).names.get(parts[0], ()) if not b.is_fallback]
    if not bindings:
        return _BUILTINS.get(parts[0], Any) if len(parts) == 1 and not scope_of(module).stars else Any
    meanings = []
    for binding in bindings:
        match binding.node:
            case Import(module=origin, name=name):
                meanings.append(_imported([*origin.split("."), *([name] if name else []), *parts[1:]], depth=depth))
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.BinOp() as expression if (
                len(parts) == 1 and depth < MAX_DEPTH
            ):
                meanings.append(_evaluate(expression, module, depth=depth + 1))
            case _:
                meanings.append(Any)
    return meanings[0] if all(meaning == meanings[0] for meaning in meanings) else Any


def _imported(parts: list[str], *, depth: int) -> Any:
    name, origin = parts[-1], ".".join(parts[:-1])
    if origin in _MODULES:
        return _MODULES[origin](name)
    module = locate(origin) if depth < MAX_DEPTH else None
    # A look at the text first: parsing all of torch to learn that Tensor is no alias would cost more than all the rest.
    if module is None or not module.source or not re.search(rf"^\s*{name}\s*(:.*)?=", module.source, re.MULTILINE):
        return Any
    return _named([name], module, depth=depth + 1)
