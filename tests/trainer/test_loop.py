"""The learner's loop: order of its stages, and what survives a death at any moment."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.lineage import trace
from services.errors import ControlError, FencedError
from services.rollout.tasks import make_sampler
from services.telemetry import Partial
from tests.fakes import (
    CrashError,
    DictBoard,
    DictLog,
    FakeLearnerBuffer,
    FakePublisher,
    FakeTrainer,
    ListSink,
    Moments,
    make_group,
    make_trajectory,
)
from trainer.algorithms.aggregation import Silent
from trainer.checkpoint import CheckpointStore
from trainer.curriculum import Curriculum
from trainer.evaluations import Evaluations
from trainer.intake import Intake
from trainer.journal import StepJournal, StepLine, read_journal
from trainer.loop import Learner, Parts
from trainer.replay import Replay
from trainer.reporting import Reporter
from trainer.run import LearnerRun, LearnerRunConfig
from trainer.staleness import StalenessController

GROUPS_PER_STEP = 2


def learner_config(**settings: object) -> LearnerRunConfig:
    tree: dict[str, object] = {
        "max_steps": 6,
        "save_steps": 3,
        "eval_steps": 0,
        "rollout_batch_size": 2 * GROUPS_PER_STEP,
        "custom_envs": {},
        "train_env_manager": {"group_size": 2},
        "val_batch_size": 2,
        "final_val_batch_size": 0,
        "actor_infer": {},
        "buffer": {},
        "weights": {},
        "max_staleness": 100.0,
    }
    return LearnerRunConfig.model_validate(tree | settings)


@dataclass
class World:
    """What outlives a learner: Redis, the disk, and the players that fill the stream."""

    folder: Path
    config: LearnerRunConfig = field(default_factory=learner_config)
    buffer: FakeLearnerBuffer = field(default_factory=FakeLearnerBuffer)
    publisher: FakePublisher = field(default_factory=FakePublisher)
    log: DictLog = field(default_factory=DictLog)
    sink: ListSink = field(default_factory=ListSink)
    board: DictBoard = field(default_factory=DictBoard)
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        numbers = itertools.count()
        self.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers)))

    def learner(
        self, moments: Moments | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[Learner, FakeTrainer]:
        """A fresh learner process that goes on where the last one's checkpoint stands."""
        moments = moments or Moments()
        self.buffer.moments = self.publisher.moments = moments
        self.buffer.reconnect()
        trainer = FakeTrainer(moments)
        checkpoints = CheckpointStore(self.folder / "checkpoints", keep=2)
        parts = Parts(
            buffer=self.buffer,
            publisher=self.publisher,
            trainer=trainer,
            checkpoints=checkpoints,
            evaluations=Evaluations(self.buffer, self.sink, self.log, self.folder / "evaluations"),
            intake=Intake(self.buffer, self.config, GROUPS_PER_STEP, self.config.max_staleness, False, 11),
            reporter=Reporter(self.sink, self.board),
            journal=StepJournal(self.folder, next(self.epochs)),
            replay=Replay(self.config.replay, GROUPS_PER_STEP, self.config.seed),
            staleness=StalenessController(
                self.config.staleness_controller,
                self.buffer,
                groups_per_step=GROUPS_PER_STEP,
                num_env_groups=self.config.train_env_manager.num_env_groups,
            ),
            curriculum=Curriculum(make_sampler(self.config.custom_envs, self.config.train_env_manager), self.buffer),
            stopped=stopped,
        )
        learner = Learner(LearnerRun("run", "now", self.folder, self.config), parts)
        newest = checkpoints.newest_complete("now")
        if newest is not None:
            learner.resume(newest)
        return learner, trainer


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_each_group_is_trained_once_in_stream_order_and_each_step_published(world: World) -> None:
    learner, trainer = world.learner()
    assert learner.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    assert list(world.publisher.versions) == list(range(7))
    assert world.buffer.trained == list(range(12))
    assert world.board.fields["learner_phase"] == "finished"
    assert world.board.fields["learner_step"] == "6"


