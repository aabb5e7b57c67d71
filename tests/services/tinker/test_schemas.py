import pytest
from pydantic import ValidationError

from offbeat.services.tinker.schemas import AdamBody


def test_an_eps_that_is_0_in_float32_is_refused():
    """The first gradients of an adapter's A are 0."""
    assert AdamBody(eps=1e-30).eps == 1e-30
    with pytest.raises(ValidationError, match="eps"):
        AdamBody(eps=1e-50)
