"""The exact search for keys that nothing reads distinguishes models with fields of one name."""

from pathlib import Path

from tests.deploy.config.typed_reads import (
    EXPLAINED,
    declarations,
    find_accesses,
    names_outside,
    reached,
    with_properties,
)

MODELS = """from pydantic import BaseModel

class Read(BaseModel):
    size: int = 1
    half: int = 1

    @property
    def rest(self) -> int:
        return self.half

class Idle(BaseModel):
    size: int = 1
    half: int = 1

    @property
    def unused(self) -> int:
        return self.half
"""
USE = """from offbeat.config import Idle, Read

def use(read: Read, idle: Idle = Idle(size=2)) -> int:
    return read.size + read.rest
"""


def test_a_key_is_read_only_where_its_own_model_is(tmp_path: Path) -> None:
    package = tmp_path / "offbeat"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text(with_properties(MODELS, {"Read", "Idle"}))
    (package / "use.py").write_text(USE)
    read = reached(find_accesses(tmp_path), names_outside(package))
    assert read == {("Read", "size"), ("Read", "half"), ("Read", "rest")}


def test_explained_keys_exist() -> None:
    assert EXPLAINED.keys() <= declarations().keys()
