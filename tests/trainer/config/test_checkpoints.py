"""Where checkpoints are uploaded to and resumed from, as configured."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import validate_tree
from offbeat.deploy.config.paths import resolve_paths
from offbeat.trainer.config.checkpoints import CheckpointConfig
from offbeat.trainer.config.run import LearnerRunConfig


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"output_dir": "s3://bucket/a/"}, "s3://bucket/a"),
        ({"type": "s3", "output_dir": "bucket/a"}, "s3://bucket/a"),
        ({"type": "s3", "output_dir": "s3://bucket/a"}, "s3://bucket/a"),
        ({"output_dir": "/data/a"}, "/data/a"),
        ({"type": "file_system", "output_dir": "file:///data/a"}, "/data/a"),
        ({"type": "file_system", "output_dir": "a"}, str(Path("a").absolute())),
    ],
)
def test_type_and_output_dir_name_one_place(given: dict[str, Any], place: str):
    config = CheckpointConfig(**given)
    assert config.output_dir == place
    assert CheckpointConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"type": "gs", "output_dir": "s3://bucket/a"}, "leave type out, or take s3"),
        ({"type": "file_system", "output_dir": "s3://bucket/a"}, "leave type out, or take s3"),
        ({"output_dir": "s3://key:secret@bucket/a"}, "come from the environment"),
        ({"output_dir": "s3://bucket/a?token=secret"}, "come from the environment"),
        ({"output_dir": "simplecache::s3://bucket/a"}, "chained"),
        ({"output_dir": "memory://a"}, "ends with the learner's process"),
    ],
)
def test_a_place_that_can_not_be_is_refused(given: dict[str, Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        CheckpointConfig(**given)


def tree(**keys: object) -> dict[str, object]:
    return {"custom_envs": {"A": {"env_type": "frozen_lake"}}, **keys}


def test_resuming_takes_a_flag_a_folder_or_a_url():
    for value, kept in ((True, True), ("/a/step-000002", Path("/a/step-000002")), ("s3://b/run", "s3://b/run")):
        config = validate_tree(tree(resume_from_checkpoint=value))
        assert config.resume_from_checkpoint == kept
        again = LearnerRunConfig.model_validate_json(config.model_dump_json(), extra="ignore")
        assert again.resume_from_checkpoint == kept
    with pytest.raises(ConfigError, match="come from the environment"):
        validate_tree(tree(resume_from_checkpoint="s3://key:secret@b/run"))


def test_relative_places_are_the_callers_and_urls_stay():
    given = tree(resume_from_checkpoint="s3://b/run", checkpoint_config={"output_dir": "copies"})
    resolved = resolve_paths(given, Path("/here"))
    assert resolved["resume_from_checkpoint"] == "s3://b/run"
    assert resolved["checkpoint_config"] == {"output_dir": "/here/copies"}


def test_an_unknown_protocol_is_refused_before_the_start():
    config = validate_tree(tree(checkpoint_config={"output_dir": "s33://b/run"}))
    assert [issue.path for issue in check_settings(config) if "s33" in issue.message] == [
        "checkpoint_config.output_dir"
    ]
