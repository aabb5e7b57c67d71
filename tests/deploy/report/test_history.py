import math
from dataclasses import replace

from offbeat.deploy.report.history import RATE_S, RunHistory, command_started
from offbeat.services.diagnosis import WINDOW_STEPS, diagnose
from offbeat.services.telemetry import REWOUND_TO, MetricRecord, Partial, mean
from tests.memory import measure_memory


def grown(*records: MetricRecord) -> RunHistory:
    history = RunHistory()
    history.add((f"{i}-0", record) for i, record in enumerate(records, 1))
    return history


def step(number: int, time: float, success: float = 0.5, tokens: float = 100.0) -> MetricRecord:
    values = {"success": mean([success]), "tokens_trained": Partial("sum", tokens)}
    return MetricRecord("learner", values, step=number, time=time)


def evaluation(when: str, at: int, success: float, sampling: str = "sampled", time: float = 5.0) -> MetricRecord:
    values = {"success": mean([success]), "reward": mean([success] * 4)}
    return MetricRecord("eval", values, step=at, labels={"when": when, "sampling": sampling}, time=time)


def test_a_repeated_step_counts_once_with_what_it_saw_last():
    history = grown(step(1, 1.0), step(2, 2.0, success=0.1), step(2, 4.0, success=0.9), step(3, 5.0))
    assert [(each.number, each.value("success")) for each in history.steps.newest()] == [(1, 0.5), (2, 0.9), (3, 0.5)]
    assert history.position == "4-0"


def test_evaluations_are_found_by_kind_and_sampling():
    history = grown(
        evaluation("before", 0, 0.1),
        evaluation("before", 0, 0.0, "greedy"),
        evaluation("during", 20, 0.6),
        evaluation("after", 40, 0.9),
    )
    before, greedy = history.evaluation("before", "sampled"), history.evaluation("before", "greedy")
    assert before
    assert greedy
    assert (before.success, before.episodes, greedy.success) == (0.1, 4, 0.0)
    assert [each.step for each in history.curve()] == [0, 20, 40]
    assert history.evaluation("after", "greedy") is None


def test_sums_means_and_peaks_go_over_all_sources_of_a_kind():
    def record(worker: str, kind: str, episodes: float, pause: float) -> MetricRecord:
        values = {"episodes": Partial("sum", episodes), "wait_s": mean([pause]), "wait_max_s": Partial("max", pause)}
        return MetricRecord("rollout", values, labels={"worker": worker, "kind": kind})

    history = grown(record("a", "train", 3, 1.0), record("b", "train", 4, 3.0), record("a", "eval", 7, 9.0))
    assert history.total("rollout:train/episodes") == 7
    assert history.means["rollout:train/wait_s"].value == 2.0
    assert history.peaks["rollout:train/wait_max_s"] == 3.0
    assert history.total("rollout:train/nothing") == 0


def test_a_rate_is_the_amount_since_the_oldest_record_in_the_window():
    def tokens(time: float, amount: float) -> MetricRecord:
        return MetricRecord("generation", {"tokens": Partial("sum", amount)}, time=time)

    assert grown().rate("generation/tokens") is None
    assert grown(tokens(0.0, 100)).rate("generation/tokens") is None
    assert grown(tokens(0.0, 1e6), tokens(1.0, 50), tokens(2.0, 150)).rate("generation/tokens") == 100
    late = grown(tokens(0.0, 1e6), tokens(100.0, 1e6), tokens(100.0 + RATE_S, 30 * RATE_S))
    assert late.rate("generation/tokens") == 30


def test_steps_longer_than_the_window_have_a_rate():
    """It stays until the next step is overdue, and then falls: a stalled learner trains nothing."""

    def rate(now: float) -> float | None:
        return grown(step(1, 0.0), step(2, 60.0, tokens=30.0), MetricRecord("generation", {}, time=now)).rate(
            "learner/tokens_trained"
        )

    assert grown(step(1, 0.0)).rate("learner/tokens_trained") is None
    assert rate(60.0) == rate(119.0) == 0.5
    assert rate(60.0 + 60.0 + 540.0) == 0.05


def test_the_pace_is_that_of_the_newest_steps():
    assert grown(step(1, 1.0)).seconds_per_step() is None
    assert grown(step(1, 0.0), *(step(n, 100.0 + 2 * n) for n in range(2, 30))).seconds_per_step() == 2.0


def test_a_pause_between_two_commands_does_not_count_as_time_of_the_run():
    first, second = command_started(100.0), command_started(1000.0)
    history = grown(
        MetricRecord("command", first.values, time=101.0),
        step(1, 110.0),
        step(2, 120.0),
        MetricRecord("command", second.values, time=1001.0),
        step(3, 1010.0),
    )
    assert [history.seconds(time) for time in (110.0, 120.0, 500.0, 1000.0, 1010.0)] == [10.0, 20.0, 20.0, 20.0, 30.0]
    assert RunHistory().seconds(5.0) == 0


def test_a_pause_between_two_commands_is_not_in_the_pace():
    first, second = (replace(command_started(began), time=began) for began in (100.0, 1000.0))
    history = grown(first, step(1, 110.0), step(2, 120.0), second, step(3, 1010.0))
    assert history.seconds_per_step() == 10.0


def test_evaluations_of_weights_that_are_given_up_go_with_them():
    rewound = MetricRecord("learner", {}, labels={REWOUND_TO: "50"})
    history = grown(step(100, 1.0), *(evaluation("during", at, 0.9) for at in (50, 80)), evaluation("after", 100, 1.0))
    history.add([("9-0", rewound), ("10-0", step(51, 2.0)), ("11-0", evaluation("during", 60, 0.4))])
    assert history.evaluation("after", "sampled") is None
    assert [each.step for each in history.curve()] == [50, 60]


def test_a_metric_that_was_not_measured_is_nan():
    history = grown(step(1, 1.0))
    assert history.last_step
    for each in (history.last_step, *history.steps.newest()):
        assert math.isnan(each.value("reward"))
        assert "reward" not in each.values


def test_a_learner_that_goes_back_takes_the_steps_after_it_with_it():
    history = grown(step(1, 1.0), step(2, 2.0), step(3, 3.0), step(2, 9.0))
    assert [(each.number, each.time) for each in history.steps.newest()] == [(1, 1.0), (2, 9.0)]
    assert history.last_step
    assert history.last_step.number == 2
    assert [each.number for each in history.steps.newest(1)] == [2]
    assert RunHistory().steps.newest(5) == []


def test_a_diagnosis_forgets_the_steps_that_a_learner_gave_up():
    def skips(number: int, skipped: float) -> MetricRecord:
        return MetricRecord("learner", {"actor/skipped_steps": Partial("sum", skipped)}, step=number)

    given_up = [skips(number, float(number >= 8)) for number in range(1, 11)]
    history = grown(*given_up, MetricRecord("learner", {}, labels={REWOUND_TO: "7"}))
    assert [finding.name for finding in diagnose(history.window)] == ["not_finite"]
    history.add((f"9{number}-0", skips(number, 0.0)) for number in range(8, 13))
    assert len(history.window) == 12
    assert diagnose(history.window) == []
    history.add((f"{number}-0", skips(number, 0.0)) for number in range(100, 140))
    assert len(history.window) == WINDOW_STEPS + 1


def test_a_step_of_a_long_run_takes_a_few_numbers_of_memory():
    history = grown(*(step(number, float(number)) for number in range(1, 1001)))
    more = ((f"{number}-0", step(number, float(number))) for number in range(1001, 11_001))
    assert measure_memory(lambda: history.add(more))[0] < 10_000 * 80
