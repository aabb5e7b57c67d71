"""Page of the configuration's keys: names, types, defaults and docs."""

import json
from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.site.markdown import cell, table

Schema = dict[str, Any]
HEAD = """# Configuration keys

Generated from the models that validate a run's file. `*` stands for a name of yours; `offbeat config show FILE` prints
every key with its value. [Configuration](../configuration.md) explains how keys work together.
"""
ROOT = "Top level"
BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
MAX_DEFAULT = 60
"""Characters of a column."""


def config_page() -> str:
    schema = RunConfig.model_json_schema()
    places = _places(schema)
    sections = [HEAD, _section(ROOT, [], schema)]
    for name, paths in places.items():
        sections.append(_section(f"`{paths[0]}`", paths[1:], schema["$defs"][name]))
    return "\n".join(sections)


def _places(schema: Schema) -> dict[str, list[str]]:
    """Return the paths of each table, in the order of the file."""
    places: dict[str, list[str]] = {}
    waiting = [("", schema)]
    while waiting:
        prefix, each = waiting.pop(0)
        for key, value in each.get("properties", {}).items():
            for suffix, name in _tables(value):
                path = f"{prefix}{key}{suffix}"
                known = name in places
                places.setdefault(name, []).append(path)
                if not known and schema["$defs"][name].get("properties"):
                    waiting.append((f"{path}.", schema["$defs"][name]))
    return {name: paths for name, paths in places.items() if schema["$defs"][name].get("properties")}


def _tables(schema: Schema, suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the tables of a value, with the suffix of its key: `.*` for names, `[]` for lists."""
    if "$ref" in schema:
        yield suffix, schema["$ref"].rpartition("/")[2]
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _tables(option, suffix)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _tables(schema["additionalProperties"], f"{suffix}.*")
    if isinstance(schema.get("items"), dict):
        yield from _tables(schema["items"], f"{suffix}[]")


def _section(title: str, others: list[str], schema: Schema) -> str:
    also = f"Also at {', '.join(f'`{path}`' for path in others)}.\n\n" if others else ""
    about = f"{schema.get('description', '')}\n\n" if title != ROOT else ""
    required = set(schema.get("required", ()))
    rows = [
        [f"`{key}`", cell(_type(value)), _default(value, key in required), cell(value.get("description", ""))]
        for key, value in schema["properties"].items()
    ]
    return f"## {title}\n\n{about}{also}{table(['Key', 'Type', 'Default', 'Meaning'], rows)}\n"


def _type(schema: Schema) -> str:
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if options:
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "$ref" in schema:
        return "table"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"names with {_type(inner)}" if isinstance(inner, dict) and inner else "names with values"
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "any"), *bounds])


def _default(schema: Schema, required: bool) -> str:
    if required:
        return "required"
    if "default" not in schema or "$ref" in schema or (isinstance(schema["default"], dict) and schema["default"]):
        return ""
    text = json.dumps(schema["default"], ensure_ascii=False)
    return f"`{text}`" if len(text) <= MAX_DEFAULT else ""
