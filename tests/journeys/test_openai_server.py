"""llama.cpp's own server answers in place of assay's engine: killed, continued, and compared.

`pip install 'llama-cpp-python[server]'` compiles the server, which this test needs.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
from person import Person, comments

from pipeline.verbs.exactness import HALF_MAX, HALF_MEAN

HAS_SERVER = find_spec("llama_cpp") is not None and find_spec("uvicorn") is not None
ROWS = 40
SPEC = """\
name: remote
model: {engine: openai, base_url: "URL/v1", path: small, concurrency: 2}
input: {path: in.jsonl, id: id, shard_bytes: 4000}
output: by-server
tasks:
  - name: toxic
    question: "Is this comment toxic? Answer Yes or No."
    labels: {toxic: ["Yes"], clean: ["No"]}
"""


@contextmanager
def llama_server(model: str) -> Iterator[str]:
    """The URL of llama.cpp's server with a GGUF file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--model", model, "--model_alias", "small", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--n_ctx", "2048", "--logits_all", "true", "--n_threads", "2"]
    process = subprocess.Popen([sys.executable, "-m", "llama_cpp.server", *words])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SERVER, reason="llama-cpp-python[server] is not installed here")
@pytest.mark.xdist_group("ray")
def test_llama_cpp_s_server_answers_as_assay_does_up_to_its_rounding(person: Person) -> None:
    rows = [row for row in comments(3 * ROWS) if len(row["text"]) < 300][:ROWS]
    lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in rows]
    person.writes("in.jsonl", "\n".join(lines))
    with llama_server(str(person.folder / "smollm2.gguf")) as url:
        person.writes("server.yaml", SPEC.replace("URL", url))
        assert "not exact: a server answers" in person.types("assay check server.yaml").out
        labels = person.folder / "by-server" / "labels"
        person.kills("assay run server.yaml", once=lambda: list(labels.rglob("*.parquet")))
        printed = person.types("assay run server.yaml").out
        assert re.search(r"not returned +\d+\.\d+%", printed)
        person.types("assay verify server.yaml")
    person.writes("assay.yaml", SPEC)
    own = "model: {path: smollm2.gguf, dtype: float32}"
    model = next(line for line in SPEC.splitlines() if line.startswith("model:"))
    person.edits("assay.yaml", (model, own), ("by-server", "by-assay"))
    person.types("assay run assay.yaml")
    for name in ("server", "assay"):
        person.types(f"assay export {name}.yaml --to {name}.csv")
    by_server, by_assay = (
        np.array([float(row["toxic_p_toxic"]) for row in person.reads_csv(f"{name}.csv")])
        for name in ("server", "assay")
    )
    # — llama.cpp rounds activations to 8 bits, for which a check allows as much. " Yes" and "Y"
    #   count there, too: with a chat template, these are rare beginnings
    difference = np.abs(by_server - by_assay)
    print(f"|dp| at most {difference.max():.3f}, {difference.mean():.4f} on average")
    assert len(difference) == ROWS and np.corrcoef(by_server, by_assay)[0, 1] > 0.9
    assert difference.max() <= HALF_MAX["int8"] and difference.mean() <= HALF_MEAN["int8"]
