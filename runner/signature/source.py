"""Where a module's source lies and which names its top level binds; it is parsed and never run."""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder

# Signs in a module's text that it adds names while it runs: of its own, or through a function that is told the module's
# name, and then the text spells the names.
_OPEN_WORDS = ("globals()", "vars()", "locals()[", " exec(", "sys.modules[__name__]")
_OPEN = re.compile(r"^[ \t]*def __getattr__\((?!self|cls)|^__getattr__\b", re.MULTILINE)
_REGISTERS = re.compile(r"^\w[\w.]*\(\s*__name__", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """A module on the search path.

    Args:
        source: its text; None where it is compiled, so that its names cannot be known.
        folders: where its submodules lie; None: it is not a package.
    """

    name: str
    source: str | None
    folders: tuple[str, ...] | None

    @property
    def package(self) -> str:
        """What its relative imports are relative to."""
        return self.name if self.folders is not None else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """A name that an import statement binds: ``name`` of ``module``, or the module itself where ``name`` is None."""

    module: str
    name: str | None


@dataclass(frozen=True)
class Binding:
    """One statement that gives a name its meaning.

    Args:
        node: a definition, the expression assigned, an import, or None: anything else (a loop's variable, say).
        is_fallback: it counts only where what a ``try`` block binds cannot be found.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr | Import | None
    is_fallback: bool = False


@dataclass
class Scope:
    """What the statements of a module or class bind; a name has several bindings where branches differ."""

    names: dict[str, tuple[Binding, ...]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules of `from m import *`


def locate(name: str) -> Module | None:
    """The module of a dotted name on ``sys.path`` as it is now, or None."""
    return _locate(name, tuple(sys.path))


@cache
def _locate(name: str, path: tuple[str, ...]) -> Module | None:
    parent, _, last = name.rpartition(".")
    if parent:
        package = _locate(parent, path)
        return submodule(package, last) if package else None
    try:
        spec = importlib.util.find_spec(name)  # of a top-level name, it runs nothing
    except ValueError:  # a module without a spec, as __main__ is
        return Module(name, None, None)
    return _module(name, spec)


@cache
def submodule(package: Module, name: str) -> Module | None:
    """The module ``name`` directly below a package, or None."""
    if not package.folders:
        return None
    full_name = f"{package.name}.{name}"
    return _module(full_name, PathFinder.find_spec(full_name, package.folders))


def _module(name: str, spec: ModuleSpec | None) -> Module | None:
    if spec is None:
        return None
    folders = None if spec.submodule_search_locations is None else tuple(spec.submodule_search_locations)
    if spec.origin is None and folders:  # a folder without __init__.py
        return Module(name, "", folders)
    get_source = getattr(spec.loader, "get_source", None)
    try:
        return Module(name, get_source(name) if get_source else None, folders)
    except (ImportError, OSError, UnicodeError, SyntaxError):
        return Module(name, None, folders)


def submodules(folders: Sequence[str]) -> list[str]:
    """Names of the modules that lie in these folders."""
    return [info.name for info in pkgutil.iter_modules(folders)]


@cache
def scope_of(module: Module) -> Scope:
    """What the module's top level binds; nothing where it cannot be parsed (see ``is_open``)."""
    scope = Scope()
    _bind_all(_parse(module) or [], scope, package=module.package)
    return scope


@cache
def class_scope(node: ast.ClassDef, *, package: str) -> Scope:
    """What a class's body binds."""
    scope = Scope()
    _bind_all(node.body, scope, package=package)
    return scope


def is_open(module: Module, name: str) -> bool:
    """Whether the module may have the name although no statement of it binds it."""
    if module.source is None or _adds_names(module):
        return True
    return name in module.source and (_registers(module) or _parse(module) is None)


@cache
def _adds_names(module: Module) -> bool:
    text = module.source or ""
    return any(word in text for word in _OPEN_WORDS) or ("__getattr__" in text and _OPEN.search(text) is not None)


@cache
def _registers(module: Module) -> bool:
    return module.source is not None and _REGISTERS.search(module.source) is not None


def may_bind(module: Module, name: str) -> bool:
    """False where the text alone shows that it does not bind the name; saves parsing it."""
    return module.source is None or name in module.source or "import *" in module.source


@cache
def exports(module: Module) -> frozenset[str] | None:
    """What ``__all__`` lists; None: there is none, or it is computed."""
    names: set[str] = set()
    is_stated = False
    for statement in _parse(module) or []:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names.clear()
            case ast.AugAssign(target=ast.Name(id="__all__"), value=value):
                pass
            case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                continue
            case _:
                if "__all__" in (node.id for node in ast.walk(statement) if isinstance(node, ast.Name)):
                    return None
                continue
        if not isinstance(value, ast.List | ast.Tuple):
            return None
        is_stated = True
        names |= {item.value for item in value.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return frozenset(names) if is_stated else None


@cache
def _parse(module: Module) -> list[ast.stmt] | None:
    try:
        return ast.parse(module.source or "").body
    except (SyntaxError, ValueError):
        return None


def _bind_all(statements: Sequence[ast.stmt], scope: Scope, *, package: str) -> None:
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if not (name in scope.names and _is_overload(statement)):
                    scope.names[name] = (Binding(statement),)
            case ast.Import() | ast.ImportFrom():
                _bind_import(statement, scope, package=package)
            case ast.Delete(targets=targets):
                for target in targets:
                    scope.names.pop(getattr(target, "id", ""), None)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                _bind_branches(statement, scope, package=package)
            case _:
                for name, value in _assigned(statement):
                    scope.names[name] = (Binding(value),)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, value
                else:
                    yield from ((name, None) for name in _stored(target))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.AugAssign(target=ast.Name(id=name)):
            yield name, None


def _stored(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _bind_import(statement: ast.Import | ast.ImportFrom, scope: Scope, *, package: str) -> None:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            scope.names[name] = (Binding(Import(alias.name if alias.asname else name, None)),)
        return
    origin = statement.module or ""
    if statement.level:
        parents = package.split(".")
        origin = ".".join([*parents[: len(parents) - statement.level + 1], *([origin] if origin else [])])
    for alias in statement.names:
        if alias.name == "*":
            scope.stars.append(origin)
        else:
            scope.names[alias.asname or alias.name] = (Binding(Import(origin, alias.name)),)


def _bind_branches(statement: ast.If | ast.Try | ast.With | ast.For | ast.While, scope: Scope, *, package: str) -> None:
    """What each branch binds, side by side; a branch that ends in ``raise`` binds nothing that is seen afterwards."""
    branches: list[tuple[Sequence[ast.stmt], bool]] = [(statement.body, False)]
    if isinstance(statement, ast.Try):
        branches = [([*statement.body, *statement.orelse], False), *((h.body, True) for h in statement.handlers)]
    elif not isinstance(statement, ast.With):
        branches.append((statement.orelse, False))
    before = dict(scope.names)
    merged: dict[str, tuple[Binding, ...]] = {}
    for body, is_fallback in branches:
        if body and isinstance(body[-1], ast.Raise):
            continue
        branch = Scope(dict(before), scope.stars)
        if isinstance(statement, ast.For):
            branch.names |= {name: (Binding(None),) for name in _stored(statement.target)}
        _bind_all(body, branch, package=package)
        for name, bindings in branch.names.items():
            known = merged.get(name, ())
            if bindings is not known:
                extra = [b for b in bindings if b not in known]
                merged[name] = (*known, *(replace(b, is_fallback=True) if is_fallback else b for b in extra))
    scope.names = merged or before
    if isinstance(statement, ast.Try):
        _bind_all(statement.finalbody, scope, package=package)


def _is_overload(statement: ast.stmt) -> bool:
    decorators = getattr(statement, "decorator_list", [])
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in decorators)
