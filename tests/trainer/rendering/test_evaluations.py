"""Episodes of each evaluation are rendered beside the learner."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from offbeat.deploy.config.loader import load_run
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.rendering.evaluations import EvaluationRenderer, rendered_evaluations
from offbeat.trainer.run import LearnerRun
from tests.paths import QUICKSTART
from tests.waiting import wait_until_sync


def write_evaluation(folder: Path, name: str, tag: str = "FrozenLake", count: int = 12) -> None:
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    rows = [
        {"tag": tag, "seed": 2**31 + i, "reward": 0.0, "metrics": {}, "text": ["s", "o", "Down", "o", "Right"]}
        for i in range(count)
    ]
    (folder / "evaluations" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def learner_run(folder: Path, **settings: object) -> LearnerRun:
    config = load_run(QUICKSTART, [f"output_dir={folder}", *(f"{key}={value}" for key, value in settings.items())])
    return LearnerRun(
        "run", "now", folder, LearnerRunConfig.model_validate_json(config.model_dump_json(), extra="ignore")
    )


def rendered(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))


def test_each_evaluation_is_rendered_by_step_while_the_learner_trains(tmp_path: Path):
    target = tmp_path / "episodes"
    run = learner_run(tmp_path / "run", render_save_dir=target, render_episodes=3)
    write_evaluation(run.output_dir, "before-sampled-0")
    with rendered_evaluations(run):
        wait_until_sync(lambda: rendered(target) == ["step-0/before-sampled.html"], 60.0)
        first = (target / "step-0" / "before-sampled.html").stat().st_mtime_ns
        write_evaluation(run.output_dir, "during-sampled-10")
        wait_until_sync(lambda: len(rendered(target)) == 2, 60.0)
        write_evaluation(run.output_dir, "after-greedy-20")  # rendered at the end
    expected = ["step-0/before-sampled.html", "step-10/during-sampled.html", "step-20/after-greedy.html"]
    assert rendered(target) == expected
    assert (target / "step-0" / "before-sampled.html").stat().st_mtime_ns == first
    assert (target / "step-10" / "during-sampled.html").read_text().count("<article>") == 3
    with Image.open(target / "step-20" / "after-greedy.gif") as image:
        assert image.n_frames >= 3


def test_a_resumed_learner_renders_what_is_missing_only(tmp_path: Path):
    run = learner_run(tmp_path, render_save_dir=tmp_path / "episodes")
    write_evaluation(tmp_path, "during-sampled-10")
    renderer = EvaluationRenderer(run.config.custom_envs, tmp_path / "evaluations", tmp_path / "episodes", 2)
    assert renderer.render_new() == 1
    assert renderer.render_new() == 0
    write_evaluation(tmp_path, "during-sampled-20")
    assert renderer.render_new() == 1


def test_an_evaluation_of_a_later_run_replaces_the_page_of_an_earlier_one(tmp_path: Path):
    run = learner_run(tmp_path)
    write_evaluation(tmp_path, "during-sampled-10", count=1)
    renderer = EvaluationRenderer(run.config.custom_envs, tmp_path / "evaluations", tmp_path / "episodes", 2)
    assert renderer.render_new() == 1
    evaluation, page = tmp_path / "evaluations" / "during-sampled-10.jsonl", tmp_path / "episodes" / "step-10"
    evaluation.write_text(evaluation.read_text().replace(str(2**31), "12345"))
    os.utime(evaluation, (1, 1))  # as restored
    assert renderer.render_new() == 1
    assert "12345" in (page / "during-sampled.html").read_text()
    assert renderer.render_new() == 0


def test_a_copy_of_evaluations_is_not_rendered_again(tmp_path: Path):
    """Whatever its times."""
    run = learner_run(tmp_path)
    write_evaluation(tmp_path, "during-sampled-10", count=1)
    fields = (run.config.custom_envs, tmp_path / "evaluations", tmp_path / "episodes", 2)
    assert EvaluationRenderer(*fields).render_new() == 1
    evaluation = tmp_path / "evaluations" / "during-sampled-10.jsonl"
    later = evaluation.stat().st_mtime + 5
    os.utime(evaluation, (later, later))
    assert EvaluationRenderer(*fields).render_new() == 0


def test_an_evaluation_that_can_not_be_rendered_keeps_no_later_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = learner_run(tmp_path)
    write_evaluation(tmp_path, "during-sampled-10", count=1)
    write_evaluation(tmp_path, "during-sampled-20", count=1)
    damaged = tmp_path / "evaluations" / "during-sampled-10.jsonl"
    damaged.write_text(damaged.read_text()[:-9])
    clock = [100.0]
    renderer = EvaluationRenderer(
        run.config.custom_envs, tmp_path / "evaluations", tmp_path / "episodes", 2, now=lambda: clock[0]
    )
    assert renderer.render_new() == 1
    assert rendered(tmp_path / "episodes") == ["step-20/during-sampled.html"]
    write_evaluation(tmp_path, "during-sampled-10", count=1)
    assert renderer.render_new() == 0, "its next try is later"
    assert caplog.text.count("during-sampled-10.jsonl can't be rendered; trying again in 1 s") == 1
    clock[0] += 2.0
    assert renderer.render_new() == 1


def test_an_env_that_fails_leaves_an_empty_page_and_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = learner_run(tmp_path)
    write_evaluation(tmp_path, "during-sampled-10", tag="Gone", count=1)
    write_evaluation(tmp_path, "during-sampled-20", count=1)
    renderer = EvaluationRenderer(run.config.custom_envs, tmp_path / "evaluations", tmp_path / "episodes", 2)
    assert renderer.render_new() == 2
    assert "rendering seed 2147483648 of Gone failed" in caplog.text
    assert (tmp_path / "episodes" / "step-20" / "during-sampled.html").read_text().count("<article>") == 1


def test_nothing_is_started_by_default(tmp_path: Path):
    with rendered_evaluations(learner_run(tmp_path)):
        assert os.listdir(tmp_path) == []
