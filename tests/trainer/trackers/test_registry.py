"""Unavailable trackers and invalid arguments are refused before the start, by key, with the valid choices."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.trainer.checks.trackers import check_trackers
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.trackers import registry

NOTEBOOK = "tests.trainer.trackers.notebook:Notebook"


def issues(names: Any, **kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    config = LearnerConfig(track_with=tuple(names), tracker_kwargs=kwargs)
    return [(issue.path, issue.message) for issue in check_trackers(config)]


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _name: True)


def test_single_name_is_a_list_and_flat_kwargs_are_refused_with_a_hint():
    assert LearnerConfig.model_validate_json('{"track_with": "wandb"}').track_with == ("wandb",)
    assert LearnerConfig.model_validate_json('{"track_with": ["wandb", "mlflow"]}').track_with == ("wandb", "mlflow")
    with pytest.raises(ValidationError, match=r"tracker_kwargs.NAME.project"):
        LearnerConfig.model_validate_json('{"track_with": "wandb", "tracker_kwargs": {"project": "agents"}}')


@pytest.mark.parametrize(
    ("names", "kwargs", "path", "says"),
    [
        (["wanbd"], {}, "track_with.0", "did you mean wandb"),
        (["tensorboard", "tensorboard"], {}, "track_with.1", "twice"),
        (["nowhere.at_all:Tracker"], {}, "track_with.0", "can't import 'nowhere.at_all'"),
        (["tests.trainer.trackers.notebook:Gone"], {}, "track_with.0", "from offbeat.trainer.trackers.base.Tracker"),
        (["tests.trainer.trackers.notebook:NoTracker"], {}, "track_with.0", "inherits"),
        (["tests.trainer.trackers.notebook:Half"], {}, "track_with.0", "does not define write"),
        (["wandb"], {"wandb": {"projct": "x"}}, "tracker_kwargs.wandb.projct", "it takes project, entity"),
        (["wandb"], {"wandb": {"api_key": "x"}}, "tracker_kwargs.wandb.api_key", "environment of the learner"),
        (["wandb"], {"wandb": {"mode": "of"}}, "tracker_kwargs.wandb.mode", "'offline'"),
        (["mlflow"], {"mlflow": {"tags": {"a": 1}}}, "tracker_kwargs.mlflow.tags", "string"),
        (["swanlab"], {"swanlab": {"tags": "a"}}, "tracker_kwargs.swanlab.tags", "array"),
        (["trackio"], {"trackio": {"private": 1}}, "tracker_kwargs.trackio.private", "boolean"),
        (["tensorboard"], {"tensorboard": {"log_dir": "s3://b/tb"}}, "tracker_kwargs.tensorboard.log_dir", "a folder"),
        (["stdout"], {"stdout": {"path": "x"}}, "tracker_kwargs.stdout.path", "it takes none"),
        (["stdout"], {"wandb": {}}, "tracker_kwargs.wandb", "track_with does not list wandb"),
        ([NOTEBOOK], {}, f"tracker_kwargs.{NOTEBOOK}.path", "required"),
        ([NOTEBOOK], {NOTEBOOK: {"path": 3}}, f"tracker_kwargs.{NOTEBOOK}.path", "expected a string, got 3"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("all_installed")
def test_invalid_tracker_or_argument_is_refused_by_key(names: Any, kwargs: Any, path: str, says: str):
    [(refused, message)] = issues(names, **kwargs)
    assert refused == path
    assert says in message


@pytest.mark.usefixtures("all_installed")
def test_all_issues_are_reported_at_once():
    reported = issues(["wanbd", "mlflow"], mlflow={"uri": "x", "tags": 1})
    assert [path for path, _ in reported] == ["track_with.0", "tracker_kwargs.mlflow.uri", "tracker_kwargs.mlflow.tags"]


@pytest.mark.parametrize("name", registry.EXTRAS)
def test_missing_package_is_refused_with_the_extra_to_install(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "find_spec", lambda _name: None)
    assert issues([name]) == [("track_with.0", f"{name} is not installed: uv pip install 'offbeat[{name}]'")]


@pytest.mark.usefixtures("all_installed")
def test_documented_trackers_are_accepted():
    own = {NOTEBOOK: {"path": "/tmp/x", "refuses": "loss"}}
    assert not issues([*registry.TRACKERS, NOTEBOOK], wandb={"project": "a", "tags": ["b"]}, **own)


def test_lookup_imports_no_tracker_package():
    code = (
        "import sys; from offbeat.trainer.trackers import registry; registry.find_spec = lambda name: True\n"
        "for name in registry.TRACKERS: registry.arguments(registry.find_tracker(name), {})\n"
        f"print([name for name in (*{registry.EXTRAS}, 'tensorboard', 'torch') if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"
