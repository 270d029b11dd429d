"""Kubernetes accepts the manifests, and their references to each other are right.

Kubernetes' own kinds are validated with its published schemas, strictly: no unknown key. KubeRay's
schemas are in no package registry, so that RayJob is held to the list of its fields below (KubeRay
1.5's, by its reference), and the pod templates within are validated as Kubernetes' own.
"""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import start

from pipeline.cli import app
from pipeline.cli.verbs import run

FOLDER = Path(__file__).parents[2] / "jobs" / "k8s"
VERSION = "1.34"
REFUSALS = (jsonschema.ValidationError, kubernetes_validate.utils.ValidationError, ValueError)
# The keys that each part of a RayJob may have, and must have.
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "RayJob": ({"apiVersion", "kind", "metadata", "spec"}, {"apiVersion", "kind", "spec"}),
    "spec": (
        {
            *("activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate"),
            *("metadata", "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy"),
            *("entrypoint", "runtimeEnvYAML", "jobId", "submissionMode", "entrypointResources"),
            *("entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished"),
            *("shutdownAfterJobFinishes", "suspend"),
        },
        {"entrypoint", "rayClusterSpec"},
    ),
    "rayClusterSpec": (
        {
            *("authOptions", "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations"),
            *("enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
            *("rayVersion", "workerGroupSpecs", "upgradeStrategy"),
        },
        {"headGroupSpec", "rayVersion"},
    ),
    "authOptions": ({"mode"}, {"mode"}),
    "autoscalerOptions": (
        {
            *("resources", "image", "imagePullPolicy", "securityContext", "idleTimeoutSeconds"),
            *("upscalingMode", "version", "env", "envFrom", "volumeMounts"),
        },
        set(),
    ),
    "headGroupSpec": (
        {
            *("template", "headService", "enableIngress", "resources", "labels"),
            *("rayStartParams", "serviceType"),
        },
        {"template"},
    ),
    "workerGroupSpec": (
        {
            *("suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "resources"),
            *("idleTimeoutSeconds", "labels", "rayStartParams", "template", "scaleStrategy"),
            *("numOfHosts",),
        },
        {"groupName", "maxReplicas", "minReplicas", "template"},
    ),
}


def documents() -> dict[str, dict[str, Any]]:
    """Every object, by its kind and name."""
    objects = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        for content in yaml.safe_load_all(file.read_text()):
            name = content["metadata"].get("name") or content["metadata"]["generateName"]
            objects[f"{content['kind']}/{name}"] = content
    return objects


DOCUMENTS = documents()
RAY_JOB = "RayJob/assay-"


def check(content: dict[str, Any]) -> None:
    """Raises one of REFUSALS for what Kubernetes or KubeRay would not take."""
    if content["kind"] == "RayJob":
        _check_ray_job(content)
    else:
        kubernetes_validate.validate(content, VERSION, strict=True)


def _check_ray_job(content: dict[str, Any]) -> None:
    if content.get("apiVersion") != "ray.io/v1":
        raise ValueError(content.get("apiVersion"))
    cluster = _fields("spec", _fields("RayJob", content)["spec"])["rayClusterSpec"]
    _fields("rayClusterSpec", cluster)
    for part in ("authOptions", "autoscalerOptions"):
        _fields(part, cluster[part])
    groups = [_fields("headGroupSpec", cluster["headGroupSpec"])]
    groups += [_fields("workerGroupSpec", group) for group in cluster["workerGroupSpecs"]]
    for group in groups:
        options = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
        start.make_context("start", ["--head", *options])
        template = {"metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", **template}, VERSION, strict=True
        )


def _fields(part: str, content: dict[str, Any]) -> dict[str, Any]:
    allowed, required = FIELDS[part]
    if set(content) - allowed or required - set(content):
        raise ValueError(f"{part}: {set(content) - allowed} or without {required - set(content)}")
    return content


@pytest.mark.parametrize("name", DOCUMENTS)
def test_kubernetes_accepts_each_object(name: str) -> None:
    check(DOCUMENTS[name])


