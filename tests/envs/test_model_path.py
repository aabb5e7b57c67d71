"""Locations of validation errors."""

from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.envs.model_path import Location, resolve_location
from offbeat.envs.sandbox import Limits
from offbeat.envs.tools.env import ToolEnvConfig
from offbeat.envs.tools.tool_calls import PythonTool, SearchTool


@pytest.mark.parametrize(
    ("tool", "keys", "table"),
    [
        ({"tool_id": "search", "corpus": "c.txt", "topk": 3}, ("tools", 0, "topk"), SearchTool),
        ({"tool_id": "search", "corpus": 3}, ("tools", 0, "corpus"), SearchTool),
        ({"tool_id": "python_code", "limits": {"cpu": 3}}, ("tools", 0, "limits", "cpu"), Limits),
        ({"tool_id": "python_code", "cpu": {}}, ("tools", 0, "cpu"), PythonTool),
    ],
)
def test_keys_have_no_branches_of_unions_and_tables_are_found(tool: dict[str, Any], keys: Location, table: type):
    with pytest.raises(ValidationError) as caught:
        ToolEnvConfig.model_validate({"env_type": "frozen_lake", "tools": [tool]}, strict=False)
    location = caught.value.errors()[0]["loc"]
    assert resolve_location(ToolEnvConfig, location).keys == keys
    assert resolve_location(ToolEnvConfig, location[:-1]).table is table
