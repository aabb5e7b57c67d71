# pyright: basic
"""Names of a test of a program, in the sandbox, where this source follows that of `peer`.

Invariant: the program gives a test only what the test neither defines nor imports, nor Python has: else it would choose
expected values, or how they are compared.
"""

import ast
import builtins
import contextlib
import importlib
import symtable
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.envs.dataset.peer import Peer, Remote, connect

PROGRAM_MODULES = ("solution", "main", "program")
"""Import names of the program."""
LIBRARIES = {
    **{name: name for name in sys.stdlib_module_names if name not in PROGRAM_MODULES},
    "numpy": "numpy",
    "np": "numpy",
    "pytest": "pytest",
}
"""Modules that a test uses without importing them, by their names in it."""
OTHER_LIBRARIES = ("matplotlib", "networkx", "nx", "pandas", "pd", "plt", "scipy", "sklearn", "sympy", "torch")
"""Names of modules that a test has only if it imports them."""
CLASSES = {
    **dict.fromkeys(("ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "timedelta": "datetime",
}
"""Names with which tests build expected values, and their modules."""
COMPARISONS = {
    **dict.fromkeys(("inf", "isclose", "isinf", "isnan", "nan", "pi"), "math"),
    **dict.fromkeys(("allclose", "array_equal"), "numpy"),
    **dict.fromkeys(("assert_allclose", "assert_almost_equal", "assert_array_equal", "assert_equal"), "numpy.testing"),
    **dict.fromkeys(("approx", "raises"), "pytest"),
}
STANDARD = CLASSES | COMPARISONS
SOLVED = frozenset({"bin", "complex", "divmod", "hash", "hex", "max", "min", "oct", "pow", "sum"})
"""Builtins of which a program may define several; with others a test compares."""


def bind(peer: "Peer", test: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the program's values and the libraries' that a test uses without defining them.

    A name that Python has, too (`math`, `sorted`, `isclose`), is the program's only if the test imports it from there by
    name, or uses no other of it, nor imports any by itself.
    """
    used = free_names(test) - set(OTHER_LIBRARIES)
    libraries: dict[str, Any] = {name: value for name, value in used_modules(test).items() if name in used}
    defined = {name for name in peer.request("names") if name in used and not name.startswith("__")} - libraries.keys()
    imported = _program_imports(test)
    given = {name for name in defined if name in imported or not (hasattr(builtins, name) or name in COMPARISONS)}
    if not given - CLASSES.keys() and not imported:
        given = defined if len(defined) == 1 else defined & (SOLVED | CLASSES.keys())
    program: dict[str, Any] = {}
    for name in given:
        ((kind, value),) = peer.request("global", name).items()
        if kind == "value":
            program[name] = Constructor(value, _standard(name)) if name in CLASSES and len(given) > 1 else value
        elif value.partition(".")[0] in LIBRARIES.values():
            libraries[name] = importlib.import_module(value)
    for name in (used & STANDARD.keys()) - program.keys():
        with contextlib.suppress(ImportError):
            libraries[name] = _standard(name)
    return program, libraries


def _standard(name: str) -> Any:
    return getattr(importlib.import_module(STANDARD[name]), name)


class Constructor:
    """Constructs objects of the program's class, and otherwise values of the library's, which has its attributes first."""

    def __init__(self, of_program: Any, of_library: Any) -> None:
        self._of_program, self._of_library = of_program, of_library

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._of_program(*args, **kwargs)
        return value if isinstance(value, Remote) else self._of_library(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_library if hasattr(self._of_library, name) else self._of_program, name)


def free_names(test: str) -> set[str]:
    """Return the global names that a test reads, and neither defines nor imports from elsewhere than the program."""
    tree = ast.parse(test)
    written = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in _names_of_star(node)}
    read: set[str] = set()
    tables = [symtable.symtable(ast.unparse(_WithoutProgramImports().visit(tree)), "test", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() != "module" and not symbol.is_global():
                continue
            if symbol.is_referenced():
                read.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                written.add(symbol.get_name())
    return read - written


def _program_imports(test: str) -> set[str]:
    """Return the program's names, and modules, that a test imports by name."""
    nodes = list(ast.walk(ast.parse(test)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES]
    return modules & set(PROGRAM_MODULES) | {alias.name for node in sources for alias in node.names} - {"*"}


class _WithoutProgramImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.Pass() if node.module in PROGRAM_MODULES else node


def _names_of_star(node: ast.ImportFrom) -> list[str]:
    """Return the names of `from math import *`."""
    if node.names[0].name != "*" or (node.module or "").partition(".")[0] not in LIBRARIES:
        return []
    with contextlib.suppress(ImportError):
        module = importlib.import_module(str(node.module))
        return getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return []


def used_modules(test: str) -> dict[str, types.ModuleType]:
    """Return the modules of which a test uses only attributes that they have."""
    nodes = list(ast.walk(ast.parse(test)))
    attributes: dict[str, set[str]] = {}
    owners: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in LIBRARIES:
            attributes.setdefault(node.value.id, set()).add(node.attr)
            owners.add(id(node.value))
    others = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}
    modules: dict[str, types.ModuleType] = {}
    for name in attributes.keys() - others:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(LIBRARIES[name])
            if all(hasattr(module, attribute) for attribute in attributes[name]):
                modules[name] = module
    return modules


def run_test(test: str, read_fd: int, write_fd: int, timeout_s: float, startup_timeout_s: float) -> None:
    """Run a test with the program's names; raise if it fails or uses none."""
    peer = connect(read_fd, write_fd, timeout_s, startup_timeout_s)
    program, libraries = bind(peer, test)
    if not program:
        raise NameError("the test uses nothing that the program defines")
    namespace = {"__name__": "__main__", "__builtins__": builtins, **libraries, **program}
    exec(compile(test, "test.py", "exec"), namespace)
