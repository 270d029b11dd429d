"""The dashboard reads metrics and labels that a run exports, in valid PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.runtime.metrics import COUNTERS, GAUGES, SPEC, RunMetrics
from pipeline.runtime.progress import LABELLING

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "jobs" / "grafana"
# What Ray makes of the names; `test_ray_exports_these_names` holds it.
EXPORTED = {
    **{f"ray_{name}_total": {SPEC, *tags} for name, (_, tags) in COUNTERS.items()},
    **{f"ray_{name}": {SPEC, *tags} for name, (_, tags) in GAUGES.items()},
}


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "assay.json").read_text())
    return content


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_each_metric_and_label_of_the_dashboard_is_exported_and_each_metric_is_shown() -> None:
    used: set[str] = set()
    for expression in expressions():
        names = set(re.findall(r"ray_\w+", expression))
        assert names and names <= EXPORTED.keys(), expression
        used |= names
        known = set.union(*(EXPORTED[name] for name in names))
        # — `{label="..."}`, `by (label, ...)` and `on (label)`
        selected = re.findall(r'(\w+)\s*=~?\s*"', expression)
        grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
        labels = {*selected, *(name.strip() for group in grouped for name in group.split(","))}
        assert labels <= known, expression
    assert used == EXPORTED.keys()


def test_the_dashboard_has_one_panel_of_each_name_and_a_variable_for_each_that_it_uses() -> None:
    content = dashboard()
    panels = content["panels"]
    assert (
        len({panel["title"] for panel in panels}) == len({p["id"] for p in panels}) == len(panels)
    )
    assert all(panel["description"] for panel in panels)
    variables = {variable["name"] for variable in content["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables == {"datasource", "spec"}


def test_promtool_accepts_every_expression_and_the_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; the Debian package `prometheus` has it")
    rules = [
        {
            "record": f"panel:{number}",
            "expr": text.replace("$__rate_interval", "1m").replace("$spec", ".*"),
        }
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "assay", "rules": rules}]}))
    for words in (("rules", str(file)), ("config", str(FOLDER / "prometheus.yml"))):
        ended = subprocess.run([promtool, "check", *words], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(rules)} rules" in subprocess.check_output(
        [promtool, "check", "rules", str(file)], text=True
    )


def test_the_manual_names_every_metric() -> None:
    manual = (REPOSITORY / "jobs" / "README.md").read_text()
    assert set(re.findall(r"`(ray_assay\w+)`", manual)) == EXPORTED.keys()


class OneShard:
    """A plan of one shard with two work items."""

    def __init__(self) -> None:
        shard = type("Shard", (), {"id": "s"})()
        self.work_items = [type("Work", (), {"shard": shard})()] * 2
        self.shards = (shard,)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ray_exports_these_names_with_the_run_s_figures(shared_ray: None) -> None:
    import ray

    plan: Any = OneShard()
    counted = RunMetrics("demo", plan)
    # — Ray takes ASCII alone, and Prometheus no line breaks
    for task, label in (("mood", "a"), ("topic", "是 100%\n\ud800")):
        n = Counts({("rows", "ok"): 3, ("rows", "empty"): 1, ("label", task, label): 3})
        n.update({("answered", task): 3, ("label_ms", "0"): 1_500})
        n.update({("prefix_tokens", "0"): 100, ("question_tokens", "0"): 50})
        counted.committed(ShardCounts("s", (task,), n))
    for _ in range(3):
        counted.tick(LABELLING, 1.0, 8)
    counted.tick(LABELLING, 0.0, 0)
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    exported: dict[str, float] = {}
    deadline = time.monotonic() + 90
    while not EXPORTED.keys() <= {name.partition("{")[0] for name in exported}:
        assert time.monotonic() < deadline, sorted(exported)
        time.sleep(1)
        with urllib.request.urlopen(url, timeout=10) as answer:
            exported = dict(samples(answer.read().decode()))
    assert exported == {
        "ray_assay_rows_total{spec=demo,status=ok}": 6,
        "ray_assay_rows_total{spec=demo,status=empty}": 2,
        "ray_assay_answers_total{label=a,spec=demo,task=mood}": 3,
        "ray_assay_answers_total{label=%E6%98%AF 100%25%0A%ED%A0%80,spec=demo,task=topic}": 3,
        "ray_assay_tokens_total{kind=document,spec=demo}": 200,
        "ray_assay_tokens_total{kind=question,spec=demo}": 100,
        "ray_assay_label_seconds_total{spec=demo}": 3,
        "ray_assay_phase_seconds_total{phase=labelling,spec=demo}": 3,
        "ray_assay_shards_done{spec=demo}": 1,
        "ray_assay_shards_missing{spec=demo}": 0,
        "ray_assay_documents_missing{spec=demo}": 0,
    }


def samples(text: str) -> Iterator[tuple[str, float]]:
    """Our samples of spec `demo`, without the labels that Ray adds."""
    own_labels = {SPEC, "status", "task", "label", "kind", "phase"}
    for line in text.splitlines():
        match = re.fullmatch(r"(ray_assay\w+)\{(.*)\} (\S+)", line)
        if match and 'spec="demo"' in match[2]:
            labels = sorted(
                pair for pair in re.findall(r'(\w+)="([^"]*)"', match[2]) if pair[0] in own_labels
            )
            shown = ",".join(f"{name}={value}" for name, value in labels)
            yield f"{match[1]}{{{shown}}}", float(match[3])
