"""The chain that `why` shows, in every state that a run can be in."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from offbeat.services.buffer.api import (
    Admission,
    Counters,
    GroupProgress,
    Snapshot,
    WorkerState,
)
from offbeat.services.control.causes import Cause, RunSnapshot
from offbeat.services.control.explain import chain, sentence
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import LearnerReport, RunRecord, RunState
from offbeat.services.weights.replica_reports import FetchState, ReplicaLoad, ReplicaReport
from tests.copying import replace
from tests.services.control.control_fakes import SETTINGS

NOW = 1000.0
READY = {name: Observation(Health.READY) for name in ("learner", "env-workers", "generation")}
BUFFER = Snapshot(
    counters=Counters(9, 3, 3, {}, {}, 6),
    playing=2,
    ready=0,
    consumed=1,
    queued_train=0,
    queued_eval=0,
    quarantined=0,
    step=11,
    epoch=1,
    admission=Admission.OPEN,
    workers=(WorkerState("w0", 0.1, 6), WorkerState("w1", 0.1, 2)),
)
GROUPS = (GroupProgress(40, 8, 2, 0, 6, 0, 11), GroupProgress(41, 8, 5, 0, 3, 0, 11))


def report(groups: Mapping[str, Any], at: float = NOW - 0.2, **evaluations: Any) -> dict[str, Any]:
    return {"at": at, "groups": groups, "evaluations": evaluations}


def snapshot(state: RunState = RunState.RUNNING, **changes: Any) -> RunSnapshot:
    """A learner that waits for groups of step 13, with two groups being played and one replica that samples."""
    values: dict[str, Any] = {
        "now": NOW,
        "record": RunRecord("lake", "{}", "/x", 100, SETTINGS, state=state, draining_at=NOW - 2),
        "observations": READY,
        "learner": LearnerReport("training", {"stage": "taking", "step": 12, "since": NOW - 1.5, "groups": 2}),
        "buffer": BUFFER,
        "groups": GROUPS,
        "workers": {
            "w0": report({"41": {"generation": [3, NOW - 0.5]}}),
            "w1": report({"40": {"env": [1, NOW - 0.1]}}),
        },
        "replicas": {"r0": ReplicaReport(12, NOW - 0.3, ReplicaLoad(running=9))},
        "version": 12,
    }
    return RunSnapshot(**(values | changes))


def links_of(links: Sequence[Cause]) -> list[tuple[str, str, str | None]]:
    return [(link.component, link.state, link.waits_for) for link in links]


def test_the_chain_leads_from_the_learner_to_a_loading_replica():
    """The learner waits for a group, whose episodes wait for a replica that loads weights."""
    loading = ReplicaReport(11, NOW - 0.3, ReplicaLoad(9, 9, loading=12, loading_since=NOW - 0.4))
    links = chain(snapshot(replicas={"r0": loading}))
    assert links_of(links) == [
        ("learner", "waits", "group 41"),
        ("group 41", "playing", "episodes"),
        ("episodes", "waits", "generation"),
        ("generation", "loads", None),
    ]
    assert sentence(links) == (
        "The learner waits for group 41 since 1.5 s; 3 of its 8 episodes are still running; they wait for generation; "
        "whose replica is loading version 12 since 0.4 s."
    )


def test_a_complete_group_waits_for_the_rewards_that_compare_it():
    groups = (GroupProgress(41, 8, 8, 0, 0, 0, 11, is_scoring=True),)
    links = chain(snapshot(groups=groups, workers={"w0": report({"41": {"reward": [1, NOW - 9.0]}})}))
    assert links_of(links) == [("learner", "waits", "group 41"), ("group 41", "scoring", "rewards")]
    assert links[-1].text == ("all 8 of its episodes are there, and not yet the rewards that compare them since 9.0 s")


def test_a_complete_group_whose_rewards_no_worker_computes_waits_for_the_workers():
    groups = (GroupProgress(41, 8, 8, 0, 0, 0, 11, is_scoring=True),)
    links = chain(snapshot(groups=groups, workers={}))
    assert links_of(links) == [
        ("learner", "waits", "group 41"),
        ("group 41", "scoring", "env workers"),
        ("env workers", "busy", None),
    ]


def test_each_link_waits_for_the_next():
    for replicas in ({}, {"r0": ReplicaReport(12, NOW)}, {"r0": ReplicaReport(11, NOW, ReplicaLoad(3, 3))}):
        links = chain(snapshot(replicas=replicas))
        for link, following in pairwise(links):
            assert link.waits_for == following.component
        assert links[-1].waits_for is None


@pytest.mark.parametrize(
    ("replicas", "ends"),
    [
        ({"r0": ReplicaReport(12, NOW, ReplicaLoad(7))}, "which samples 7 request(s) under version 12."),
        ({"r0": ReplicaReport(11, NOW, ReplicaLoad(7, 7))}, "which serves version 11 and fetches version 12."),
        ({"r0": ReplicaReport(12, NOW - 60)}, "no replica of which answers (starting, a replica is being replaced)."),
        ({}, "no replica of which answers (starting, a replica is being replaced)."),
    ],
)
def test_what_generation_does_is_reported(replicas: dict[str, ReplicaReport], ends: str):
    seen = READY | {"generation": Observation(Health.STARTING, "a replica is being replaced")}
    assert sentence(chain(snapshot(replicas=replicas, observations=seen))).endswith(ends)


@pytest.mark.parametrize(("version", "serves"), [(11, "version 11"), (-1, "nothing yet")])
def test_a_replica_whose_share_hangs_is_reported_though_it_samples(version: int, serves: str):
    hangs = ReplicaReport(version, NOW - 0.3, ReplicaLoad(7), fetching=FetchState(12, NOW - 95.0, "fs:/nfs/weights"))
    told_of = f"; but replica r0 serves {serves} and has been fetching version 12 for 95 s from fs:/nfs/weights: "
    told_of += "the share may hang"
    assert sentence(chain(snapshot(replicas={"r0": hangs}))).endswith(f"{told_of}.")
    missing = {"generation": Observation(Health.STARTING)}
    starting = snapshot(RunState.STARTING, replicas={"r0": hangs}, observations=missing)
    assert sentence(chain(starting)).endswith(f"{told_of}.")


@pytest.mark.parametrize(
    "calm",
    [
        ReplicaReport(11, NOW - 0.3, fetching=FetchState(12, NOW - 3.0, "fs:/nfs/weights")),
        ReplicaReport(11, NOW - 60, fetching=FetchState(12, NOW - 95.0, "fs:/nfs/weights")),
    ],
    ids=["it has only begun", "it has been silent since"],
)
def test_a_fetch_is_not_said_to_hang_before_it_does(calm: ReplicaReport):
    assert "may hang" not in sentence(chain(snapshot(replicas={"r0": calm})))


def test_episodes_wait_for_what_the_longest_of_them_waits_for():
    links = chain(snapshot(workers={"w0": report({"41": {"env": [1, NOW - 9.0], "generation": [2, NOW - 0.1]}})}))
    assert links[-1].text == "1 of them waits for their env to answer since 9.0 s"
    assert links[-1].detail == {"env": 1, "generation": 2}


def test_in_order_of_admission_the_learner_waits_for_the_oldest_group():
    """It holds back complete groups of higher numbers, however many there are."""
    record = RunRecord("lake", '{"buffer": {"order": "admission"}}', "/x", 100, SETTINGS, state=RunState.RUNNING)
    said = sentence(chain(snapshot(record=record)))
    assert said.startswith("The learner waits for group 40 since 1.5 s; 6 of its 8 episodes are still running; ")
    assert "for their env" in said


def test_one_episode_is_spoken_of_as_one_and_never_as_more_than_there_are():
    groups = (GroupProgress(41, 8, 7, 0, 1, 0, 11),)
    said = sentence(chain(snapshot(groups=groups)))
    assert "1 of its 8 episodes is still running; it waits for generation" in said
    said = sentence(chain(snapshot(workers={"w0": report({"41": {"env": [5, NOW - 2.0]}})})))
    assert "3 of its 8 episodes are still running; they wait for their env to answer since 2.0 s" in said


def test_an_agent_that_thinks_is_distinguished_from_its_env():
    scored = chain(snapshot(workers={"w0": report({"41": {"reward": [3, NOW - 4.0]}})}))
    assert (scored[-1].waits_for, scored[-1].text.endswith("for their rewards since 4.0 s")) == ("reward", True)
    links = chain(snapshot(workers={"w0": report({"41": {"agent": [3, NOW - 4.0], "env": [1, NOW - 0.1]}})}))
    assert links[-1].waits_for == "agent"
    assert "3 of its 8 episodes are still running; they wait for their agent to continue since 4.0 s" in sentence(links)


def test_a_worker_that_computes_all_the_time_is_named_with_the_key():
    busy = {"cpu": 0.97, **report({"41": {"generation": [3, NOW - 0.5]}})}
    links = chain(snapshot(workers={"w0": busy, "w1": {**report({}), "cpu": 0.4}}))
    assert (links[-1].component, links[-1].detail) == ("env workers", {"w0": 0.97})
    assert links[-1].text == (
        "env worker w0 takes 0.97 of a core, on which the Python code of all its episodes runs: "
        "add workers (rollout.num_workers)"
    )
    both = chain(snapshot(workers={"w0": busy, "w1": {**busy, "cpu": 1.04}}))
    assert "2 env workers take up to 1.04 of a core, on which the Python code of all their episodes" in both[-1].text
    old = chain(snapshot(workers={"w0": {**busy, "at": NOW - 60}, "w1": report({"41": {"env": [3, NOW - 0.5]}})}))
    assert "of a core" not in sentence(old)


def test_a_worker_that_is_silent_is_not_believed():
    silent = replace(BUFFER, workers=(WorkerState("w0", 12.0, 8),))
    links = chain(snapshot(buffer=silent, workers={"w0": report({"41": {"env": [3, NOW - 20]}}, at=NOW - 12)}))
    assert links[-1].text == "their env worker has been silent for 12 s"


def test_queued_episodes_wait_for_the_workers():
    groups = (GroupProgress(41, 8, 5, 0, 0, 3, 11),)
    assert [link.text for link in chain(snapshot(groups=groups))][1:] == [
        "3 of its 8 episodes are not claimed yet",
        "2 env worker(s) run 8 episodes and claim more as slots become free",
    ]
    gone = chain(snapshot(groups=groups, buffer=replace(BUFFER, workers=())))
    assert gone[-1].text == "no env worker is there (ready)"


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        ({"stage": "train", "step": 12, "since": NOW - 0.7}, "the learner trains step 13 since 0.7 s"),
        ({"stage": "publish", "step": 12, "since": NOW}, "the learner publishes version 12 out"),
        (
            {"stage": "checkpoint", "step": 12, "since": NOW - 3},
            "the learner saves a checkpoint of step 12 since 3.0 s",
        ),
    ],
)
def test_a_busy_learner_keeps_rollouts_waiting_at_the_staleness_bound(doing: dict[str, Any], says: str):
    learner = LearnerReport("training", doing)
    assert [link.text for link in chain(snapshot(learner=learner))] == [says]
    idle = replace(BUFFER, admission=Admission.STALENESS_BOUND, workers=(WorkerState("w0", 0.1, 0),))
    links = chain(snapshot(learner=learner, buffer=idle))
    assert links_of(links)[0] == ("env workers", "waits", "learner")
    assert links[1].text == says


def test_a_wait_for_scores_names_the_services_and_what_ails_them():
    doing = {"stage": "scoring", "step": 12, "since": NOW - 3, "group": 41, "roles": "reference,teacher.math"}
    observations = {
        **READY,
        "reference": Observation(Health.READY),
        "teacher.math": Observation(Health.DEAD, "killed by SIGKILL", "logs/scorer-lake-teacher.math-0.log"),
    }
    links = chain(snapshot(learner=LearnerReport("training", doing), observations=observations))
    assert sentence(links) == (
        "The learner waits for reference and teacher.math to score group 41 since 3.0 s; teacher.math is dead (killed by "
        "SIGKILL)."
    )


def test_a_run_without_a_learner_says_how_to_attach_one():
    absent = READY | {"learner": Observation(Health.ABSENT, "waits for `offbeat learner attach lake`")}
    idle = replace(BUFFER, admission=Admission.STALENESS_BOUND, workers=(), ready=4)
    assert sentence(chain(snapshot(observations=absent, buffer=idle))) == (
        "The env workers wait for the learner: they are as far ahead as max_staleness allows; no learner trains it "
        "(waits for `offbeat learner attach lake`), and 5 complete groups wait for one."
    )


def test_a_dead_learner_is_being_replaced():
    dead = READY | {"learner": Observation(Health.DEAD, "killed by SIGKILL")}
    assert (
        sentence(chain(snapshot(observations=dead))) == "The learner is dead (killed by SIGKILL) and is being replaced."
    )


def test_reports_of_a_dead_learner_are_not_those_of_the_one_that_starts():
    learner = LearnerReport("training", {"stage": "train", "step": 12, "since": NOW - 30})
    assert chain(snapshot(learner=learner, leased=False))[-1].state == "starting"


@pytest.mark.parametrize(
    ("admission", "says"),
    [
        (Admission.NO_WEIGHTS, "no group is running: no weights are published yet"),
        (Admission.ALL_ADMITTED, "no group is running: all groups of the run were admitted"),
        (
            Admission.STALENESS_BOUND,
            "no group is running: the staleness bound admits none before the next version is published",
        ),
        (Admission.OPEN, "no group is running yet: 2 env worker(s) run 8 episodes and claim more as slots become free"),
    ],
)
def test_the_reason_why_no_group_is_running(admission: Admission, says: str):
    links = chain(snapshot(groups=(), buffer=replace(BUFFER, admission=admission)))
    assert [link.text for link in links] == ["The learner waits for groups of step 13 since 1.5 s", says]


def test_nothing_waits_for_ready_groups():
    (link,) = chain(snapshot(buffer=replace(BUFFER, ready=2)))
    assert (link.state, link.waits_for) == ("takes", None)


def test_an_evaluation_is_waited_for():
    learner = LearnerReport("evaluating the result", {"stage": "checkpoint", "step": 100, "since": NOW})
    waits = {"w0": report({}, **{"after-greedy-100": {"generation": [5, NOW - 0.5]}})}
    done = chain(snapshot(learner=replace(learner, doing={"stage": "evaluating"}), workers=waits, groups=()))
    assert links_of(done)[:2] == [("learner", "waits", "evaluation"), ("evaluation", "playing", "episodes")]
    assert "5 of its episodes are playing" in sentence(done)


def test_a_run_that_starts_waits_for_its_parts():
    seen = READY | {
        "learner": Observation(Health.STARTING, "prepares version 0"),
        "generation": Observation(Health.STARTING, "deploying"),
    }
    starting = snapshot(RunState.STARTING, observations=seen, learner=LearnerReport("warming up 3/300"))
    assert sentence(chain(starting)) == (
        "The run starts and waits for generation and the learner; the learner is starting (warming up 3/300); "
        "generation is starting (deploying)."
    )


@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("learner", [LearnerReport(), LearnerReport("training", {"stage": "train"})])
def test_every_state_has_a_chain_even_before_any_part_has_said_a_word(state: RunState, learner: LearnerReport):
    nothing = replace(BUFFER, workers=(), step=None, admission=Admission.NOT_CONFIGURED)
    bare = snapshot(
        state, observations={}, learner=learner, buffer=nothing, groups=(), workers={}, replicas={}, version=-1
    )
    links = chain(bare)
    assert links
    assert sentence(links).endswith(".")


def test_a_paused_run_says_how_to_resume_it():
    said = sentence(chain(snapshot(RunState.PAUSED)))
    assert said == "The run is paused: `offbeat runs resume lake` resumes it; 8 running episodes finish first."


def test_nothing_waits_for_a_run_that_is_over():
    over = snapshot(RunState.FAILED)
    said = sentence(chain(replace(over, record=replace(over.record, error="the disk is full"))))
    assert said == "Nothing waits: the run is failed: the disk is full."


def test_troubles_follow_the_chain():
    trouble = (
        "the checkpoint of step 8 could not be written (No space left on device); the newest whole one is of step 6"
    )
    learner = LearnerReport("training", {"stage": "train", "step": 12, "since": NOW - 0.01}, trouble=trouble)
    record = replace(snapshot().record, beat=NOW - 40.0)
    links = chain(snapshot(learner=learner, record=record))
    assert sentence(links) == (
        f"The learner trains step 13; but {trouble}; it is retried every few seconds; and the run has not been "
        "reconciled for 40 s: the control service hangs, is being replaced, or can't read the run's configuration, as its "
        "log says."
    )
    over = replace(record, state=RunState.FINISHED)
    assert links_of(chain(snapshot(record=over))) == [("run", "finished", None)]


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("settle", "the learner waits until its checkpoint of step 12 is on the disk since 3.0 s"),
        (
            "no_room",
            "the learner waits for room on the disk: too much is unsaved to continue after step 12 since 3.0 s",
        ),
    ],
)
def test_a_wait_for_the_disk_has_a_line(stage: str, says: str):
    learner = LearnerReport("training", {"stage": stage, "step": 12, "since": NOW - 3.0})
    assert chain(snapshot(learner=learner))[-1].text == says


def test_a_read_only_redis_is_named_first():
    """The silence that follows from it is blamed on no component."""
    refusal = "Redis refuses writes: OOM command not allowed (raise its maxmemory)"
    silent = replace(snapshot().record, beat=NOW - 500)
    links = chain(snapshot(redis_trouble=refusal, record=silent))
    assert links_of(links)[0] == ("redis", "refuses", None)
    assert sentence(links).startswith(f"{refusal}: everything waits for it")
    assert "control" not in [link.component for link in links]
    over = replace(silent, state=RunState.FINISHED)
    assert links_of(chain(snapshot(redis_trouble=refusal, record=over))) == [("run", "finished", None)]


def test_episodes_that_fail_often_are_reported_with_their_error():
    last = {"limit": 16, "tag": "Hills", "error": "step_error: no slope", "trace": "Traceback"}
    often = {"finished": 90, "failed": 12, "recent": 20, "recent_failed": 9, **last}
    (*_, link) = chain(snapshot(workers={"w0": {**report({}), "episodes": often}}))
    assert (link.component, link.state) == ("episodes", "fail")
    assert link.text == "9 of the last 20 episodes failed, in custom_envs.Hills: step_error: no slope"
    failed = replace(BUFFER, counters=Counters(9, 3, 3, {}, {"step_error": 2, "reset_error": 1}, 6))
    (*_, link) = chain(snapshot(buffer=failed))
    assert (link.component, link.state) == ("groups", "failed")
    assert link.text.startswith("failed groups 3 (step_error 2, reset_error 1): ")
    assert "set on_env_error of the tag" in link.text
    seldom = often | {"recent_failed": 2}
    assert all(each.state != "fail" for each in chain(snapshot(workers={"w0": {**report({}), "episodes": seldom}})))
