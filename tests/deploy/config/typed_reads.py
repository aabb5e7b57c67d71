"""Find configuration keys that nothing reads, exactly: pyright resolves each attribute access to its model.

    python -m tests.deploy.config.typed_reads

`test_keys_are_read` compares names, of which some occur in several models. Here, in a copy of the sources, each field of a
model is a deprecated property, so that pyright reports every access with its class. It takes some minutes of a core.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from offbeat.deploy.config.run import RunConfig
from tests.deploy.config.test_keys_are_read import BY_VALIDATORS, CHECKS, PACKAGES, nested
from tests.paths import ROOT

Key = tuple[str, str]
"""Class that declares it, and name."""
UNION = "read through a union, of which pyright names one class"
PLACED = "the configuration makes claims of it (deploy/config/device_roles.py): tests/deploy/config/test_device_plan.py"
WHOLE = "its table is used as a whole (`model_dump`)"
EXPLAINED: dict[Key, str] = {
    ("CheckpointConfig", "type"): "the protocol of output_dir, which a validator completes",
    ("CriticModelArgs", "disable_gradient_checkpointing"): WHOLE,
    **{("ManagerGeneratingArgs", name): WHOLE for name in ("max_new_tokens", "temperature", "top_k", "top_p")},
    **{("RoleModelArgs", name): WHOLE for name in ("attn_implementation", "dtype")},
    **{(cls, "device_mapping"): PLACED for cls in ("ModelRewardConfig", "ReferenceConfig", "TeacherConfig")},
    ("RewardConfig", "num_replicas"): UNION,
    **{("OnEnvError", name): UNION for name in ("reasons", "reward")},
}
"""Keys with an effect that pyright does not see."""


@dataclass(frozen=True, slots=True)
class Access:
    file: str
    function: str | Key
    """A method of a model, or the name of another function."""


def main() -> int:
    declared = declarations()
    with tempfile.TemporaryDirectory(prefix="offbeat-reads-") as folder:
        copy = Path(folder)
        write_copy(copy / "offbeat", {each for model in models() for each in model.__mro__})
        accesses = find_accesses(copy)
        read = reached(accesses, names_outside(copy / "offbeat"))
    leaves = {key for key, model in declared.items() if not list(nested(model.model_fields[key[1]].annotation))}
    explained = {key for key in leaves if key in EXPLAINED or key[1] in BY_VALIDATORS}
    selecting = {key for key in leaves if len(get_args(declared[key].model_fields[key[1]].annotation)) == 1}
    unread = sorted(leaves - read - explained - selecting)
    sys.stdout.write(f"{len(leaves)} keys, {len(unread)} read by nothing\n")
    for cls, name in unread:
        files = sorted({access.file for access in accesses[cls, name]})
        sys.stdout.write(f"{cls}.{name} {' '.join(files)}\n")
    for key in sorted(EXPLAINED.keys() & read):
        sys.stdout.write(f"{'.'.join(key)} needs no explanation\n")
    return len(unread)


def models() -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()

    def walk(model: type[BaseModel]) -> None:
        if model not in found:
            found.add(model)
            for field in model.model_fields.values():
                for table in nested(field.annotation):
                    walk(table)

    walk(RunConfig)
    return found


def declarations() -> dict[Key, type[BaseModel]]:
    """Return each key by the class that declares it; a key that a class declares anew counts as its base's."""
    found: dict[Key, type[BaseModel]] = {}
    for model in models():
        for name in model.model_fields:
            owner = [each for each in model.__mro__ if name in inspect.get_annotations(each)][-1]
            found[owner.__name__, name] = model
    return found


