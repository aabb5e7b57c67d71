import pytest
from pydantic import ValidationError

from offbeat.services.control.config import ControlConfig


@pytest.mark.parametrize("tokens", [{"token": ""}, {"token": "operate", "read_token": ""}])
def test_an_empty_token_does_not_turn_authentication_off(tokens: dict[str, str]):
    """As of a variable of the environment that is not set."""
    with pytest.raises(ValidationError, match="at least 1 character"):
        ControlConfig.model_validate(tokens)
