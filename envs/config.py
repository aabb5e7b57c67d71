"""Base classes of the configuration and of other models with documented fields."""

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler


class DocumentedModel(BaseModel):
    """Model whose JSON schema describes fields by their attribute docstrings.

    They are read when a schema is made: `use_attribute_docstrings` parses every class's source in every process.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _attribute_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


class Config(DocumentedModel):
    """Validated settings; rejects unknown keys and wrong types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # a run's record is JSON, which has neither
    )


def _attribute_docstrings(model: type[DocumentedModel]) -> dict[str, str]:
    """Return field -> docstring; a field that a subclass declares again has that docstring alone."""
    docstrings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, DocumentedModel) and cls is not DocumentedModel:
            for name in inspect.get_annotations(cls):
                docstrings.pop(name, None)
            docstrings |= _declared_docstrings(cls)
    return docstrings


def _declared_docstrings(cls: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # made by `create_model`, in a console, or in a function with odd indents
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
