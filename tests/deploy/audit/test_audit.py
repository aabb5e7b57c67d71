"""The audit says in words what does not hold, and nothing of what does."""

import json
import math
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner

from offbeat.deploy.audit.audit import Evidence, audit
from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.audit import examine
from offbeat.deploy.cli.report import remake_report
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.run_folder import CLAIM
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.group_ledger import LedgerFile, LifeEvent
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.keys import RunKeys
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import (
    ReconciledLine,
    ResumedLine,
    StepLedger,
    StepLine,
    TrainedGroup,
)
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.copying import replace
from tests.fakes import make_group
from tests.paths import QUICKSTART


def life(*rows: tuple[int, str, str]) -> list[LifeEvent]:
    return [LifeEvent(f"{1000 + i}-0", i + 1, number, event, detail) for i, (number, event, detail) in enumerate(rows)]


def step(number: int, *groups: int, epoch: int = 1, version: int | None = None) -> StepLine:
    oldest = number - 1 if version is None else version
    return StepLine(number, epoch, tuple(TrainedGroup(n, oldest, True) for n in groups), 1.0, False, refilled=())


EVENTS = life(
    (0, "admitted", "0"),
    (1, "admitted", "0"),
    (2, "admitted", "0"),
    (0, "submitted", "0"),
    (2, "submitted", "0"),
    (1, "failed", "step_timeout"),
    (3, "admitted", "1"),
    (3, "submitted", "1"),
    (4, "admitted", "1"),
    (4, "submitted", "1"),
    (4, "dropped", "stale"),
    (5, "admitted", "1"),
    (0, "trained", "2"),
    (2, "trained", "2"),
    (5, "submitted", "1"),
)
JOURNAL = [ResumedLine(0, 1, 0), step(1, 0), step(2, 2), step(3, 3)]
GOOD = Evidence(EVENTS, JOURNAL, {2: ""}, Counters(6, 5, 2, {"stale": 1}, {"step_timeout": 1}, 2), 1, 9)


def test_groups_that_are_refilled_before_their_checkpoint_have_no_event():
    counters = Counters(6, 5, 2, {"stale": 1, "no_signal": 1}, {"step_timeout": 1}, 1, refilled=1)
    assert audit(replace(GOOD, counters=counters)).findings == []


def test_a_step_of_a_build_that_recorded_no_refilled_groups_may_be_repeated():
    earlier = [*JOURNAL[:-1], replace(step(3, 3), refilled=None), ResumedLine(2, 2, 0)]
    found = audit(replace(GOOD, journal=[*earlier, replace(step(3, 3, epoch=2), refilled=(4,))]))
    assert not [each for each in found.findings if "refilled" in each]


def test_a_run_in_order_is_proven_and_each_group_has_its_life():
    found = audit(GOOD)
    assert found.proven, found.findings
    states = {n: (group.state, group.detail, group.step) for n, group in found.groups.items()}
    assert states == {
        0: ("trained", "2", 1),
        1: ("failed", "step_timeout", None),
        2: ("trained", "2", 2),
        3: ("in the stream", "", 3),
        4: ("dropped", "stale", None),
        5: ("in the stream", "", None),
    }
    assert found.staleness == {0: 3}


def without(number: int, event: str) -> list[LifeEvent]:
    kept = [each for each in EVENTS if (each.number, each.event) != (number, event)]
    return [replace(each, ordinal=i + 1) for i, each in enumerate(kept)]


