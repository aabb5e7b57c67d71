"""Base class of all configuration: strict, frozen, documented at the field."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A validated part of a run's configuration; an unknown key or a wrong type is refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # JSON can't say them, and a run's record is JSON
    )
