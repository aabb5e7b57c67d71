"""Properties of the source code: nothing is unpickled (C8 of docs/architecture.md), and no import cycle exists."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.paths import ROOT

PARTS = ("services", "envs", "trainer", "deploy", "benchmarks")
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
SAFE_ARGUMENT = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
}
AUTO_CLASS = re.compile(r"(Auto\w+|auto)\.from_(pretrained|config)")
WORDS = (*RUNS_WHAT_IT_READS, "load", "from_pretrained")
RESTRICTED = {Path("trainer/engines/state_files.py"): ["import pickle"]}
"""What modules may name because they restrict it; tests/trainer/engines/test_state_files.py attacks them."""
UNSAFE_CALLS = {
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "redis_cloudpickle.loads",
    "pickle.load",
    "pickle.loads",
}


def unsafe(source: str) -> Iterator[str]:
    """What in a module reads by running, as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in RUNS_WHAT_IT_READS:
                yield f"{node.lineno}: import {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {word.arg: word.value for word in node.keywords}
            argument, wanted = SAFE_ARGUMENT.get(called, ("", None))
            if AUTO_CLASS.fullmatch(called):  # transformers would ask on a terminal whether to run the folder's code
                argument, wanted = "trust_remote_code", False
            value = given.get(argument)
            if argument and not (isinstance(value, ast.Constant) and value.value is wanted):
                yield f"{node.lineno}: {called} without {argument}={wanted}"
            if called in UNSAFE_CALLS:
                yield f"{node.lineno}: {called}"


def test_no_module_of_ours_unpickles_what_it_reads():
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 150
    sources = {path.relative_to(ROOT): path.read_text() for path in files}
    suspects = {path: source for path, source in sources.items() if any(word in source for word in WORDS)}
    found = {path: [what.partition(": ")[2] for what in unsafe(source)] for path, source in suspects.items()}
    assert {path: what for path, what in found.items() if what} == RESTRICTED


def test_each_way_to_unpickle_would_be_seen():
    for source in (
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(f)",
        "yaml.load(x)",
        "torch.load(f, weights_only=False)",
        "pickle.load(f)",
        "AutoModel.from_pretrained(f)",
        "AutoModel.from_config(c, trust_remote_code=True)",
    ):
        assert list(unsafe(source)), source
    assert list(unsafe("torch.load(f, weights_only=True)\nyaml.safe_load(x)\nnp.load(f, allow_pickle=False)")) == []


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, inside of functions, too; not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in ignored:
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_import_cycle_exists_not_even_through_imports_inside_functions():
    modules = {
        "offbeat." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
    }
    graph = {name: (imports_of(path) & modules.keys()) - {name} for name, path in modules.items()}
    assert len(graph) > 300
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_class_name_stands_for_one_class():
    """Across services, envs, trainer, deploy and benchmarks; nested classes excepted."""
    modules: dict[str, list[str]] = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            if ROOT / "deploy" / "package" in path.parents:
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    modules.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_every_configuration_of_deploy_is_packaged_with_its_schema():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["offbeat.deploy"]
    packaged = {path for pattern in patterns for path in (ROOT / "deploy").glob(pattern)}
    found = (path for suffix in ("*.yaml", "*.json") for path in (ROOT / "deploy").rglob(suffix))
    sources = (path for path in found if "package" not in path.relative_to(ROOT).parts)
    assert set(sources) == {path for path in packaged if path.suffix in (".yaml", ".json")}
