"""The dashboard and the alerts ask for metrics that exist, in PromQL; the page on metrics describes those and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import ray.dashboard.modules.metrics.dashboards as ray_dashboards
import ray.serve._private as serve_private
from prometheus_client import CollectorRegistry

from orchestrator.request_metrics import RequestMetrics
from paceline.errors import PacelineError
from paceline.telemetry import PoolMetrics, ServiceMetrics, SpeculationMetrics, show_certificates
from paceline.v1.session_pb2 import LoadReport
from tests.deploy.files import DEPLOY, read_yaml

FOLDER = DEPLOY / "observability"
PAGE = (DEPLOY.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule for group in read_yaml(FOLDER / "alerts.yaml")["groups"] for rule in group["rules"]
]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in ALERTS)


def names(prefix: str) -> set[str]:
    """Metrics with that prefix in any expression."""
    return {name for expression in expressions() for name in re.findall(rf"\b{prefix}_\w+", expression)}


def registries() -> list[CollectorRegistry]:
    """All metrics of a model service, and all of an orchestrator."""
    model_service, orchestrator = CollectorRegistry(), CollectorRegistry()
    ServiceMetrics(model_service).follow(LoadReport)
    for metrics in (SpeculationMetrics, PoolMetrics, RequestMetrics):
        metrics(orchestrator)
    show_certificates(model_service)
    show_certificates(orchestrator)
    return [model_service, orchestrator]


def exported() -> set[str]:
    """Every series that the three services export."""
    metrics = [metric for registry in registries() for metric in registry.collect()]
    return {f"{metric.name}{suffix}" for metric in metrics for suffix in SUFFIXES[metric.type]}


def named_by_ray() -> str:
    """The source text in which Ray names its metrics: Serve's own code, and the dashboards that Ray ships."""
    folders = [Path(next(iter(module.__path__))) for module in (serve_private, ray_dashboards)]
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.glob("*.py")))


def test_paceline_metrics_exist() -> None:
    """Every series asked for is one that a service exports."""
    wanted = names("paceline")
    assert len(wanted) > 10
    assert wanted <= exported()


def renamings() -> dict[str, list[dict[str, Any]]]:
    """What is done to the names of metrics that Ray's nodes export, by where it is written, in Prometheus' own words."""
    jobs = {job["job_name"]: job for job in read_yaml(FOLDER / "prometheus.yaml")["scrape_configs"]}
    monitor = read_yaml(DEPLOY / "kuberay" / "base" / "podmonitor.yaml")
    words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    return {
        "prometheus": jobs["ray"]["metric_relabel_configs"],
        "podmonitor": [
            {words.get(key, key): value for key, value in rule.items()} for rule in endpoint["metricRelabelings"]
        ],
    }


def renamed(name: str, rules: list[dict[str, Any]]) -> str:
    """As Prometheus applies them: an expression matches the whole name, or the rule does nothing."""
    for rule in rules:
        assert rule.keys() == {"source_labels", "regex", "target_label", "replacement"}
        assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
        if match := re.fullmatch(rule["regex"], name):
            name = match.expand(rule["replacement"].replace("$", "\\"))
    return name


@pytest.mark.parametrize("where", ["prometheus", "podmonitor"])
def test_names_are_the_same_on_ray(where: str) -> None:
    """Ray's prefix is taken from our metrics, and from no others: one dashboard fits both worlds."""
    rules = renamings()[where]
    for name in exported():
        assert renamed(f"ray_{name}", rules) == name
    for name in (*names("ray"), "ray_node_cpu_utilization", "up"):
        assert renamed(name, rules) == name


def test_serve_metrics_exist() -> None:
    """Every series of Ray Serve asked for is named in the installed Ray, by Serve or by Ray's own dashboards."""
    text = named_by_ray()
    wanted = names("ray")
    assert len(wanted) > 3
    for name in wanted:
        assert f'"{name.removeprefix("ray_")}"' in text or re.search(rf"\b{name}\b", text), name


def test_every_metric_of_a_service_is_shown() -> None:
    """What a service exports has its place on the dashboard."""
    stems = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in exported()}
    shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in names("paceline")}
    assert stems == shown


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_is_complete(panel: dict[str, Any]) -> None:
    """It says what it shows, in a unit, from the data source that the viewer chooses."""
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]


def test_panels_do_not_overlap() -> None:
    """Each has an id and a place of its own on the grid of 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_is_complete_and_in_the_runbook(rule: dict[str, Any]) -> None:
    """Whoever is woken finds a sentence, and the alert's name in the runbook."""
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]
    assert f"`{rule['alert']}`" in (DEPLOY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_expression_is_promql(expression: str) -> None:
    """As Prometheus' own grammar has it; Grafana puts a duration for its variable."""
    promql_parser.parse(expression.replace("$__rate_interval", "1m"))


def test_reasons_asked_for_exist() -> None:
    """Those that alerts pick out of the errors."""
    known, wanted = set[str](), set[str]()
    types: list[type[PacelineError]] = [PacelineError]
    while types:
        kind = types.pop()
        known.add(kind.reason)
        types += kind.__subclasses__()
    for rule in ALERTS:
        for pattern in re.findall(r'errors_total\{reason=~?"([^"]+)"\}', rule["expr"]):
            wanted |= set(pattern.split("|"))
    assert len(wanted) > 3
    assert wanted <= known


# ---------------------------------------------------------------------------------------------------------------------
# The page


@dataclass(frozen=True)
class Entry:
    """A metric, as the page describes it or as a registry has it."""

    name: str  # without a suffix
    kind: str
    labels: tuple[str, ...]


def documented() -> list[Entry]:
    rows = re.findall(r"^\| `(paceline_\w+)` \| (\w+) \| [^|]+ \|([^|]*)\| [A-Z][^|]+ \|$", PAGE, re.MULTILINE)
    return [
        Entry(name.removesuffix("_total"), kind, tuple(sorted(re.findall(r"`(\w+)`", labels))))
        for name, kind, labels in rows
    ]


def registered() -> set[Entry]:
    entries = set()
    for registry in registries():
        for collector in registry._collector_to_names:
            for metric in collector.collect():
                own = getattr(collector, "_labelnames", ())  # also where nothing was counted yet
                seen = {label for sample in metric.samples for label in sample.labels} - {"le"}
                entries.add(Entry(metric.name, metric.type, tuple(sorted({*own, *seen}))))
    return entries


def test_page_describes_every_metric_and_no_other() -> None:
    """Each once, with its kind and its labels; each row of the tables is read."""
    entries = documented()
    assert len(entries) == PAGE.count("| `paceline_")
    assert len(set(entries)) == len(entries)
    assert set(entries) == registered()


def test_labels_with_a_question_say_their_values() -> None:
    """Whoever adds a label says how many series come of it."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `paceline_") and cells[4] and "acceptance" not in cells[1]:
            assert "Values:" in cells[5], cells[1]
