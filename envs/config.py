"""Base class of the configuration."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Validated settings; rejects unknown keys and wrong types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # a run's record is JSON, which has neither
    )
