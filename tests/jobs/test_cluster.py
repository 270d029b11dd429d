"""cluster.yaml is what Ray and EC2 take, without asking either; no key in it can be misspelt.

Ray's schema lets anything pass in `provider`, below `node_config` and in commands. Those are
checked with botocore's description of RunInstances and the options of `ray start` itself.
"""

from __future__ import annotations

import copy
import shlex
import socket
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import click
import jsonschema
import pytest
import yaml
from botocore.exceptions import ParamValidationError
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

CLUSTER = Path(__file__).parents[2] / "cluster.yaml"
# Those of `provider` that Ray's AWS provider reads, and of `resources` that Ray fills in itself.
PROVIDER = {"type", "region", "availability_zone", "cache_stopped_nodes", "security_group"}
RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}
REFUSALS = (
    jsonschema.ValidationError,
    ParamValidationError,
    click.UsageError,
    ValueError,
    KeyError,
    AssertionError,  # Ray's own, for half of a Docker configuration
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("the check asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
    return loaded


def check(config: dict[str, Any]) -> None:
    """Raises one of REFUSALS for what Ray or EC2 would not take."""
    validate_config(prepare_config(copy.deepcopy(config)))
    _known("provider", config["provider"], PROVIDER)
    for name, node_type in config["available_node_types"].items():
        _known(name, node_type["resources"], RESOURCES)
        _check_request("RunInstances", {**node_type["node_config"], "MinCount": 1, "MaxCount": 1})
    permissions = config["provider"]["security_group"]["IpPermissions"]
    _check_request("AuthorizeSecurityGroupIngress", {"IpPermissions": permissions})
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[part]:
            words = shlex.split(command)
            if words[:2] == ["ray", "start"]:
                start.make_context("start", words[2:])


def _known(place: str, mapping: dict[str, Any], keys: set[str]) -> None:
    if unknown := set(mapping) - keys:
        raise KeyError(f"{place}: {unknown}")


@cache
def ec2() -> ServiceModel:
    return botocore.session.get_session().get_service_model("ec2")


def _check_request(operation: str, parameters: dict[str, Any]) -> None:
    report = ParamValidator().validate(parameters, ec2().operation_model(operation).input_shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())


def test_ray_and_ec2_accept_the_cluster_file() -> None:
    check(content())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_worker",), 8),
        (("provider", "regoin"), "us-west-2"),
        (("available_node_types", "gpu", "node_config", "ImageID"), "ami-0"),
        (("max_workers",), "8"),
        (("head_node_type",), "heads"),
        (("available_node_types", "gpu", "resources", "GPU"), "1"),
        (("available_node_types", "gpu", "node_config", "InstanceType"), 7),
        (("head_start_ray_commands", 1), "ray start --head --dashbord-host=127.0.0.1"),
    ],
)
def test_a_misspelt_key_and_a_wrong_value_are_refused(
    path: tuple[str | int, ...], value: object
) -> None:
    config = content()
    holder: Any = config
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    with pytest.raises(REFUSALS):
        check(config)


def test_the_head_is_on_demand_without_tasks_and_the_workers_are_spot() -> None:
    config = prepare_config(content())
    head, gpu = (config["available_node_types"][name] for name in ("head", "gpu"))
    assert head["resources"] == {"CPU": 0} and head["max_workers"] == 0
    assert "InstanceMarketOptions" not in head["node_config"]
    assert gpu["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert gpu["min_workers"] == 0 and gpu["resources"]["GPU"] == 1


def test_the_cluster_requires_a_token_and_its_dashboard_is_local() -> None:
    config = prepare_config(content())
    options = config["docker"]["run_options"]
    assert "--env RAY_AUTH_MODE=token" in options
    (path,) = [o.partition("=")[2] for o in options if "RAY_AUTH_TOKEN_PATH" in o]
    assert config["file_mounts"] == {path: "~/.ray/auth_token"}
    assert "RAY_AUTH_TOKEN=" not in CLUSTER.read_text()
    (command,) = [c for c in config["head_start_ray_commands"] if "--head" in c]
    head_options = start.make_context("start", shlex.split(command)[2:]).params
    assert head_options["dashboard_host"] == "127.0.0.1" and head_options["head"] is True