def test_there_is_one_of_each_that_a_schedule_needs() -> None:
    kinds = sorted(name.partition("/")[0] for name in DOCUMENTS)
    assert kinds == sorted(
        [*("RayJob", "CronJob", "NetworkPolicy"), *["ServiceAccount", "Role", "RoleBinding"] * 2]
    )


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (RAY_JOB, ("spec", "backoffLimit")),
        (RAY_JOB, ("spec", "rayClusterSpec", "authOptions", "mode")),
        (RAY_JOB, ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplicas")),
        (RAY_JOB, ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers")),
        (RAY_JOB, ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volumes")),
        ("CronJob/assay-nightly", ("spec", "concurrencyPolicy")),
        ("CronJob/assay-nightly", ("spec", "startingDeadlineSeconds")),
        ("NetworkPolicy/assay", ("spec", "ingress")),
        ("Role/assay-schedule", ("rules", 0, "verbs")),
    ],
)
def test_a_misspelt_key_is_refused(name: str, path: tuple[str | int, ...]) -> None:
    content = copy.deepcopy(DOCUMENTS[name])
    holder: Any = content
    for part in path[:-1]:
        holder = holder[part]
    holder[f"{path[-1]}s"] = holder.pop(path[-1])
    with pytest.raises(REFUSALS):
        check(content)


def pod_specs() -> Iterator[dict[str, Any]]:
    cluster = DOCUMENTS[RAY_JOB]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]
    yield DOCUMENTS["CronJob/assay-nightly"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def test_every_object_that_is_named_exists() -> None:
    namespaces = {content["metadata"]["namespace"] for content in DOCUMENTS.values()}
    assert namespaces == {"labels"}
    for pod in pod_specs():
        assert f"ServiceAccount/{pod['serviceAccountName']}" in DOCUMENTS
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert not container.get("env")
    for name, content in DOCUMENTS.items():
        if name.startswith("RoleBinding/"):
            assert f"Role/{content['roleRef']['name']}" in DOCUMENTS
            for subject in content["subjects"]:
                assert f"ServiceAccount/{subject['name']}" in DOCUMENTS


def test_the_schedule_never_runs_twice_at_once_and_may_create_what_it_creates() -> None:
    cron = DOCUMENTS["CronJob/assay-nightly"]["spec"]
    assert cron["concurrencyPolicy"] == "Forbid" and cron["startingDeadlineSeconds"] > 0
    (rule,) = DOCUMENTS["Role/assay-schedule"]["rules"]
    assert rule["resources"] == ["rayjobs"] and {"create", "get"} <= {*rule["verbs"]}
    (pod,) = [pod for pod in pod_specs() if pod["serviceAccountName"] == "assay-schedule"]
    (volume,) = pod["volumes"]
    script = pod["containers"][0]["args"][0]
    assert "--filename=/job/rayjob.yaml" in script
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/job"
    assert (
        f"create configmap {volume['configMap']['name']} " in (FOLDER / "cronjob.yaml").read_text()
    )
    run = DOCUMENTS[RAY_JOB]["spec"]
    assert cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] > run["activeDeadlineSeconds"]


@pytest.mark.parametrize(
    "states, code",
    [
        (["Running", "no answer", "Running", "Complete"], 0),
        (["Running", "Failed"], 1),
        (["", "ValidationFailed"], 1),
    ],
)
def test_the_schedule_waits_for_the_runs_end_and_has_its_exit_code(
    states: list[str], code: int, tmp_path: Path
) -> None:
    """With a kubectl that gives one state after the other, and nothing more at the end."""
    (pod,) = [pod for pod in pod_specs() if pod["serviceAccountName"] == "assay-schedule"]
    for number, state in enumerate(states, 1):
        (tmp_path / f"state{number}").write_text(state)
    executable(tmp_path / "sleep", "exit 0")
    executable(
        tmp_path / "kubectl",
        f"""cd {tmp_path}
        [ "$1" = create ] && echo rayjob/assay && exit 0
        echo asked >> asked; now=state$(wc -l < asked | tr -d ' ')
        [ -e "$now" ] || exec kill $PPID
        [ "$(cat "$now")" != "no answer" ] || exit 1
        cat "$now\"""",
    )
    command = [*pod["containers"][0]["command"], *pod["containers"][0]["args"]]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(command, env=path, capture_output=True, text=True, timeout=30)
    assert ended.returncode == code, ended
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(states)
    assert not code or ended.stdout.splitlines()[-1] == f"rayjob/assay: {states[-1]}"


def executable(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_the_policy_is_of_the_runs_pods() -> None:
    policy = DOCUMENTS["NetworkPolicy/assay"]["spec"]
    cluster = DOCUMENTS[RAY_JOB]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= labels
    assert cluster["authOptions"]["mode"] == "token"


def test_the_entrypoint_is_a_command_of_assay() -> None:
    program, *words = shlex.split(DOCUMENTS[RAY_JOB]["spec"]["entrypoint"])
    command, bound, _ = app.parse_args(words)
    assert program == "assay" and command is run and bound.arguments["address"] == "auto"
    (head, *_) = pod_specs()
    (mount,) = head["containers"][0]["volumeMounts"]
    assert bound.arguments["spec_file"].startswith(f"{mount['mountPath']}/")
