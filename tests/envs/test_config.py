"""Attribute docstrings in JSON schemas."""

from typing import Annotated, Any

import pytest
from pydantic import ConfigDict, Field, create_model

from offbeat.envs import registry
from offbeat.envs.config import Config, DocumentedModel


class MapSize(Config):
    side: int = 4
    """Cells per side."""
    depth: int = 1
    """Layers."""
    plain: int = 0


class LargerMap(MapSize):
    side: int = 8
    depth: int = 2
    """Layers, at least two."""
    size: MapSize = MapSize()
    """A table."""
    named: Annotated[int, Field(description="Said in the field.")] = 3
    """Not shown."""


class ParsedModel(DocumentedModel):
    """The same fields, by pydantic's own parser."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    text: str
    """Two lines,
    the second of which is indented.
    """


def descriptions(model: type[DocumentedModel]) -> dict[str, Any]:
    return {name: field.get("description") for name, field in model.model_json_schema()["properties"].items()}


def test_a_field_is_described_by_its_docstring():
    assert descriptions(MapSize) == {"side": "Cells per side.", "depth": "Layers.", "plain": None}


def test_a_field_declared_again_has_its_own_docstring_alone():
    assert descriptions(LargerMap) == {
        "side": None,
        "depth": "Layers, at least two.",
        "plain": None,
        "size": "A table.",
        "named": "Said in the field.",
    }
    assert LargerMap.model_json_schema()["$defs"]["MapSize"]["properties"]["side"]["description"] == "Cells per side."


def test_docstrings_are_read_as_by_pydantic():
    class LazyModel(DocumentedModel):
        text: str
        """Two lines,
        the second of which is indented.
        """

    assert descriptions(LazyModel) == descriptions(ParsedModel)


def test_a_model_without_source_has_no_descriptions():
    made = create_model("Made", __base__=MapSize, width=(int, 3))
    assert descriptions(made) == {"side": "Cells per side.", "depth": "Layers.", "plain": None, "width": None}


def test_no_source_is_read_before_a_schema_is_made():
    assert not Config.model_config.get("use_attribute_docstrings")
    assert MapSize.model_fields["side"].description is None


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_a_description_is_of_one_setting_alone(name: str):
    factory: Any = registry.find_factory(name)
    described = [text for text in descriptions(factory.config_class).values() if text is not None]
    assert sorted(described) == sorted(set(described))
