"""No key is accepted and without effect: each is read by code that does more than check it.

By name; `python -m tests.deploy.config.typed_reads` distinguishes keys of one name in several models.
"""

import ast
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, create_model

from offbeat.deploy.config.run import RunConfig
from tests.paths import ROOT

PACKAGES = ("envs", "services", "trainer", "deploy")
CHECKS = ("trainer/config/", "trainer/checks/", "deploy/config/", "deploy/package/")
"""Folders that declare and check keys."""
BY_VALIDATORS = {
    "per_device_train_batch_size": "sets max_tokens_per_microbatch: tests/trainer/training/test_batch_sizes.py",
    "gradient_accumulation_steps": "sets num_minibatches: tests/trainer/training/test_batch_sizes.py",
    "num_train_epochs": "sets max_steps: tests/deploy/config/checks/test_data.py",
    "max_files": "sent to the sandbox's process as a whole: tests/envs/sandbox/test_limits.py",
    "placement": "selects `scored_roles` of the run's configuration: tests/integration/test_scoring_service.py",
}
"""Keys that a validator or a property of the configuration turns into others, and what shows it."""


def nested(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from nested(each)


def leaves(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and name of each key without a table of its own."""
    for name, field in model.model_fields.items():
        tables = list(nested(field.annotation))
        for table in tables:
            yield from leaves(table, f"{before}{name}.")
        if not tables:
            yield f"{before}{name}", name


def attributes(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def read_names() -> set[str]:
    """Return attributes read outside the configuration, and by what of the configuration is used there."""
    read: set[str] = set()
    within: dict[str, set[str]] = {}
    for path in (each for package in PACKAGES for each in sorted((ROOT / package).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        if not path.relative_to(ROOT).as_posix().startswith(CHECKS):
            read |= attributes(tree)
        if path.name == "config.py" or path.is_relative_to(ROOT / "trainer/config"):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    within.setdefault(node.name, set()).update(attributes(node))
    new = set(read)
    while new:
        new = {name for each in new for name in within.get(each, ())} - read
        read |= new
    return read


@pytest.fixture(scope="module")
def read() -> set[str]:
    return read_names()


def test_every_key_is_read_where_it_has_an_effect(read: set[str]):
    keys = list(leaves(RunConfig))
    assert len(keys) > 300
    unread = {path for path, name in keys if name not in read and name not in BY_VALIDATORS}
    assert not unread, "accepted, and read by nothing but checks: implement or refuse them"


def test_a_key_that_nothing_reads_is_found(read: set[str]):
    idle = create_model("Idle", __base__=RunConfig, key_that_nothing_reads=(int, 0))
    assert [path for path, name in leaves(idle) if name not in read and name not in BY_VALIDATORS] == [
        "key_that_nothing_reads"
    ]


def test_the_exceptions_are_needed(read: set[str]):
    names = {name for _, name in leaves(RunConfig)}
    assert names - read == set(BY_VALIDATORS)
