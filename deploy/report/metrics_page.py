"""`docs/metrics.md`, generated from the registry: `python -m offbeat.deploy.report.metrics_page`."""

import sys
from collections.abc import Iterator

from offbeat.services.control.prometheus.families import FamilyType, family_name, label_names
from offbeat.services.control.prometheus.run_state import MESH_FAMILIES, STATE_FAMILIES
from offbeat.services.metric_registry import METRICS, RENAMED, Metric

HEAD = """# Metrics

Generated from `services/metric_registry.py` by `make docs`. A record has a source, the learner's step where there is one,
and labels. Trackers show `SOURCE/NAME` (`learner/reward`, `eval/sampled/success`); `metrics.jsonl` and `run.metrics()` have
the source beside the name. Values that are not finite are left out. `/metrics` has them under the names of the column
Prometheus ([monitoring.md](monitoring.md)). The last column is ROLL's name where it is another one.

`reward` is what the envs gave, `shaped_reward` that after `reward_shaping`, before comparisons, `reward_clip` and KL;
nothing is under `critic/` without a critic. `tokens_trained` counts the sampled tokens of the trained trajectories,
`tokens/computed` all their tokens, prompts included.
"""
SECTIONS = {
    "learner": "One record per optimizer step; `startup/` once, `checkpoints_failed` as it happens.",
    "eval": "One record per evaluation, with the labels `when` (before, during, after) and `sampling` (sampled, greedy, "
    "loss).",
    "rollout": "Records of each worker: its own, and one per kind of episode (`kind`) and tag (`tag`).",
    "generation": "Records of each replica.",
    "weights": "Records of the broker, one per replica.",
    "scoring": "Records of each replica of a frozen model's service, one per group.",
    "trackers": "As it happens.",
    "command": "One record per `offbeat train`.",
}


def render_page() -> str:
    return "\n".join([HEAD, *_sections(), *_state(), *_renamed()]) + "\n"


def _sections() -> Iterator[str]:
    for source in SECTIONS:
        rows = [_row(metric) for metric in METRICS if metric.source == source]
        yield f"## {source}\n\n{SECTIONS[source]}\n\n| Name | Unit | Meaning | Prometheus | ROLL |\n|---|---|---|---|---|"
        yield "\n".join(rows) + "\n"


def _row(metric: Metric) -> str:
    name = metric.name.replace("{*}", "{name}")
    roll = f"`{metric.roll.replace('{*}', '{name}')}`" if metric.roll else ""
    row = f"| `{name}` | {metric.unit} | {metric.description} | {_exported_name(metric)} | {roll} |"
    return row.replace("|  |", "| |").replace("|  |", "| |")


def _exported_name(metric: Metric) -> str:
    if metric.source == "command":
        return ""  # in the run's folder alone
    labels = ", ".join(label_names(metric))
    return f"`{family_name(metric)}{{{labels}}}`" if labels else f"`{family_name(metric)}`"


def _state() -> Iterator[str]:
    yield "## State, for Prometheus alone\n\n| Name | Type | Labels | Meaning |\n|---|---|---|---|"
    for family in STATE_FAMILIES:
        labels = [*(() if family in MESH_FAMILIES else ("run",)), *family.labels]
        name = f"{family.name}_total" if family.type is FamilyType.COUNTER else family.name
        yield f"| `{name}` | {family.type} | {', '.join(labels)} | {family.help} |".replace("|  |", "| |")
    yield ""


def _renamed() -> Iterator[str]:
    yield "## Renamed\n\nStored records of earlier builds are read under today's names.\n\n| Before 0.2 | Today |\n|---|---|"
    for source, names in RENAMED.items():
        yield "\n".join(f"| `{source}/{old}` | `{source}/{new}` |" for old, new in names.items())


if __name__ == "__main__":
    sys.stdout.write(render_page())
