"""Metric families by Prometheus' conventions, from the metric registry."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from offbeat.services.metric_registry import Metric, find_metric

PREFIX = "offbeat"
UNIT_SUFFIXES = {"s": "seconds", "nats": "nats", "versions": "versions"}
LABELS = {"*": "metric", "name": "metric", "env_metric": "metric", "kind": "error"}
"""Label by placeholder, where names differ; `kind` is a record's own label."""
ENV_METRICS = "env"


class FamilyType(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """Its samples end with `_total`."""
    SUMMARY = "summary"
    """`_sum` and `_count`, without quantiles."""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    type: FamilyType
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run` and the labels of records."""


class FamilySample(NamedTuple):
    family: Family
    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class MetricPlace(NamedTuple):
    name: str
    help: str
    unit: str
    labels: tuple[tuple[str, str], ...]


@lru_cache(maxsize=4096)
def find_place(source: str, name: str) -> MetricPlace | None:
    """Return the family and labels of a recorded metric; None if it is not in the registry."""
    metric = find_metric(source, name)
    if metric is None:
        return None
    labels = tuple(zip(label_names(metric), metric.split(name), strict=True))
    return MetricPlace(family_name(metric), metric.description, metric.unit, labels)


def label_names(metric: Metric) -> tuple[str, ...]:
    parts = re.findall(r"\{([^}]+)\}", metric.name)
    return tuple("stat" if part == "mean,min,max" else _choice(part) for part in parts)


def _choice(part: str) -> str:
    return "of" if "," in part else LABELS.get(part, part)


def family_name(metric: Metric) -> str:
    """Return the name without a counter's `_total` or a summary's suffix; its last word is the unit."""
    literal = re.sub(r"\{[^}]+\}", "/", metric.name)
    words = re.sub(r"[^a-zA-Z0-9]+", "_", literal.replace("@", "_at_")).strip("_") or ENV_METRICS
    name = f"{PREFIX}_{metric.source}_{words}"
    if metric.unit == "tokens/s":
        return f"{name.removesuffix('_s')}_second"
    suffix = UNIT_SUFFIXES.get(metric.unit, "")
    name = name.removesuffix("_s") if metric.unit == "s" else name
    return f"{name}_{suffix}" if suffix and suffix.rstrip("s") not in words.split("_") else name
