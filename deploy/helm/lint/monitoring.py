"""Alerts and dashboard of the chart: they parse, the metrics they name exist, and the alerts' tests pass. Used by tools/chart-lint.

What reads expressions is promtool, which comes with Prometheus (Debian's package prometheus).
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FILES = HERE.parent / "baton/files"
METRICS = HERE.parents[2] / "docs/metrics.md"
# What Grafana replaces in a query.
VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*", "$release": ".*"}


def metrics():
    """Names that a scrape has: those of docs/metrics.md, of histograms the names of their series."""
    for name, kind in re.findall(r"^\| `(baton_\w+)` \| (\w+)", METRICS.read_text(), re.M):
        yield from (name + end for end in (["_bucket", "_sum", "_count"] if kind == "histogram" else [""]))


def unknown(where, expressions):
    """Metrics in expressions that no process has."""
    known = set(metrics())
    for title, expression in expressions:
        # Not in quotes: those hold values of labels.
        for name in re.findall(r"\bbaton_\w+", re.sub(r'"[^"]*"', "", expression)):
            if name not in known:
                yield f"{where}: {title}: docs/metrics.md has no {name}"


def rules(groups):
    """The alerts of a file or a PrometheusRule."""
    return [rule for group in groups for rule in group["rules"]]


def queries(dashboard):
    """(title, query) of a dashboard's panels and variables."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        for metric in re.findall(r"label_values\((.*), \w+\)", variable["query"]):
            yield f"variable {variable['name']}", metric


def replaced(query):
    """A query as Grafana sends it; also what is still left of variables."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return query, re.findall(r"\$\w+", query)


class Promtool:
    """promtool, or why there is none."""

    def __init__(self):
        self.program = shutil.which("promtool")

    def run(self, *arguments):
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True)
        return [] if done.returncode == 0 else [done.stdout + done.stderr]

    def check(self, groups):
        """Whether rules parse, with their templates."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rules.yaml"
            path.write_text(json.dumps({"groups": groups}))
            return self.run("check", "rules", path)


def check(checks, rendered):
    """All checks; `rendered` has the groups of the PrometheusRules that the chart makes, by the values they come from."""
    import yaml

    alerts = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    tests = (HERE / "alerts-test.yaml").read_text()
    dashboard = json.loads((FILES / "dashboard.json").read_text())

    problems = list(unknown("alerts", [(rule["alert"], rule["expr"]) for rule in rules(alerts)]))
    for rule in rules(alerts):
        if not re.search(r" [<>] [0-9.]+$", rule["expr"].rstrip()):
            problems.append(f"{rule['alert']}: the expression does not end with a limit, which thresholds could replace")
        if rule["alert"] not in tests:
            problems.append(f"{rule['alert']} has no test in {HERE.name}/alerts-test.yaml")
    checks.line(f"alerts: {len(rules(alerts))}, of metrics that exist, each with a limit and a test", problems)

    asked = list(queries(dashboard))
    problems, recorded = list(unknown("dashboard", asked)), []
    for number, (title, query) in enumerate(asked):
        query, left = replaced(query)
        recorded.append({"record": f"query:{number}", "expr": query})
        problems += [f"dashboard: {title}: {name} is no variable known here" for name in left]
    checks.line(f"dashboard: {len(asked)} queries of metrics that exist", problems)

    promtool = Promtool()
    if not promtool.program:
        why = "promtool is not on PATH; install Debian's package prometheus"
        if os.environ.get("BATON_REQUIRE_ALL"):
            checks.line("alerts and dashboard: promtool", [why])
        else:
            print(f"skipped: alerts and dashboard: {why}", flush=True)
        return
    checks.line("alerts: promtool check rules", promtool.run("check", "rules", FILES / "alerts.yaml"))
    checks.line("alerts: promtool test rules", promtool.run("test", "rules", HERE / "alerts-test.yaml"))
    checks.line("dashboard: promtool parses its queries", promtool.check([{"name": "dashboard", "rules": recorded}]))
    for name, groups in rendered.items():
        checks.line(f"{name}: promtool check rules", promtool.check(groups))
    checks.line("rendered rules: there are some", [] if rendered else ["no values turn monitoring.rules on"])
