"""Page of the REST API, from its OpenAPI document."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from offbeat.deploy.cluster.run_factory import MeshRunFactory
from offbeat.deploy.site.markdown import cell, table
from offbeat.services.control.api import create_api
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore

Document = dict[str, Any]
HEAD = """# REST routes

Generated from the service's OpenAPI document, which a running one shows at `/docs` and `/openapi.json`. [REST](../rest.md)
explains how to use it.
"""
UNUSED_REDIS = "redis://127.0.0.1:1"
"""Never connected to."""


def rest_page() -> str:
    document = openapi_document()
    schemas = document["components"]["schemas"]
    routes = [_route(method, path, route) for path, method, route in _routes(document)]
    models = [_model(name, schema) for name, schema in schemas.items()]
    return "\n".join([HEAD, *routes, "# Schemas\n", *models])


def openapi_document() -> Document:
    redis = Redis.from_url(UNUSED_REDIS)
    factory = MeshRunFactory(redis, UNUSED_REDIS, Path())
    return create_api(ControlService(RunStore(redis), factory, wake=lambda: None)).openapi()


def _routes(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield path, method.upper(), route


def _route(method: str, path: str, route: Document) -> str:
    text = [f"## {method} {path}\n", route.get("description", ""), ""]
    parameters = [
        [f"`{each['name']}`", each["in"], cell(_type(each["schema"])), cell(each.get("description", ""))]
        for each in route.get("parameters", ())
    ]
    if parameters:
        text.append(table(["Parameter", "In", "Type", "Meaning"], parameters))
    if "requestBody" in route:
        kinds = ", ".join(f"`{kind}`" for kind in route["requestBody"]["content"])
        text.append(f"Body ({kinds}): {route['requestBody'].get('description', 'see below')}\n")
    answers = [
        [f"`{status}`", cell(answer.get("description", "")), ", ".join(_contents(answer))]
        for status, answer in route["responses"].items()
    ]
    return "\n".join([*text, table(["Status", "Meaning", "Body"], answers)])


def _contents(answer: Document) -> Iterator[str]:
    for content in answer.get("content", {}).values():
        if content.get("schema"):
            yield _type(content["schema"])


def _model(name: str, schema: Document) -> str:
    if "properties" not in schema:
        return f"## {name}\n\n{schema.get('description', '')}\n\n{_type(schema)}\n"
    required = set(schema.get("required", ()))
    rows = [
        [f"`{key}`", cell(_type(value)), "yes" if key in required else "", cell(value.get("description", ""))]
        for key, value in schema["properties"].items()
    ]
    about = schema.get("description", "")
    return f"## {name}\n\n{about}\n\n{table(['Field', 'Type', 'Always', 'Meaning'], rows)}"


def _type(schema: Document) -> str:
    """Return a schema as text, with links to named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if options:
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return schema.get("type", "any")
