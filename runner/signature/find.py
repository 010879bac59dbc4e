"""Which definition a dotted name leads to, through re-exports, aliases, nested classes and base classes."""

import ast
from dataclasses import dataclass
from functools import cache

from runner.signature.source import (
    Binding,
    Import,
    Module,
    Scope,
    class_scope,
    exports,
    is_open,
    locate,
    may_bind,
    scope_of,
    submodule,
)

MAX_HOPS = 12  # from name to name: a re-export through a package costs two
MAX_BASES = 8
_EMPTY_BASES = ("object", "ABC", "Generic", "Protocol")  # take no arguments, and some lie in modules without source


@dataclass(frozen=True)
class Definition:
    """A function or class, where it is written.

    Args:
        owner: the class in whose body it stands, if any.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: ast.ClassDef | None = None


class Absent(Exception):
    """A name that is surely not there.

    Args:
        place: the module or class that lacks it; None: no package of that name is found.
    """

    def __init__(self, name: str, place: Module | Definition | None) -> None:
        super().__init__(name)
        self.name, self.place = name, place


Found = Module | Definition | None  # None: it may be there, but the source does not show it
Trail = tuple[tuple[str, str], ...]


def find(target: str) -> Found:
    """What ``target`` names.

    Raises:
        Absent: it names nothing.
    """
    first, *rest = target.split(".")
    module = locate(first)
    if module is None:
        raise Absent(first, None)
    return _walk(module, rest, ())


def find_in_scope(module: Module, parts: list[str], trail: Trail = ()) -> Found:
    """What a dotted name means inside a module's own code; builtins cannot be read.

    Raises:
        Absent: it comes from a package that is not installed.
    """
    try:
        return _lookup(module, parts, trail)
    except Absent as absent:
        if absent.place is None:
            raise
        return None


def _walk(module: Module, parts: list[str], trail: Trail) -> Found:
    """Follow ``parts`` from a module on; a submodule goes before an attribute unless it is the last part."""
    if not parts:
        return module
    if len(parts) > 1 and (below := submodule(module, parts[0])):
        try:
            return _walk(below, parts[1:], trail)
        except Absent:
            if parts[0] not in scope_of(module).names:
                raise
            try:
                return _lookup(module, parts, trail)
            except Absent:
                pass
            raise
    return _lookup(module, parts, trail)


def _lookup(module: Module, parts: list[str], trail: Trail) -> Found:
    name, rest = parts[0], parts[1:]
    step = (module.name, name)
    below = submodule(module, name)
    if len(trail) >= MAX_HOPS or (step in trail and below is None):
        return None
    if step in trail:  # `from . import name` inside the package itself
        return _walk(below, rest, trail) if below else None
    trail = (*trail, step)
    scope = scope_of(module)
    if name in scope.names:
        return _settle(module, scope.names[name], rest, trail)
    found, is_hidden = _through_stars(module, parts, trail)
    if found is None and below is not None and (rest or not is_hidden):
        return _walk(below, rest, trail)
    if found is not None or is_hidden:
        return found
    raise Absent(name, module)


def _through_stars(module: Module, parts: list[str], trail: Trail) -> tuple[Found, bool]:
    """What ``from m import *`` brings in under a name, and whether it may bring in what the source does not show."""
    is_hidden = is_open(module, parts[0])
    for star in reversed(scope_of(module).stars):
        origin = locate(star)
        is_hidden = is_hidden or origin is None or is_open(origin, parts[0])
        if origin is None or not _is_exported(origin, parts[0]):
            continue
        try:
            found = _lookup(origin, parts, trail)
        except Absent as absent:
            if (absent.name, absent.place) != (parts[0], origin):  # it is what follows that is not there
                raise
            continue
        if found is not None:
            return found, is_hidden
        is_hidden = True
    return None, is_hidden


def _is_exported(origin: Module, name: str) -> bool:
    """Whether a star import brings the name; a decorator may list it, as timm's ``register_model`` does."""
    if not may_bind(origin, name):
        return False
    listed = exports(origin)
    if listed is None:
        return not name.startswith("_")
    nodes = [binding.node for binding in scope_of(origin).names.get(name, ())]
    return name in listed or any(getattr(node, "decorator_list", None) for node in nodes)


def _settle(module: Module, bindings: tuple[Binding, ...], rest: list[str], trail: Trail) -> Found:
    """The one meaning that several bindings agree on; None where they differ.

    Raises:
        Absent: none of them leads anywhere.
    """
    absent: Absent | None = None
    for is_fallback in (False, True):
        found: list[Found] = []
        for binding in bindings:
            if binding.is_fallback == is_fallback:
                try:
                    found.append(_follow(module, binding, rest, trail))
                except Absent as error:
                    absent = error
        if found:
            return found[0] if all(other == found[0] for other in found) else None
    assert absent is not None
    raise absent


def _follow(module: Module, binding: Binding, rest: list[str], trail: Trail) -> Found:
    match binding.node:
        case Import(module=origin_name, name=name):
            origin = locate(origin_name)
            top = origin_name.partition(".")[0]
            if origin is None and locate(top) is None:
                raise Absent(top, None)
            if origin is None:
                return None
            return _walk(origin, rest if name is None else [name, *rest], trail)
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            return attribute(Definition(module, node), rest)
        case ast.Name() | ast.Attribute() as expression if parts := dotted(expression):
            return find_in_scope(module, [*parts, *rest], trail)
    return None


def attribute(definition: Definition, parts: list[str]) -> Found:
    """What ``parts`` lead to from a class (or, where there are none, the definition itself).

    Raises:
        Absent: the class and all its bases can be read, and none has it.
    """
    if not parts:
        return definition
    if not isinstance(definition.node, ast.ClassDef):
        return None
    for place in linearize(definition):
        if place is None:
            return None
        assert isinstance(place.node, ast.ClassDef)
        names = body_of(place).names
        if place.node.keywords:  # a metaclass may add anything
            return None
        if parts[0] in names:
            node = names[parts[0]][-1].node
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                return attribute(Definition(place.module, node, place.node), parts[1:])
            return None
    raise Absent(parts[0], definition)


def body_of(definition: Definition) -> Scope:
    """What a class's body binds."""
    assert isinstance(definition.node, ast.ClassDef)
    return class_scope(definition.node, package=definition.module.package)


@cache
def linearize(definition: Definition) -> tuple[Definition | None, ...]:
    """The class and its bases in the order Python asks them; None stands for a base that cannot be read."""
    order = _ancestors(definition, MAX_BASES)
    return tuple(base for i, base in enumerate(order) if base is None or base not in order[i + 1 :])


def _ancestors(definition: Definition, depth: int) -> list[Definition | None]:
    assert isinstance(definition.node, ast.ClassDef)
    order: list[Definition | None] = [definition]
    for base in definition.node.bases:
        parts = dotted(base.value if isinstance(base, ast.Subscript) else base)
        if parts and parts[-1] in _EMPTY_BASES:
            continue
        try:
            found = find_in_scope(definition.module, parts) if parts and depth else None
        except Absent:
            found = None
        if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
            order += _ancestors(found, depth - 1)
        else:
            order.append(None)
    return order


def dotted(node: ast.expr) -> list[str]:
    """The parts of ``a.b.c``, or nothing where the expression is not a dotted name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (parts := dotted(node.value)):
        return [*parts, node.attr]
    return []