def test_old_groups_join_batches_and_are_accounted_for_once(world: World) -> None:
    world.config = learner_config(replay={"samples_per_insert": 2.0, "max_times_sampled": 2, "sampler": "fifo"})
    learner, trainer = world.learner()
    assert learner.run()
    fresh = [(2 * step, 2 * step + 1) for step in range(6)]
    assert trainer.history == [(0, fresh[0]), *((step, fresh[step] + fresh[step - 1]) for step in range(1, 6))]
    assert world.buffer.trained == list(range(12))
    lines = [line for line in read_journal(world.folder)[0] if isinstance(line, StepLine)]
    assert [[group.number for group in line.groups] for line in lines] == [list(pair) for pair in fresh]
    assert [
        record.values["groups_again"].total for record in world.sink.records if "groups_again" in record.values
    ] == [2] * 5


def test_groups_are_acknowledged_only_after_the_checkpoint_that_contains_them(world: World) -> None:
    moments = Moments()
    learner, _ = world.learner(moments)
    learner.run()
    order = [name for name in moments.names if name.startswith(("save", "ack", "train"))]
    assert order == [
        *("train 0", "train 1", "train 2", "save", "train 3", "ack 3"),
        *("train 4", "train 5", "save", "ack 6"),
    ]


def test_the_new_version_is_published_before_anything_else_is_done(world: World) -> None:
    moments = Moments()
    learner, _ = world.learner(moments)
    learner.run()
    names = moments.names
    for step in range(6):
        assert names[names.index(f"train {step}") + 1] == f"publish {step + 1}"


REPLAY = {"samples_per_insert": 2.5, "max_times_sampled": 3}
CURRICULUM = {
    "custom_envs": {name: {"env_type": "frozen_lake"} for name in ("tag", "hard")},
    "train_env_manager": {"group_size": 2, "task_sampler": {"path": "envs.curricula:Levels", "args": {"window": 100}}},
}


@settings(max_examples=60, deadline=None)
@given(
    crashes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    replay=st.sampled_from([{}, REPLAY, REPLAY | {"sampler": "prioritized"}]),
)
def test_a_learner_killed_at_any_moments_leaves_the_weights_of_one_that_was_not(
    crashes: list[tuple[int, bool]], replay: dict[str, object]
) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        undisturbed = World(Path(one), learner_config(replay=replay, **CURRICULUM))
        learner, expected = undisturbed.learner()
        learner.run()
        world = World(Path(two), learner_config(replay=replay, **CURRICULUM))
        for crash_at, after in crashes:
            learner, trainer = _run_until_it_dies(world, Moments(crash_at, after))
        learner, trainer = world.learner()
        assert learner.run()
    assert trainer.history == expected.history
    assert world.publisher.versions == undisturbed.publisher.versions
    assert world.buffer.trained == list(range(12))
    assert not world.buffer.dropped
    assert world.buffer.taught[-1] == undisturbed.buffer.taught[-1]
    assert len(json.loads(world.buffer.taught[-1])["seen"]) == 12


def _run_until_it_dies(world: World, moments: Moments) -> tuple[Learner | None, FakeTrainer | None]:
    try:
        learner, trainer = world.learner(moments)
        learner.run()
    except CrashError:
        return None, None
    return learner, trainer


def test_a_stopped_learner_leaves_a_checkpoint_of_its_last_whole_step(world: World) -> None:
    learner, trainer = world.learner(stopped=lambda: len(trainer.history) >= 2)
    assert not learner.run()
    assert world.buffer.trained == [0, 1, 2, 3]
    resumed, again = world.learner()
    assert resumed.run()
    assert again.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]


def test_a_learner_stopped_before_its_first_step_writes_nothing(world: World) -> None:
    learner, _ = world.learner(stopped=lambda: True)
    assert not learner.run()
    assert not (world.folder / "checkpoints").exists()


def test_a_fenced_learner_neither_saves_nor_acknowledges(world: World) -> None:
    learner, _ = world.learner()

    def refuse(*_: object) -> None:
        raise FencedError("a newer learner holds the run")

    world.publisher.publish = refuse
    with pytest.raises(FencedError):
        learner.run()
    assert not world.buffer.trained
    assert not (world.folder / "checkpoints").exists()


def test_resuming_makes_the_ledger_agree_with_the_checkpoint(world: World) -> None:
    learner, trainer = world.learner(stopped=lambda: len(trainer.history) >= 3)
    learner.run()
    world.learner()
    assert world.buffer.restored == [(3 * GROUPS_PER_STEP, 6)]


