"""Settings `sft` and `dpo`: both sides train the same rows with the same settings, and their steps are compared."""

import json
import sys
from pathlib import Path

import pytest

from offbeat.benchmarks.harness.pace import PacedProcess, PacedSideError
from offbeat.benchmarks.learner import LearnerOptions, make_model
from offbeat.benchmarks.peer import data_steps
from offbeat.benchmarks.peer.data_steps import SHAPES, VOCABULARY, side_config, summarize, trl_job, write_rows
from offbeat.benchmarks.peer.data_worker import read_steps
from offbeat.benchmarks.peer.options import PeerError, PeerOptions, parse
from offbeat.benchmarks.peer.trl_worker.data import DataJob

CHILD = """
from offbeat.benchmarks.harness.pace import Pace
pace = Pace("cpu")
pace.ready()
print("a line of a library")
for loss in (3.0, 2.0):
    pace.before()
    pace.after(loss=loss)
raise SystemExit("out of rows")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, LearnerOptions(vocabulary=VOCABULARY + 48))
    return folder


@pytest.mark.parametrize("pipeline", SHAPES)
@pytest.mark.parametrize("lengths", data_steps.LENGTHS)
def test_both_sides_train_the_same_rows(pipeline: str, lengths: str, model: Path, tmp_path: Path) -> None:
    options, shape = PeerOptions(steps=2, threads=1), SHAPES[pipeline]
    write_rows(
        tmp_path / f"{lengths}.jsonl",
        pipeline,
        3 * shape.rows_per_step,
        ragged=lengths == "ragged",
        vocabulary=VOCABULARY,
    )
    config = side_config(options, pipeline, lengths, model, tmp_path, shared=False)
    steps = read_steps(config)
    assert [len(groups) for groups in steps] == [shape.rows_per_step] * 3
    sizes = [len(s.tokens) for groups in steps for g in groups for t in g.trajectories for s in t.segments]
    assert max(sizes) <= shape.sequence_length
    assert (min(sizes) == max(sizes)) == (lengths == "equal")
    assert min(t.num_sampled for groups in steps for g in groups for t in g.trajectories) > 0

    job = trl_job(config, tmp_path, 1)
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    assert (len(rows), job.rows_per_step, job.steps) == (
        3 * shape.rows_per_step,
        config.groups_per_step,
        config.max_steps,
    )
    args = config.actor_train.training_args
    assert (job.learning_rate, job.adam_beta2, job.max_grad_norm) == (
        args.learning_rate,
        args.adam_beta2,
        args.max_grad_norm,
    )
    per_row = config.train_env_manager.group_size
    assert args.max_tokens_per_microbatch == job.rows_per_pass * per_row * job.max_length, "equal passes"
    job.write(tmp_path / "job.json")
    assert DataJob.read(tmp_path / "job.json") == job


def test_rates_leave_out_the_first_step_and_losses_are_compared() -> None:
    def steps(*seconds: float, loss: float) -> list[dict[str, float]]:
        return [{"seconds": s, "bytes": 1 << 20, "loss": loss} for s in seconds]

    result = summarize({"offbeat": steps(9, 1, 1, loss=0.5), "trl": steps(1, 2, 4, loss=0.6)}, [100, 100, 100])
    ours, theirs = result["sides"]["offbeat"], result["sides"]["trl"]
    assert (ours["tokens_per_s"].median, ours["ratio"], ours["peak_mib"]) == (100.0, 3.0, 1.0)
    assert (theirs["ratio"], theirs["loss_difference"]) == (1.0, 0.0)
    assert ours["loss_difference"] == pytest.approx(0.1)


def test_a_childs_steps_are_read_and_its_end_is_reported(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with PacedProcess("side", [sys.executable, "-c", CHILD], tmp_path, environment) as side:
        side.wait_until_ready()
        assert [side.step()["loss"] for _ in range(2)] == [3.0, 2.0]
        with pytest.raises(PacedSideError, match="side ended early \\(1\\): out of rows"):
            side.step()


def test_settings_of_rows_are_settings_of_the_command() -> None:
    assert parse(settings="sft,dpo", seeds="1", sides="offbeat,trl", venv=None).settings == ("sft", "dpo")
    with pytest.raises(PeerError, match="there is no 'kto', there is a, b, c, d, sft, dpo"):
        parse(settings="kto", seeds="1", sides="trl", venv=None)