def write_copy(package: Path, classes: set[type[Any]]) -> None:
    for source in (path for part in PACKAGES for path in (ROOT / part).rglob("*.py")):
        relative = source.relative_to(ROOT)
        if relative.is_relative_to("deploy/package"):
            continue
        module = ".".join(("offbeat", *relative.with_suffix("").parts))
        names = {each.__name__ for each in classes if each.__module__ == module}
        text = re.sub(r"# pyright: .*", "", source.read_text())
        target = package / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_properties(text, names) if names else text)
    (package / "__init__.py").write_text((ROOT / "deploy/package/offbeat/__init__.py").read_text())


def with_properties(text: str, classes: set[str]) -> str:
    """Return the module with deprecated properties and methods for those of its classes."""
    lines = text.splitlines()
    edits: list[tuple[int, int, str]] = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                mark = f"    @_deprecated('{node.name}.{member.name}')\n"
                edits.append((member.lineno, member.lineno, mark + lines[member.lineno - 1]))
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                annotation, name = ast.unparse(member.annotation), member.target.id
                if not annotation.startswith("ClassVar"):
                    mark = f"    @property\n    @_deprecated('{node.name}.{name}')\n"
                    edits.append(
                        (member.lineno, member.end_lineno or 0, f"{mark}    def {name}(self) -> {annotation}: ...")
                    )
        end = node.end_lineno or 0
        edits.append((end + 1, end, "\n    def __init__(self, **data: object) -> None: ..."))
    for start, end, replacement in sorted(edits, reverse=True):
        lines[start - 1 : end] = [replacement]
    first = next(number for number, line in enumerate(lines) if line.startswith(("import ", "from ")))
    lines.insert(first, "from typing_extensions import deprecated as _deprecated")
    return "\n".join(lines) + "\n"


def find_accesses(copy: Path) -> dict[Key, list[Access]]:
    settings = {
        "include": ["offbeat"],
        "extraPaths": ["."],
        "venvPath": str(ROOT),
        "venv": ".venv",
        "pythonVersion": "3.11",
        "typeCheckingMode": "off",
        "reportDeprecated": "warning",
    }
    (copy / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(ROOT / ".venv/bin/pyright"), "--outputjson", "-p", str(copy)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    functions = {
        path: dict(enclosing(path)) for path in sorted({each["file"] for each in report["generalDiagnostics"]})
    }
    found: dict[Key, list[Access]] = defaultdict(list)
    for each in report["generalDiagnostics"]:
        cls, _, name = each["message"].splitlines()[-1].strip().partition(".")
        if each.get("rule") == "reportDeprecated" and name.isidentifier():
            file = Path(each["file"]).relative_to(copy / "offbeat").as_posix()
            line = each["range"]["start"]["line"] + 1
            found[cls, name].append(Access(file, functions[each["file"]].get(line, "")))
    return found


def enclosing(file: str) -> Iterator[tuple[int, str | Key]]:
    """Yield each line of a function, and the function."""
    for node in ast.parse(Path(file).read_text()).body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                function = (node.name, each.name) if isinstance(node, ast.ClassDef) else each.name
                yield from ((line, function) for line in range(each.lineno, (each.end_lineno or 0) + 1))


def is_configuration(file: str) -> bool:
    return file.startswith(CHECKS) or file.endswith("config.py")


def names_outside(package: Path) -> set[str]:
    """Return the names that code outside of the configuration uses."""
    texts = (path.read_text() for path in package.rglob("*.py") if not is_configuration(str(path.relative_to(package))))
    return {name for text in texts for name in re.findall(r"\w+", text)}


def reached(accesses: dict[Key, list[Access]], outside: set[str]) -> set[Key]:
    """Return what is read outside of the configuration, itself or by a method or function that is used there."""
    read: set[Key] = set()

    def is_read(access: Access) -> bool:
        if not is_configuration(access.file):
            return True
        if isinstance(access.function, tuple):
            return access.function in read or (access.function not in accesses and access.function[1] in outside)
        return access.function in outside

    size = -1
    while size < len(read):
        size = len(read)
        read |= {key for key, found in accesses.items() if any(map(is_read, found))}
    return read


if __name__ == "__main__":
    sys.exit(main() > 0)
