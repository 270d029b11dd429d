"""A cluster of two nodes with a token, on the loopback interface: joined, and submitted to."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from local_cluster import free_port, status, wait_until
from person import Person, comments

SPEC = """\
name: NAME
model: {path: FOLDER/smollm2.gguf, dtype: float32}
input: {path: FOLDER/data, id: id}
output: FOLDER/out/NAME
documents: {max_tokens: 64}
tasks:
  - name: sport
    question: "Is this comment about sport? Answer yes or no."
    labels: {sport: ["Yes", "yes"], other: ["No", "no"]}
"""
FILES, ROWS = 4, 10


@pytest.fixture
def ports(person: Person) -> Iterator[tuple[int, int]]:
    """The ports of the cluster and of its Job API; its token is in the folder."""
    token = secrets.token_hex(16)
    person.writes("auth_token", token)
    port, dashboard, client = (free_port() for _ in range(3))
    # — its sockets are below, and a socket's path is at most 107 characters
    temporary = Path(tempfile.mkdtemp(prefix="ray"))
    administrator = Person(
        person.folder,
        person.home,
        variables={
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(person.folder / "auth_token"),
        },
    )
    head = (
        f"ray start --head --block --node-ip-address=127.0.0.1 --port={port} "
        f"--dashboard-host=127.0.0.1 --dashboard-port={dashboard} "
        f"--ray-client-server-port={client} --dashboard-agent-listen-port=0 "
        f"--num-cpus=2 --disable-usage-stats --object-store-memory=100000000 "
        f"--temp-dir={temporary}"
    )
    node = (
        f"ray start --address=127.0.0.1:{port} --block --num-cpus=1 --disable-usage-stats "
        f"--object-store-memory=100000000"
    )
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        stack.enter_context(administrator.runs_beside(head))
        address = f"http://127.0.0.1:{dashboard}"
        wait_until(lambda: status(f"{address}/api/jobs/") == 401)
        stack.enter_context(administrator.runs_beside(node))
        wait_until(lambda: nodes_at(address, token) == 2)
        yield port, dashboard


def nodes_at(address: str, token: str) -> int:
    request = urllib.request.Request(
        f"{address}/api/v0/nodes", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        nodes = json.load(answer)["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in nodes)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_on_a_cluster_with_a_token(person: Person, ports: tuple[int, int]) -> None:
    port, dashboard = ports
    (person.folder / "data").mkdir()
    for number in range(FILES):
        lines = [json.dumps(row) for row in comments(ROWS, start=number * ROWS)]
        person.writes(f"data/{number}.jsonl", "\n".join(lines))
    for name in ("joined", "submitted"):
        text = SPEC.replace("NAME", name).replace("FOLDER", str(person.folder))
        person.writes(f"{name}.yaml", text)

    joined = f"assay run joined.yaml --address 127.0.0.1:{port}"
    without_token = person.types(joined, code=4)
    assert "RAY_AUTH_TOKEN" in without_token.err.splitlines()[-1] and without_token.seconds < 30
    submitted = f"assay run submitted.yaml --address http://127.0.0.1:{dashboard}"
    refused = person.types(submitted, code=4)
    assert "RAY_AUTH_TOKEN" in refused.err and len(refused.err.splitlines()) == 1

    token = "RAY_AUTH_TOKEN_PATH=$PWD/auth_token"
    for line in (joined, submitted):
        first = person.types(f"{token} {line}")
        assert re.search(rf"labelled now +{FILES * ROWS};", first.out)
        second = person.types(f"{token} {line}")
        assert re.search(r"labelled now +0;", second.out)
    tables = []
    for name in ("joined", "submitted"):
        assert "intact" in person.types(f"assay verify {name}.yaml").out
        person.types(f"assay export {name}.yaml --to {name}.csv")
        tables.append([(r["doc_id"], r["sport_p_sport"]) for r in person.reads_csv(f"{name}.csv")])
    assert tables[0] == tables[1] and len(tables[0]) == FILES * ROWS
