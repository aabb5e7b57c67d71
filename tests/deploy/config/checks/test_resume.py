"""A folder that is no checkpoint is refused before the start, with the one to take instead; keys without effect are not."""

import json
import logging
import tarfile
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.resume import check_resume
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, load_run, read_run, validate_tree
from offbeat.deploy.config.validation import check_in_process
from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.group_layout import write_layout
from offbeat.trainer.training.checkpoint import LEARNER, MANIFEST
from tests.paths import QUICKSTART, ROOT

OLD_RUN = ROOT / "tests" / "integration" / "data" / "run-0.1.tar.xz"


def problem(folder: Path) -> str:
    config = load_run(QUICKSTART).model_copy(update={"resume_from_checkpoint": folder})
    (issue,) = (*check_resume(config), None)[:1]
    assert issue is None or issue.path == "resume_from_checkpoint"
    return issue.message if issue else ""


def save(path: Path, serial: int, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    path.joinpath(LEARNER).write_text(json.dumps({"serial": serial}))
    if complete:
        path.joinpath(MANIFEST).write_text("{}")
    return path


def test_moments_of_another_kind_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    """The engine would end in a KeyError at its first step."""
    state = save(tmp_path / "step-000002", 1) / "state" / "policy"
    state.mkdir(parents=True)
    write_layout(state, TrainingArgs())
    assert problem(tmp_path / "step-000002") == ""
    write_layout(state, TrainingArgs(optim="adamw_8bit"))
    assert problem(tmp_path / "step-000002").endswith("set actor_train.training_args.optim=adamw_8bit")


@pytest.mark.parametrize(
    "names",
    [
        ("step-000004.000001-000001", "step-000002.000001-000002"),  # a run's folder in a store
        ("lake/step-000004.000001-000001", "lake/step-000002.000001-000002"),  # a store
        ("checkpoints/step-000004", "checkpoints/step-000002"),  # a run's folder
    ],
)
def test_a_folder_above_checkpoints_names_the_one_written_last(tmp_path: Path, names: tuple[str, str]):
    older, newer = (save(tmp_path / name, serial) for serial, name in enumerate(names))
    newer.parent.joinpath(MANIFEST).write_text("{}")  # the list of a run's checkpoints
    assert problem(tmp_path).endswith(f"take its newest one, {newer}")
    assert problem(older) == problem(newer) == ""


def test_a_checkpoint_that_is_not_complete_is_refused(tmp_path: Path):
    torn = save(tmp_path / "step-000004", 1, complete=False)
    assert problem(torn) == f"{torn} is not a complete checkpoint ({MANIFEST} missing): it holds none either"
    assert "it holds none" in problem(tmp_path)
    torn.joinpath(LEARNER).unlink()
    assert f"({LEARNER} and {MANIFEST} missing)" in problem(torn)


IDLE = (
    "record_batches=2",
    "weights.url=/elsewhere",
    "actor_train.strategy_args.strategy_config.zero_optimization.stage3_max_live_parameters=1",
    "query_filter_config.FrozenLake={type: mean_filter, filter_args: {threshold_down: 1.0}}",
)


async def test_a_run_that_was_started_with_keys_without_effect_can_be_forked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Builds find more such keys than earlier ones; a new run is refused all of them."""
    with pytest.raises(ConfigError) as refused:
        load_run(QUICKSTART, IDLE)
    idle = [str(issue) for issue in refused.value.issues]
    assert len(idle) == len(IDLE)
    checkpoint = save(tmp_path / "step-000004", 1)
    assert not caplog.records
    config = load_run(QUICKSTART, [*IDLE, f"resume_from_checkpoint={checkpoint}"])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{issue} (accepted, because the run was started with it)" for issue in idle]
    await check_in_process(config)


def test_a_run_that_was_started_with_v_trace_without_its_weight_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A new run is refused it. The same for reproduction."""
    vtrace = ["adv_estimator=gae", "value_targets=vtrace", "old_logprobs=recompute"]
    with pytest.raises(ConfigError) as refused:
        load_run(QUICKSTART, vtrace)
    (issue,) = refused.value.issues
    assert issue.path == "train_infer_correction.is_weight"
    checkpoint = save(tmp_path / "step-000004", 1)
    load_run(QUICKSTART, [*vtrace, f"resume_from_checkpoint={checkpoint}"])
    load_run(QUICKSTART, vtrace, started=True)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{issue} (accepted, because the run was started with it)"
    ] * 2


@pytest.mark.parametrize(
    ("url", "message"),
    [("s4://bucket/x", "fsspec knows no protocol 's4'"), ("file:///tmp/x", ""), ("/tmp/x", ""), ("memory://x", "")],
)
def test_a_store_of_weights_that_is_not_known_is_refused(url: str, message: str):
    """Before the start: an engine that several runs share would meet it first."""
    config = read_run(QUICKSTART, ["weights.transport=fs", f"weights.url={url}"])
    issues = {issue.path: issue.message for issue in check_resume(config)}
    assert message in issues.get("weights.url", "")
    assert bool(message) == bool(issues)


@pytest.mark.parametrize(
    "override",
    ["actor_infer.generating_args.top_p=0.9", "+actor_infer.strategy_args.strategy_config.pipeline_parallel_size=2"],
)
def test_a_run_that_was_started_with_what_sglang_is_refused_is_resumed(override: str, caplog: pytest.LogCaptureFixture):
    """A new run is refused it. The same for reproduction."""
    tree = compose_tree(
        QUICKSTART,
        [
            "actor_infer.strategy_args.strategy_name=sglang",
            "actor_infer.device=cuda",
            "old_logprobs=recompute",
            "~pg_clip",
            override,
        ],
    )
    config = validate_tree(tree)
    new, started = (
        {str(issue) for issue in check_run(config, cores=8, trial=False, started=started)} for started in (False, True)
    )
    (refused,) = new - started
    assert f"{refused} (accepted, because the run was started with it)" in caplog.messages


def test_a_run_of_version_0_1_with_a_key_without_effect_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It has `record_batches: 2`; version 0.2 keeps 16 batches in any case. The same for reproduction."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    config = load_run(tmp_path / "config.yaml", ["resume_from_checkpoint=true"])
    assert config.record_batches == 2
    assert "record_batches: has no effect" in caplog.text
    caplog.clear()
    load_run(tmp_path / "config.yaml", started=True)
    assert "record_batches: has no effect" in caplog.text
    with pytest.raises(ConfigError, match=r"^record_batches: has no effect"):
        load_run(tmp_path / "config.yaml")
