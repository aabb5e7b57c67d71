"""`docs/metrics.md`, generated from the registry: `python -m offbeat.deploy.report.metrics_page`."""

import sys
from collections.abc import Iterator

from offbeat.services.metric_registry import METRICS, RENAMED, Metric

HEAD = """# Metrics

Generated from `services/metric_registry.py` by `make docs`. A record has a source, the learner's step where there is one,
and labels. Trackers show `SOURCE/NAME` (`learner/reward`, `eval/sampled/success`); `metrics.jsonl` and `run.metrics()` have
the source beside the name. Values that are not finite are left out. The last column is ROLL's name where it is another one.

`reward` is what the envs gave, `shaped_reward` what is trained on after shaping, penalties and clips; nothing is under
`critic/` without a critic. `tokens_trained` counts the sampled tokens of the trained trajectories, `tokens/computed` all
their tokens, prompts included.
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
    return "\n".join([HEAD, *_sections(), *_renamed()]) + "\n"


def _sections() -> Iterator[str]:
    for source in SECTIONS:
        rows = [_row(metric) for metric in METRICS if metric.source == source]
        yield f"## {source}\n\n{SECTIONS[source]}\n\n| Name | Unit | Meaning | ROLL |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"


def _row(metric: Metric) -> str:
    name = metric.name.replace("{*}", "{name}")
    roll = f"`{metric.roll.replace('{*}', '{name}')}`" if metric.roll else ""
    return f"| `{name}` | {metric.unit} | {metric.description} | {roll} |".replace("|  |", "| |").replace("|  |", "| |")


def _renamed() -> Iterator[str]:
    yield "## Renamed\n\nStored records of earlier builds are read under today's names.\n\n| Before 0.2 | Today |\n|---|---|"
    for source, names in RENAMED.items():
        yield "\n".join(f"| `{source}/{old}` | `{source}/{new}` |" for old, new in names.items())


if __name__ == "__main__":
    sys.stdout.write(render_page())
