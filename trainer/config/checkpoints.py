import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from offbeat.envs.config import Config

LOCAL = ("file_system", "file", "local")
OWN_MEMORY = ("memory", "data")
"""Protocols of stores that end with the process."""
CheckpointUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://")]


class CheckpointConfig(Config):
    """Store for copies of finished checkpoints; ROLL's `checkpoint_config`."""

    type: str | None = Field(default=None, pattern="^[a-z][a-z0-9+_.-]*$")
    """`file_system`, or a protocol of fsspec (`s3`, `gs`, `abfs`); None: that of `output_dir`."""
    output_dir: str = Field(min_length=1)
    """Folder or URL (`s3://bucket/prefix`); runs have folders of their own there. Credentials come from the
    environment, as documented by the protocol's library.
    """
    async_upload: bool = True
    """False: training waits for uploads, up to 15 minutes each."""
    keep_local_file: bool = True
    """False removes a local checkpoint after a verified upload."""

    @field_validator("output_dir")
    @classmethod
    def _is_a_place(cls, value: str, info: ValidationInfo) -> str:
        kind = info.data.get("type")
        protocol, is_url, place = value.partition("://")
        if problem := find_url_problem(value):
            raise ValueError(problem)
        if is_url and kind is not None and kind != protocol and not {kind, protocol} <= {*LOCAL}:
            raise ValueError(f"type is {kind}, and {value} is of {protocol}: leave type out, or take {protocol}")
        protocol = protocol if is_url else kind or LOCAL[0]
        if protocol in OWN_MEMORY:
            raise ValueError(f"{protocol} ends with the learner's process: take a folder or an object store")
        place = place if is_url else value
        return str(Path(place).absolute()) if protocol in LOCAL else f"{protocol}://{place.strip('/')}"


def find_url_problem(url: str) -> str:
    """Return why a URL can't name a store; empty for none."""
    place = url.partition("://")[2]
    if "::" in url:
        return "chained file systems (`::`) are not supported: name one"
    if re.match(r"[^/]*:[^/]*@", place) or "?" in place:
        return "credentials and options come from the environment (AWS_ACCESS_KEY_ID, ...): leave them out of the URL"
    return ""
