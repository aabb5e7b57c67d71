"""JSON Schema of a run's file, for editors: keys, types, ranges, choices and docs.

It describes the file before composition: `${...}` may replace a value, and other spellings of keys are valid. Required
keys, conditions between keys, and top-level variables are left to `offbeat config validate`.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.aliases import ANSWERS, KEYS, NEUTRAL, REWARD, VALUES

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"
"""Newest dialect that YAML language servers support in full."""
FILE = "run.schema.json"
REWARDS = f"{REWARD}."
INTERPOLATION = {"$ref": "#/$defs/Interpolation"}
HYDRA: Schema = {
    "defaults": {"type": "array", "description": "Files that this one is composed with, as in Hydra."},
    "hydra": {"type": "object", "description": "Hydra's own keys; without effect."},
}


def run_schema() -> Schema:
    schema = RunConfig.model_json_schema()
    definitions: Schema = schema.pop("$defs")
    root = {"properties": schema["properties"]}
    for table in (root, *definitions.values()):
        table.pop("required", None)  # a file of the defaults list may have it
        table["properties"] = {name: _tidy(each) for name, each in table.get("properties", {}).items()}
    for key, target in KEYS.items():
        for table in _tables(root, definitions, key):
            _add_spelling(table, definitions, key.removeprefix(REWARDS), target.removeprefix(REWARDS))
    for key, target in ANSWERS.items():
        _add_spelling(root, definitions, key, target)
    for key, (values, reason) in NEUTRAL.items():
        for table in _tables(root, definitions, key):
            description = f"Without effect: {reason}." if reason else ""
            _add_values(table, definitions, key.removeprefix(REWARDS), values, description, create=table is root)
    for key, spellings in VALUES.items():
        for table in _tables(root, definitions, key):
            _add_values(table, definitions, key.removeprefix(REWARDS), tuple(spellings), "", create=table is root)
    for table in (root, *definitions.values()):
        if table["properties"]:
            table["properties"] = {name: _or_interpolation(each) for name, each in table["properties"].items()}
        else:
            del table["properties"]
    return {
        "$schema": DIALECT,
        "title": "Offbeat run",
        "description": schema["description"],
        "type": "object",
        "properties": {**root["properties"], **HYDRA},
        "additionalProperties": False,
        "definitions": {**definitions, "Interpolation": {"type": "string", "pattern": r"\$\{"}},
    }


def run_schema_text() -> str:
    """Return the schema as JSON, one line per key or reference."""
    text = json.dumps(run_schema(), indent=1, ensure_ascii=False)
    text = re.sub(r'\{\s+("\$ref": "[^"]+")\s+\}', r"{\1}", text)
    return text.replace('"#/$defs/', '"#/definitions/') + "\n"


def _tidy(schema: Schema) -> Schema:
    """Remove titles that repeat the key, and defaults of tables."""
    kept = {name: value for name, value in schema.items() if name != "title"}
    if isinstance(kept.get("default"), dict | list) and kept["default"]:
        del kept["default"]
    return kept


def _tables(root: Schema, definitions: Schema, key: str) -> Iterator[Schema]:
    """Yield the tables that a key is below: those of the kinds of rewards, or the root."""
    if not key.startswith(REWARDS):
        yield root
        return
    for option in root["properties"]["rewards"]["items"]["oneOf"]:
        yield definitions[option["$ref"].rpartition("/")[2]]


def _add_spelling(root: Schema, definitions: Schema, key: str, target: str) -> None:
    """Give another spelling of a key its schema."""
    if (found := _find(root, definitions, target, create=False)) is None:
        return
    table = _find(root, definitions, key.rpartition(".")[0], create=True) if "." in key else root
    if table is None or "properties" not in table:
        return
    table["properties"].setdefault(
        key.rpartition(".")[2], {**found, "description": f"Another spelling of `{target}`.", "deprecated": True}
    )


def _add_values(
    root: Schema, definitions: Schema, key: str, values: tuple[object, ...], description: str, *, create: bool
) -> None:
    """Accept further values of a key. create: as in `_find`."""
    table = _find(root, definitions, key.rpartition(".")[0], create=create) if "." in key else root
    if table is None or "properties" not in table:
        return
    leaf, choice = key.rpartition(".")[2], {"enum": list(values)}
    known = table["properties"].get(leaf)
    if known is None and (create or description):
        table["properties"][leaf] = {**choice, "description": description, "deprecated": True}
    elif known is not None:
        table["properties"][leaf] = _either(known, choice)


def _find(root: Schema, definitions: Schema, key: str, *, create: bool) -> Schema | None:
    """Return the schema of a key; `*` is any name. create: make tables that only have other spellings."""
    schema: Schema | None = root
    for part in key.split("."):
        table = _table(schema, definitions)
        if table is None:
            return None
        if part == "*":
            schema = table.get("additionalProperties") or None
            continue
        properties = table.setdefault("properties", {})
        if part not in properties and create and table.get("additionalProperties") is False:
            properties[part] = {"type": "object", "properties": {}, "additionalProperties": False, "deprecated": True}
        schema = properties.get(part)
    return _table(schema, definitions) or schema


def _table(schema: Schema | None, definitions: Schema) -> Schema | None:
    if not isinstance(schema, dict):
        return None
    for option in (schema, *schema.get("anyOf", ())):
        if "$ref" in option:
            return definitions[option["$ref"].rpartition("/")[2]]
        if "properties" in option or "additionalProperties" in option:
            return option
    return None


def _or_interpolation(schema: Schema, *, is_property: bool = True) -> Schema:
    """Accept `${...}` in place of a value or of a user-named table."""
    if is_property and _is_table(schema):
        return schema  # an editor then names the mistake within it
    schema = dict(schema)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict) and schema[name]:
            schema[name] = _or_interpolation(schema[name], is_property=False)
    if isinstance(schema.get("properties"), dict):
        schema["properties"] = {name: _or_interpolation(each) for name, each in schema["properties"].items()}
    return schema if any(_is_any_text(option) for option in _options(schema)) else _either(schema, INTERPOLATION)


def _is_table(schema: Schema) -> bool:
    return any(
        "$ref" in option and not option["$ref"].endswith(("/JsonValue", "/Interpolation"))
        for option in _options(schema)
    )


def _is_any_text(schema: Schema) -> bool:
    return not schema or (schema.get("type") == "string" and not {"enum", "pattern", "format", "maxLength"} & {*schema})


def _options(schema: Schema) -> Iterator[Schema]:
    if "anyOf" in schema:
        yield from schema["anyOf"]
    else:
        yield {name: value for name, value in schema.items() if name not in ("description", "default")}


def _either(schema: Schema, other: Schema) -> Schema:
    """Return alternatives, annotated as the first."""
    shown = {name: schema[name] for name in ("description", "default", "deprecated") if name in schema}
    options = [{name: value for name, value in each.items() if name not in shown} for each in _options(schema)]
    return {**shown, "anyOf": [*options, other]}


if __name__ == "__main__":
    sys.stdout.write(run_schema_text())
