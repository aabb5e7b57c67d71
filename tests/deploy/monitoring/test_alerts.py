"""Alerts on what a run recorded, evaluated by promtool (`make monitoring`): a sound run raises none, each fault its own."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.monitoring.recorded import MONITORING, RARE, alert_rules, recorded_samples

UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin" / "promtool"
PROMTOOL = str(UNPACKED) if UNPACKED.is_file() else shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="`make monitoring` downloads promtool")

MINUTES = 480
SCRAPED = {"instance": "127.0.0.1:8000", "job": "offbeat"}
HELD = 'offbeat_buffer_admission{limit="staleness_bound"}'
MOVING = {
    HELD: "1+0x480",  # as in a run whose learner is the slower part, between whose steps episodes are played
    "offbeat_worker_episodes": "64+0x240 0+0x2 64+0x240",
    "offbeat_run_step": "1+1x480",
    "offbeat_run_reconciled_timestamp_seconds": "0+60x480",
    "offbeat_groups_admitted_total": "0+8x480",
    "offbeat_learner_groups_total": "0+8x480",
    "offbeat_learner_groups_without_signal_total": "0+1x480",
    "offbeat_learner_reward": "0.4+0.001x480",
    "offbeat_learner_actor_entropy_nats": "1-0.001x480",
}
"""What moves in a run that continues, beside what stays as recorded; one value a minute."""
FAULTS: dict[str, dict[str, str]] = {
    "OffbeatUnreachable": {"up": "1+0x470 0+0x10"},
    "OffbeatRedisDown": {"offbeat_redis_up": "1+0x470 0+0x10"},
    "OffbeatRedisRefusesWrites": {"offbeat_redis_refuses_writes": "0+0x470 1+0x10"},
    "OffbeatRunFailed": {
        'offbeat_run_state{state="failed"}': "0+0x470 1+0x10",
        'offbeat_run_state{state="running"}': "1+0x470 0+0x10",
    },
    "OffbeatRunUnattended": {"offbeat_run_reconciled_timestamp_seconds": "0+60x470 28200+0x10"},
    "OffbeatLearnerStalled": {
        "offbeat_run_step": "1+1x460 461+0x20",
        "offbeat_learner_groups_total": "0+8x460 3680+0x20",
        "offbeat_learner_groups_without_signal_total": "0+1x460 460+0x20",
    },
    "OffbeatLagAtBound": {"offbeat_worker_episodes": "64+0x460 0+0x20"},
    "OffbeatGroupsDroppedAsStale": {'offbeat_groups_dropped_total{reason="stale"}': "0+0x440 0+2x40"},
    "OffbeatReplicaWithoutWeights": {"offbeat_replica_version": "5+0x470 -1+0x10"},
    "OffbeatComponentRestarts": {'offbeat_component_restarts_total{component="learner"}': "0+0x470 1+1x10"},
    "OffbeatRewardCollapse": {"offbeat_learner_reward": "0.1+0.002x400 0.2+0x80"},
    "OffbeatEntropyCollapse": {
        "offbeat_learner_actor_entropy_nats": "1+0x440 0.05+0x40",
        "offbeat_learner_groups_without_signal_total": "0+7x480",
    },
    "OffbeatFinding": {'offbeat_run_finding{finding="entropy_collapse"}': "1+0x480"},
}


def series(changes: dict[str, str]) -> list[dict[str, str]]:
    """The recorded series that alerts ask for, with those of faults at rest; `changes` by name, or name and label."""
    asked = " ".join(rule["expr"] for rule in alert_rules())
    samples = [("up", {}, 1.0), *recorded_samples()]
    samples += [
        (name, {"run": "quickstart", label: value}, 0.0)
        for name, labels in RARE.items()
        for label, values in labels.items()
        for value in values
    ]
    rows: dict[str, str] = {}
    for name, labels, value in samples:
        if name not in asked:
            continue
        written = ",".join(f'{label}="{text}"' for label, text in {**labels, **SCRAPED}.items())
        values = f"{value!r}+0x{MINUTES}"
        for target, changed in {**MOVING, **changes}.items():
            wanted, _, condition = target.removesuffix("}").partition("{")
            values = changed if wanted == name and condition in written else values
        rows[f"{name}{{{written}}}"] = values
    return [{"series": name, "values": values} for name, values in rows.items()]


def check(folder: Path, changes: dict[str, str], firing: list[str]) -> None:
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": series(changes),
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES - 1}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
            }
        ],
    }
    document = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m", "tests": [test]}
    path = folder / "alerts_test.yaml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sound_run_raises_no_alert(tmp_path: Path):
    check(tmp_path, {}, [])


def test_a_learner_that_publishes_rarely_is_not_stalled(tmp_path: Path):
    """As with `model_update_frequency: 20`: the run's step is that of the published weights."""
    check(tmp_path, {"offbeat_run_step": "1+1x460 461+0x20"}, [])


def test_a_stalled_learner_is_noticed_across_a_restart_of_the_control_service(tmp_path: Path):
    """Counters begin at 0 again."""
    counters = ("offbeat_learner_groups_total", "offbeat_learner_groups_without_signal_total")
    restarted = {
        name: values + " 0+0x10" for name, values in FAULTS["OffbeatLearnerStalled"].items() if name in counters
    }
    stalled = {name: values.replace("+0x20", "+0x9") for name, values in restarted.items()}
    check(tmp_path, {**FAULTS["OffbeatLearnerStalled"], **stalled}, ["OffbeatLearnerStalled"])


@pytest.mark.parametrize("alert", FAULTS)
def test_each_fault_raises_its_own_alert(tmp_path: Path, alert: str):
    check(tmp_path, FAULTS[alert], [alert])


def test_every_alert_has_its_fault():
    assert {rule["alert"] for rule in alert_rules() if "alert" in rule} == set(FAULTS)


def test_prometheus_accepts_the_configuration(tmp_path: Path):
    token = tmp_path / "runs" / "control" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("secret")
    folder = tmp_path / "deploy" / "monitoring"
    shutil.copytree(MONITORING, folder)
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", str(folder / "prometheus.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