def test_a_step_without_signal_leaves_its_mark_but_no_gradient(tmp_path: Path) -> None:
    world = World(tmp_path)
    numbers = itertools.count()
    world.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers), rewards=(1.0, 1.0)))
    learner, trainer = world.learner()
    assert learner.run()
    assert trainer.history == [(step, ()) for step in range(6)]
    assert trainer.silent == [Silent(tokens=16, sequences=4)] * 6
    assert list(world.publisher.versions) == list(range(7))
    assert world.buffer.trained == list(range(12))
    assert all(record.values["groups_without_signal"].total == GROUPS_PER_STEP for record in world.sink.of("learner"))


def test_records_tell_what_each_step_consumed(world: World) -> None:
    learner, _ = world.learner()
    learner.run()
    records = world.sink.of("learner")
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    last = records[-1].values
    assert last["success"] == Partial("mean", 2.0, 4.0)
    assert last["reward"] == Partial("mean", 2.0, 4.0)
    assert (last["staleness"].value, last["staleness_max"].value) == (5.0, 5.0)
    assert last["tokens_trained"] == Partial("sum", 10.0)
    assert last["trajectories"] == Partial("sum", 4.0)
    assert {"time/wait_s", "time/train_s", "time/publish_s", "time/step_s"} <= last.keys()


def test_a_value_that_is_not_finite_is_counted_and_left_out(world: World) -> None:
    learner, trainer = world.learner()
    trainer.gauges = {"actor/total_loss": Partial("mean", float("nan")), "actor/skipped_steps": Partial("sum", 1.0)}
    with pytest.raises(ControlError, match="5 steps in a row was not finite, up to step 5"):
        learner.run()
    values = world.sink.of("learner")[0].values
    assert "actor/total_loss" not in values
    assert values["not_finite"].total == 1.0
    assert values["actor/skipped_steps"].total == 1.0
    lines, _ = read_journal(world.folder)
    assert [line.skipped for line in lines if isinstance(line, StepLine)] == [True] * 5


def test_the_journal_holds_every_step_of_every_life_and_its_groups(world: World) -> None:
    _run_until_it_dies(world, Moments(crash_at=15))
    learner, trainer = world.learner()
    assert learner.run()
    lines, broken = read_journal(world.folder)
    lineage = trace(lines)
    assert (broken, lineage.findings, lineage.learners, lineage.last) == (0, [], 2, 6)
    assert lineage.repeated > 0
    assert [(line.step - 1, tuple(g.number for g in line.groups)) for line in lineage.steps] == trainer.history


def evaluating(world: World, *, done: bool = True) -> None:
    """Players that finish each evaluation as soon as the learner looks for more."""
    fill = world.buffer.on_empty
    assert fill is not None

    def play(buffer: FakeLearnerBuffer) -> None:
        fill(buffer)
        for eval_id, count, *_ in buffer.started:
            if done and buffer.evaluations.get(eval_id, ()) is None:
                buffer.evaluations[eval_id] = [make_trajectory(i, reward=i % 2) for i in range(count)]

    world.buffer.on_empty = play


def test_evaluations_come_before_during_and_after_training(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2, final_val_batch_size=4))
    evaluating(world)
    learner, _ = world.learner()
    assert learner.run()
    found = [(r.labels["when"], r.labels["sampling"], r.step, r.values["success"].value) for r in world.sink.of("eval")]
    assert found == [
        ("before", "sampled", 0, 0.5),
        ("before", "greedy", 0, 0.5),
        ("during", "sampled", 2, 0.5),
        ("during", "sampled", 4, 0.5),
        ("after", "sampled", 6, 0.5),
        ("after", "greedy", 6, 0.5),
    ]
    assert not world.buffer.evaluations
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir())[0] == "after-greedy-6.jsonl"


def test_the_first_weights_stay_while_they_are_evaluated(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(final_val_batch_size=4))
    evaluating(world, done=False)
    polls = itertools.count()
    learner, trainer = world.learner(stopped=lambda: next(polls) > 20)
    assert not learner.run()
    assert list(world.publisher.versions) == [0]
    assert not trainer.history


def test_an_evaluation_during_training_does_not_stop_it(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2))
    learner, trainer = world.learner(stopped=lambda: len(trainer.history) == 6)
    learner.run()
    assert len(trainer.history) == 6
    assert [eval_id for eval_id, *_ in world.buffer.started] == ["during-sampled-2", "during-sampled-4"]
    assert not world.sink.of("eval")


