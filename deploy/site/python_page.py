"""Page of the public Python names, which mkdocstrings fills in."""

import importlib
import inspect

import offbeat

HEAD = """# Python

Generated from the docstrings of the names that `import offbeat` has. Everything else is internal: its names may change
with any release. [A first run](../first_run.md#from-python) shows them in use, `offbeat.testing` has what tests need.
"""


def python_page() -> str:
    sections = [_section(name) for name in offbeat.__all__ if not name.startswith("_")]
    testing = importlib.import_module("offbeat.testing")
    sections += [_section(name, "offbeat.testing") for name in testing.__all__]
    return "\n".join([HEAD, *sections])


def _section(name: str, module: str = "offbeat") -> str:
    """Return a heading over the documentation of a public name."""
    item = getattr(importlib.import_module(module), name)
    path = f"{inspect.unwrap(item).__module__}.{item.__qualname__}"
    options = "    options:\n      heading_level: 3\n" + ("      members: false\n" if name == "RunConfig" else "")
    return f"## {module}.{name}\n\n::: {path}\n{options}"