def more(*rows: tuple[int, str, str]) -> list[LifeEvent]:
    return life(*((each.number, each.event, each.detail) for each in EVENTS), *rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"events": EVENTS[:4] + EVENTS[5:]}, "event 5 before 1005-0 are missing"),
        ({"events": more((1, "dropped", "stale"))}, "group 1 was dropped at 1015-0 after it had been failed"),
        ({"events": more((0, "trained", "3"))}, "group 0 was trained at 1015-0 after it had been trained (2)"),
        ({"events": more((2, "submitted", "0"))}, "group 2 was submitted at 1015-0 after it had been trained"),
        ({"events": more((5, "admitted", "0"))}, "group 5 was admitted twice"),
        ({"events": more((9, "admitted", "0"))}, "groups 6, 7, 8 were never admitted, though group 9 was"),
        ({"events": without(0, "submitted")}, "group 0 was trained, though it never entered the stream"),
        ({"events": without(2, "trained")}, "Redis counts 2 groups as trained, the ledger lists 1"),
        ({"events": more((5, "trained", "2"))}, "group 5 was acknowledged as trained, but in no step"),
        ({"events": more((3, "trained", "2"))}, "group 3 of step 3 was acknowledged by the checkpoint of step 2 before"),
        ({"events": more((3, "dropped", "stale"))}, "group 3 was trained at step 3, and dropped (stale)"),
        ({"journal": [*JOURNAL, step(4, 0)]}, "group 0 was trained twice: at step 1 and at step 4"),
        ({"journal": [*JOURNAL, step(5, 5)]}, "step 5 follows step 3"),
        ({"journal": [*JOURNAL, step(4, 5, 7)]}, "step 4 consumed 2 groups instead of 1"),
        ({"journal": [*JOURNAL, step(4, 5, version=1)]}, "group 5 was trained at step 4 with a lag of 2, above 1"),
        ({"journal": [*JOURNAL, step(4, 5, version=4)]}, "group 5 of step 4 holds tokens of the later version 4"),
        ({"journal": [*JOURNAL, ResumedLine(2, 2, 0), step(3, 5, epoch=2)]}, "step 3 was repeated on groups [5]"),
        ({"journal": [*JOURNAL, ResumedLine(2, 2, 0), replace(step(3, 3, epoch=2), refilled=(4,))]},
         "step 3 was repeated with groups [4] refilled, and had refilled []"),
        ({"journal": [*JOURNAL, ResumedLine(7, 2, 0)]}, "resumed from step 7, but the ledger ends at step 3"),
        ({"checkpoints": {2: "model.safetensors is damaged"}}, "step-000002 can't be used: model.safetensors is damaged"),
        ({"checkpoints": {1: ""}}, "acknowledged for step 2, but the newest whole checkpoint is of step 1"),
        ({"max_steps": 2}, "all 2 steps are trained and saved, but groups 3, 5 are still open"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_said(change: dict, says: str):
    found = audit(replace(GOOD, **change))
    assert any(says in finding for finding in found.findings), found.findings


def test_a_learner_that_repeats_steps_after_a_death_is_in_order():
    again = [*JOURNAL, ResumedLine(2, 2, 0), step(3, 3, epoch=1), step(3, 3, epoch=2)]
    found = audit(replace(GOOD, journal=again))
    assert found.proven, found.findings
    assert (found.lineage.repeated, found.lineage.learners) == (1, 2)
    assert any("had been replaced" in note for note in found.notes)


def test_tokens_of_a_version_that_a_predecessor_published_may_be_trained_by_who_repeats_its_step():
    """The predecessor's lines went with the power; what it had published is in its successor's first line."""
    repeated = [step(1, 0, epoch=2), step(2, 2, epoch=2, version=2), step(3, 3, epoch=2)]
    found = audit(replace(GOOD, journal=[ResumedLine(0, 2, 0, newest_version=2), *repeated]))
    assert not [each for each in found.findings if "later version" in each]
    unknown = audit(replace(GOOD, journal=[ResumedLine(0, 2, 0), *repeated]))
    assert any("group 2 of step 2 holds tokens of the later version 2" in each for each in unknown.findings)


def test_a_step_without_a_bound_may_have_any_lag():
    """As those before a resumption with `stale_policy: drop` of a run with `train`."""
    late = replace(step(4, 5, version=0), max_staleness=math.inf)
    assert audit(replace(GOOD, journal=[*JOURNAL, late])).findings == []


def test_a_redis_that_lost_its_newest_events_is_a_note_not_a_finding():
    lost = [
        *EVENTS[:12],
        LifeEvent("2000-0", 11, 4, "dropped", "stale"),
        *(replace(each, id=f"{2001 + i}-0", ordinal=12 + i) for i, each in enumerate(EVENTS[11:])),
    ]
    found = audit(replace(GOOD, events=lost))
    assert found.proven, found.findings
    assert any("without its newest 2 events" in note for note in found.notes)


def test_a_redis_that_lost_everything_counts_by_the_checkpoint():
    journal = [*JOURNAL, ResumedLine(2, 2, 2), step(3, 2 + 1, epoch=2)]
    events = [LifeEvent("9000-0", 1, 3, "admitted", "2"), LifeEvent("9001-0", 2, 3, "submitted", "2")]
    counters = Counters(3, 3, 2, {}, {}, 1)
    found = audit(replace(GOOD, events=[*EVENTS, *events], journal=journal, counters=counters))
    assert found.proven, found.findings
    assert [found.groups[n].step for n in (0, 2)] == [1, 2]


def test_checkpoints_that_are_gone_leave_their_groups_dropped_as_rewound():
    journal = [*JOURNAL, ResumedLine(1, 2, -1), step(2, 5, epoch=2)]
    counters = Counters(6, 5, 1, {"stale": 1, "rewound": 1}, {"step_timeout": 1}, 2)
    found = audit(replace(GOOD, journal=journal, checkpoints={1: ""}, counters=counters))
    assert found.groups[2].detail == "rewound"
    assert found.findings == []


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a finished run leaves, but for its Redis."""
    small = ["rollout_batch_size=8", "train_env_manager.group_size=8", "train_env_manager.num_env_groups=1"]
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", "max_steps=2", *small])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    ledger, journal = LedgerFile(tmp_path), StepLedger(tmp_path, 1)
    journal.write_resumed(0)
    for n in range(2):
        taken = StepGroups(groups=[make_group(n, version=n)])
        journal.write_step(n + 1, taken, max_staleness=1.0, skipped=False)
    rows = [(n, event, str(n)) for n in range(2) for event in ("admitted", "submitted")]
    ledger.append(life(*rows, (0, "trained", "2"), (1, "trained", "2")))
    CheckpointStore(tmp_path / "checkpoints", 2, 1).save(LearnerState(2, "now"), lambda _: None).result()
    return tmp_path


def test_the_sentence_names_groups_that_failed(run_folder: Path):
    events = [
        LifeEvent("2000-0", 7, 2, "admitted", "1"),
        LifeEvent("2001-0", 8, 2, "failed", "step_error"),
    ]
    LedgerFile(run_folder).append(events)
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert "nothing trained twice. 1 group(s) failed and were not trained on." in answer.output


def test_the_command_proves_a_run_from_its_folder_alone(run_folder: Path):
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert answer.exit_code == 0, answer.output
    assert "PROVEN" in answer.output
    assert "its Redis is gone" in answer.output
    tree = json.loads(CliRunner().invoke(app, ["audit", str(run_folder), "--json"]).output)
    assert (tree["proven"], tree["admitted"], tree["trained"], tree["steps"]) == (True, 2, 2, 2)
    assert [group["step"] for group in tree["groups"]] == [1, 2]
    shown = CliRunner().invoke(app, ["audit", str(run_folder), "--group", "1"]).output
    assert "group 1: admitted at version 1, submitted, consumed by step 2" in shown


def test_a_run_is_audited_on_a_machine_that_could_not_train_it(run_folder: Path):
    file = run_folder / "config.yaml"
    file.write_text(
        file.read_text().replace("device: cpu", "device: cuda").replace("pretrain: tiny", "pretrain: /gone")
    )
    assert examine(run_folder)[0].proven


def test_a_redis_that_does_not_know_the_run_is_said(run_folder: Path, redis_url: str):
    answer = CliRunner().invoke(app, ["audit", str(run_folder), "--redis", redis_url])
    by_variable = CliRunner().invoke(app, ["audit", str(run_folder)], env={"OFFBEAT_REDIS": redis_url})
    assert (by_variable.exit_code, by_variable.output) == (answer.exit_code, answer.output)
    assert answer.exit_code == 0, answer.output
    assert "its Redis has no counters of run" in answer.output


def record_run(redis: Redis, folder: Path) -> None:
    """Record a later run of the fixture's name, whose first group a worker plays."""
    run_id = load_run(QUICKSTART).exp_name
    redis.hset(RunKeys(run_id).record, mapping={"output_dir": str(folder), "created_at": "2.0"})
    redis.xadd(BufferKeys(run_id).life, {"i": 1, "n": 0, "e": "admitted", "d": "0"}, id="9000-0")


@pytest.mark.parametrize("claim", ["", "{} 1.0"])
def test_a_later_run_of_the_same_name_is_not_the_folders(
    run_folder: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory, claim: str
):
    """Its folder was moved aside; it may also be recorded as the later run's, which failed before it claimed it."""
    later = run_folder if claim else tmp_path_factory.mktemp("later")
    if claim:
        (run_folder / CLAIM).write_text(claim.format(load_run(QUICKSTART).exp_name))
    with Redis.from_url(redis_url) as redis:
        record_run(redis, later)
    found, evidence = examine(run_folder, redis_url)
    assert found.proven, found.findings
    assert (len(evidence.events), evidence.counters) == (6, None)
    assert any("its Redis has another run" in note for note in found.notes)


def test_no_report_is_made_of_a_later_run_of_the_same_name(
    run_folder: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
):
    with Redis.from_url(redis_url) as redis:
        record_run(redis, tmp_path_factory.mktemp("later"))
    assert remake_report(str(run_folder), redis_url) == 1
    assert "this Redis has another run" in capsys.readouterr().err
    assert not (run_folder / "report.json").exists()


def test_a_run_whose_folder_was_moved_is_still_known(run_folder: Path, redis_url: str, tmp_path: Path):
    (run_folder / CLAIM).write_text(f"{load_run(QUICKSTART).exp_name} 2.0")
    with Redis.from_url(redis_url) as redis:
        record_run(redis, tmp_path / "former")
    assert len(examine(run_folder, redis_url)[1].events) == 7


def test_brackets_are_printed_as_they_are(run_folder: Path):
    folder = run_folder / "[lake]"
    folder.mkdir()
    for name in ("config.yaml", "ledger", "checkpoints"):
        (run_folder / name).rename(folder / name)
    answer = CliRunner().invoke(app, ["audit", str(folder)])
    assert answer.exit_code == 0, answer.output
    assert "/[lake]" in answer.output


def test_the_command_fails_where_a_checkpoint_was_damaged(run_folder: Path):
    (run_folder / "checkpoints/step-000002/learner.json").write_text("{}")
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert answer.exit_code == 1
    assert "checkpoints/step-000002 can't be used: learner.json is damaged" in answer.output
    assert examine(run_folder)[0].findings


@pytest.mark.parametrize(("run", "says"), [("nowhere", "there is no run in nowhere"), (".", "has no ledger/")])
def test_where_there_is_nothing_to_audit_it_says_so(tmp_path: Path, monkeypatch, run: str, says: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(load_run(QUICKSTART)))
    answer = CliRunner().invoke(app, ["audit", run])
    assert answer.exit_code == 2
    assert says in answer.output


def reconciled(*rows: tuple[int, str, str], since: int) -> list[LifeEvent]:
    """Events of a Redis that came back with the first `since`, and went on."""
    return [
        LifeEvent(f"{2000 + i}-0", since + 1 + i, number, event, detail)
        for i, (number, event, detail) in enumerate(rows)
    ]


LOST_JOURNAL = [
    ResumedLine(0, 1, 0, 1),
    step(1, 0),
    ReconciledLine(1, 1, 2, 2),
    step(2, 2),
    step(3, 3),
    ResumedLine(2, 2, 0, 2),
    step(3, 3, epoch=2),
]


def test_a_redis_that_lost_events_and_was_reconciled_is_proven():
    """Redis had kept the admissions alone; group 2 was held by the learner, group 5 was unknown."""
    after = reconciled(
        (0, "restored", "1:0"),
        (2, "submitted", "0"),
        (0, "reconciled", "2"),
        (3, "admitted", "1"),
        (3, "submitted", "1"),
        (4, "admitted", "1"),
        (4, "dropped", "lost"),
        (2, "trained", "2"),
        since=3,
    )
    events = [*EVENTS, *after]
    evidence = Evidence(events, LOST_JOURNAL, {2: ""}, Counters(5, 2, 2, {"lost": 1}, {}, 2), 1, 9)
    found = audit(evidence)
    assert found.proven, found.findings
    assert [found.groups[number].state for number in range(5)] == [
        "trained",
        "being played",
        "trained",
        "in the stream",
        "dropped",
    ]
    assert any("reconciled as incarnation 2" in note for note in found.notes)
    assert any("1 groups were counted as trained again" in note for note in found.notes)


def test_an_emptied_redis_whose_groups_the_journal_restored_is_proven():
    after = reconciled(
        (0, "restored", "1:0"), (2, "restored", "2:2"), (1, "admitted", "0"), (1, "dropped", "lost"), since=0
    )
    journal = [*JOURNAL, ResumedLine(2, 2, 0, 2), step(3, 7, epoch=2)]
    after += reconciled((3, "admitted", "0"), (3, "dropped", "lost"), since=4)
    after += reconciled(*((n, "admitted", "2") for n in (4, 5, 6, 7)), (7, "submitted", "2"), since=6)
    events = [replace(event, id=f"{2000 + i}-0") for i, event in enumerate(after)]
    found = audit(Evidence([*EVENTS, *events], journal, {2: ""}, Counters(8, 3, 2, {"lost": 2}, {}, 4), 1, 9))
    assert found.proven, found.findings


def test_a_reconciliation_hides_no_violation():
    twice = [*LOST_JOURNAL[:4], step(3, 0)]
    assert any("group 0 was trained twice" in each for each in audit(replace(GOOD, journal=twice)).findings)
    events = [*EVENTS, *reconciled((0, "restored", "1:0"), since=len(EVENTS))]
    assert any(
        "restored" in each and "after it had been trained" in each
        for each in audit(replace(GOOD, events=events)).findings
    )
    unpublished = [*JOURNAL[:3], step(3, 3, version=9)]
    assert any("of the later version 9" in each for each in audit(replace(GOOD, journal=unpublished)).findings)
    changed = [*JOURNAL, ResumedLine(2, 2, 0, 0), step(3, 5, epoch=2)]
    assert any("step 3 was repeated" in each for each in audit(replace(GOOD, journal=changed)).findings)