def test_a_replaced_learner_collects_what_the_last_one_had_queued_and_repeats_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2))
    with pytest.raises(CrashError):
        world.learner(Moments(crash_at=8))[0].run()
    assert world.log.states == {"during-sampled-2": "2"}
    evaluating(world)
    learner, _ = world.learner()
    assert learner.run()
    assert [record.step for record in world.sink.of("eval")] == [2, 4]
    assert set(world.log.states.values()) == {"recorded"}


def test_a_run_that_is_resumed_after_its_last_step_only_evaluates(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.learner()[0].run()
    world.config = learner_config(final_val_batch_size=2)
    evaluating(world)
    learner, trainer = world.learner()
    before = list(trainer.history)
    assert learner.run()
    assert trainer.history == before
    assert [record.labels["when"] for record in world.sink.of("eval")] == ["after", "after"]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.saving.RETRY_S", 0.0)


def full_disk(world: World, full: Callable[[], bool]) -> tuple[Learner, FakeTrainer]:
    learner, trainer = world.learner(stopped=lambda: False)
    write = trainer.save

    def save(folder: Path) -> None:
        (folder / "half.bin").write_text("half of the weights")
        if full():
            raise OSError(28, "No space left on device")
        (folder / "half.bin").unlink()
        write(folder)

    trainer.save = save
    return learner, trainer


@pytest.mark.usefixtures("no_waiting")
def test_training_goes_on_without_room_for_a_checkpoint_and_the_next_one_contains_everything(world: World) -> None:
    seen: list[tuple[int, list[int], list[str]]] = []

    def full() -> bool:
        steps = [path.name for path in (world.folder / "checkpoints").glob("step-*")]
        seen.append((len(trainer.history), list(world.buffer.trained), steps))
        return len(trainer.history) in (3, 4)

    learner, trainer = full_disk(world, full)
    assert learner.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    # Step 3's and its retry at step 4 fail: nothing is acknowledged, nothing half-written gets a name
    assert seen[:3] == [(3, [], []), (4, [], []), (5, [], [])]
    assert world.buffer.trained == list(range(12))
    assert sorted(path.name for path in (world.folder / "checkpoints").iterdir()) == ["step-000005", "step-000006"]
    assert world.board.fields["learner_trouble"] == ""
    assert (
        sum(r.values["checkpoints_failed"].total for r in world.sink.records if "checkpoints_failed" in r.values) == 2
    )


@pytest.mark.usefixtures("no_waiting")
def test_a_checkpoint_that_fails_leaves_the_one_before_it_whole_and_a_new_learner_goes_on_from_that(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, learner_config(save_steps=2))
    learner, trainer = full_disk(world, lambda: len(trainer.history) > 3)
    world.publisher.moments = Moments(crash_at=6)
    with pytest.raises(CrashError):
        learner.run()
    assert world.buffer.trained == list(range(4))
    assert "step 4 could not be written ([Errno 28]" in world.board.fields["learner_trouble"]
    assert "the newest whole one is of step 2" in world.board.fields["learner_trouble"]
    again, trainer = world.learner()
    assert again.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    assert world.buffer.trained == list(range(12))


@pytest.mark.usefixtures("no_waiting")
def test_a_learner_that_may_be_far_ahead_of_its_checkpoint_no_longer_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.saving.UNSAVED_INTERVALS", 2)
    world = World(tmp_path, learner_config(save_steps=1))
    waits = itertools.count()
    learner, trainer = full_disk(world, lambda: bool(trainer.history) and next(waits) < 6)
    steps: list[int] = []
    monkeypatch.setattr("trainer.saving.time.sleep", lambda _: steps.append(len(trainer.history)))
    assert learner.run()
    assert steps
    assert set(steps) == {2}
    assert world.buffer.trained == list(range(12))


@pytest.mark.usefixtures("no_waiting")
def test_a_stop_is_not_held_up_by_a_full_disk(world: World) -> None:
    learner, trainer = full_disk(world, lambda: True)
    learner._parts = replace(learner._parts, stopped=lambda: len(trainer.history) >= 2)
    assert not learner.run()
    assert world.buffer.trained == []
    assert world.learner()[0].run()
    assert world.buffer.trained == list(range(12))
