"""Names of vLLM's engine arguments, read from its source without an import."""

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

CLASSES = ("EngineArgs", "AsyncEngineArgs")


@lru_cache(1)
def engine_argument_names() -> tuple[str, ...]:
    """Return the names; none if vLLM is missing or differs."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return ()
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError):
        return ()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    fields = [field for each in classes for field in each.body if isinstance(field, ast.AnnAssign)]
    names = (field.target.id for field in fields if isinstance(field.target, ast.Name))
    return tuple(name for name in names if not name.startswith("_"))
