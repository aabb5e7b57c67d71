"""Queries of alerts and dashboard ask for metrics, labels and values that a run has."""

import re

import promql_parser
import pytest
from promql_parser import AggregateExpr, MatchOp, VectorSelector

from offbeat.services.control.prometheus.families import PREFIX, family_name
from offbeat.services.control.prometheus.run_state import STATE_FAMILIES
from offbeat.services.metric_registry import METRICS
from tests.deploy.monitoring.recorded import (
    RARE,
    alert_rules,
    dashboard,
    dashboard_queries,
    known_metrics,
    recorded_samples,
)
from tests.paths import ROOT

KNOWN = known_metrics()
RULES = alert_rules()
RECORDED_RULES = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
QUERIES = [
    *(
        (rule.get("alert") or rule["record"], rule["expr"], rule.get("annotations", {}).get("summary", ""))
        for rule in RULES
    ),
    *dashboard_queries(),
]
SUFFIX = re.compile(r"_(total|sum|count)$")


def selectors(query: str) -> list[VectorSelector]:
    found: list[VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def problems(query: str, legend: str) -> list[str]:
    """What no run has, of a query and the labels in its legend."""
    wrong: list[str] = []
    shown: set[str] = set()
    for selector in selectors(query):
        name = selector.name or ""
        if name in RECORDED_RULES:
            shown |= {"run", "instance"}
            continue
        if name not in KNOWN:
            wrong.append(f"no metric {name}")
            continue
        shown |= KNOWN[name].keys()
        for matcher in selector.matchers.matchers:
            if matcher.name not in KNOWN[name]:
                wrong.append(f"{name} has no label {matcher.name}")
            elif matcher.op == MatchOp.Equal and matcher.value not in KNOWN[name][matcher.name]:
                wrong.append(f"{name} has no {matcher.name}={matcher.value}")
            elif matcher.op == MatchOp.Re and not all(
                any(re.fullmatch(part, value) for value in KNOWN[name][matcher.name])
                for part in matcher.value.split("|")
            ):
                wrong.append(f"{name} has no {matcher.name}=~{matcher.value}")
    if isinstance(tree := promql_parser.parse(query), AggregateExpr):
        shown &= set(tree.modifier.labels) if tree.modifier else set()
    asked = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", legend))
    return wrong + [f"no label {label} to show" for label in asked - shown]


@pytest.mark.parametrize(("query", "legend"), [(q, legend) for _, q, legend in QUERIES], ids=[t for t, *_ in QUERIES])
def test_a_query_asks_for_what_a_run_has(query: str, legend: str):
    assert selectors(query)
    assert problems(query, legend) == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("offbeat_run_stat == 1", "no metric offbeat_run_stat"),
        ('rate(offbeat_learner_groups_total{runs="a"}[5m])', "offbeat_learner_groups_total has no label runs"),
        ('offbeat_run_state{state="happy"}', "offbeat_run_state has no state=happy"),
        ('offbeat_run_state{state=~"failed|happy"}', "offbeat_run_state has no state=~failed|happy"),
    ],
)
def test_a_wrong_query_is_found(query: str, problem: str):
    assert problems(query, "") == [problem]


def test_a_legend_with_a_label_that_is_summed_away_is_found():
    assert problems("sum by (run) (offbeat_run_state)", "{{run}} {{state}}") == ["no label state to show"]


def test_what_was_recorded_has_todays_names():
    families = {family.name for family in STATE_FAMILIES} | {family_name(metric) for metric in METRICS}
    names = {name for name, *_ in recorded_samples()} | RARE.keys()
    assert {name for name in names if SUFFIX.sub("", name) not in families and name not in families} == set()


def test_names_follow_prometheus():
    """No family's name ends like a sample's, or is another's."""
    rows = [*(family.name for family in STATE_FAMILIES), *{family_name(metric) for metric in METRICS}]
    assert len(rows) == len(set(rows))
    assert [name for name in rows if not re.fullmatch(rf"{PREFIX}(_[a-z0-9]+)+", name)] == []
    assert [name for name in rows if re.search(r"_(total|sum|count|bucket|created|info)$", name)] == []


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_page_says_what_to_do_about_every_alert():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in RULES if "alert" in rule and f"`{rule['alert']}`" not in page] == []
