"""What stands in deploy/ can be read by those it is for, and names nothing that is not there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import write_model
from prometheus_client.parser import text_string_to_metric_families
from servers import running

from infinilm import cli
from infinilm.cli import serve

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def options_of(arguments: list[str]) -> Any:
    """What the command line understands by words after `infinilm`"""
    return cli.parser().parse_args(arguments)


def option_names() -> set[str]:
    return {f"INFINILM_{name.upper()}" for name in vars(options_of(["serve"]))}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "infinilm.json").read_text())
    return found


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_named_is_one_that_the_server_reads(path: Path) -> None:
    named = set(re.findall(r"\bINFINILM_[A-Z_]+\b", path.read_text()))
    assert named <= option_names()


# ---- systemd -----------------------------------------------------------------------------------------------


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "infinilm.service")
    return parser


def test_the_unit_starts_the_server_and_lets_it_drain(unit: configparser.ConfigParser) -> None:
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    options = options_of(arguments)
    assert Path(program).name == "infinilm" and options.run is serve.run
    assert int(unit["Service"]["TimeoutStopSec"]) > options.shutdown_timeout + 60
    assert unit["Service"]["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that there is, which it asks for"""
    text = (DEPLOY / "infinilm.service").read_text()
    copy = tmp_path / "infinilm.service"
    copy.write_text(text.replace("/opt/infinilm/bin/infinilm", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    told = [line for line in done.stderr.splitlines() if "infinilm.service" in line]
    assert (done.returncode, told) == (0, []), done.stderr


# ---- Docker ------------------------------------------------------------------------------------------------


def instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def copied() -> set[str]:
    """What goes into the image from here"""
    words = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    return {source for some in words for source in some[:-1]}


def test_the_image_copies_what_is_there_and_what_is_not_left_out() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert copied() == kept and all((ROOT / name).exists() for name in kept)


def test_the_image_copies_what_the_build_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [
        project["project"]["readme"],
        *project["project"]["license-files"],
        *project["tool"]["scikit-build"]["wheel"]["packages"],
    ]
    sources = re.findall(r"(csrc|cmake)/", (ROOT / "CMakeLists.txt").read_text())
    assert {*named, *sources, "pyproject.toml", "CMakeLists.txt"} <= copied()
    assert "serve" in project["project"]["optional-dependencies"]


def test_the_image_runs_the_server_where_it_says() -> None:
    found = dict(instructions())
    options = options_of(json.loads(found["ENTRYPOINT"])[1:])
    assert options.run is serve.run and int(found["EXPOSE"]) == options.port
    stages = re.findall(r"^FROM \S+ AS (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    used = re.findall(r"--from=(\w+)", (DEPLOY / "Dockerfile").read_text())
    assert set(used) <= set(stages)
    assert f":{options.port}/health" in found["HEALTHCHECK"]


def test_compose_names_files_volumes_and_secrets_that_are_there() -> None:
    found = compose()
    build = found["services"]["infinilm"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    for service in found["services"].values():
        for source, _, _ in (mount.partition(":") for mount in service.get("volumes", ())):
            is_there = (DEPLOY / source).is_file() if source.startswith(".") else source in found["volumes"]
            assert is_there, source
        assert set(service.get("secrets", ())) <= set(found["secrets"])
    environment = found["services"]["infinilm"]["environment"]
    assert {name for name in environment if name.startswith("INFINILM_")} <= option_names()


def test_what_compose_was_not_told_is_not_told_to_the_server() -> None:
    """An empty text would be the name of a model."""
    environment = compose()["services"]["infinilm"]["environment"]
    assert environment["INFINILM_MODEL"] is None and environment["HF_TOKEN"] is None


def test_compose_opens_ports_to_this_machine_alone() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


# ---- Prometheus and Grafana --------------------------------------------------------------------------------


def test_prometheus_asks_the_server_with_its_key() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"infinilm:{options_of(['serve']).port}"]}]
    key = compose()["services"]["infinilm"]["environment"]["INFINILM_API_KEY_FILE"]
    assert job["authorization"]["credentials_file"] == key
    assert job["job_name"] in json.dumps(dashboard())


def test_grafana_is_given_its_source_and_its_dashboard() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert variables["source"]["current"]["value"] == source["uid"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())["providers"]
    mounts = compose()["services"]["grafana"]["volumes"]
    assert any(
        mount.startswith(f"./grafana/infinilm.json:{provider['options']['path']}/") for mount in mounts
    )


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    with running(write_model(tmp_path / "tiny")) as server:
        server.http.get("/health")  # so that there is an answer to count
        text = server.http.get("/metrics").text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    panels = dashboard()["panels"]
    asked = {name for panel in panels for one in panel["targets"] for name in metrics_in(one["expr"])}
    assert len({panel["id"] for panel in panels}) == len(panels) and len(asked) > 20
    assert sorted(asked - known) == []


def metrics_in(query: str) -> list[str]:
    return re.findall(r"\b(?:vllm:|process_|http_)\w+", query)
