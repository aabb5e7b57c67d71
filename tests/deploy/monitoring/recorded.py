"""`/metrics` of a run, recorded (docs/monitoring.md), and the queries of deploy/monitoring."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.paths import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RECORDED = Path(__file__).with_name("recorded.prom")
RARE = {
    "offbeat_groups_dropped_total": {"reason": {"stale", "expired"}},
    "offbeat_groups_failed_total": {"reason": {"env_error"}},
    "offbeat_rollout_failed_total": {"reason": {"env_error"}, "kind": {"train"}, "tag": {"lake"}},
    "offbeat_run_finding": {"finding": {"entropy_collapse"}},
}
"""Series of faults, which a sound run does not have."""
SCRAPED = {"instance": {"127.0.0.1:8000"}, "job": {"offbeat"}}
"""Labels that Prometheus adds."""

Labels = dict[str, set[str]]


def recorded_samples() -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(RECORDED.read_text()):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def known_metrics() -> dict[str, Labels]:
    """Every metric's labels and their values."""
    known: dict[str, Labels] = {"up": {}}
    for name, labels, _ in recorded_samples():
        of_metric = known.setdefault(name, {})
        for label, value in labels.items():
            of_metric.setdefault(label, set()).add(value)
    for name, labels in RARE.items():
        known[name] = {"run": {"quickstart"}} | known.get(name, {}) | labels
    return {name: {**labels, **SCRAPED} for name, labels in known.items()}


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "grafana" / "dashboards" / "offbeat.json").read_text())


def dashboard_queries() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend, Grafana's variables replaced by values."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = re.sub(r"\$(instance|run)\b", ".*", target["expr"]).replace("$__rate_interval", "1m")
            yield panel["title"], query, target["legendFormat"]
