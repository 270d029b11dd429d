"""Requests to S3 and messages to the mailbox: a run with one engine at a local S3 server.

    python -m benchmarks.requests models/smollm2-135m-instruct.gguf --shards 10 40

The server is moto's. Of two sizes, the difference has what each further shard costs the driver and
its worker. An input file has ten shards in row groups; a shard has four short documents.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
from moto.server import ThreadedMotoServer

from pipeline.runtime.mailbox import Letter, Mailbox
from pipeline.sources.shards import ROW_WEIGHT_BYTES
from pipeline.spec.parse import spec_of
from pipeline.verbs.run import judged_run

SHARDS_A_FILE, ROWS, ROW_BYTES = 10, 4, 200
SHARD_BYTES = 3 * ROWS * (ROW_BYTES + ROW_WEIGHT_BYTES) // 2  # one row group, and not two
REQUEST = re.compile(r"([A-Z]+) /bucket-\d+/?([^ ]*) HTTP")


def counting_mailbox(file: Path) -> type[Mailbox]:
    """A mailbox that writes to the file how many reports it got, and how many only repeat one."""

    class CountingMailbox(Mailbox):
        def __init__(self) -> None:
            super().__init__()
            self._last: dict[str, Letter] = {}
            self._counts: Counter[str] = Counter()

        def put(self, letter: Letter) -> None:
            super().put(letter)
            is_repeat = self._last.get(letter.worker) == letter
            self._last[letter.worker] = letter
            self._counts["messages, repeats" if is_repeat else "messages, new"] += 1
            file.write_text(json.dumps(self._counts))

    return CountingMailbox


class Requests(logging.Handler):
    """Counts the requests in the server's log, by operation and the first folder of the key."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one line."""
        if match := REQUEST.search(record.getMessage()):
            method, key = match.groups()
            kind = "LIST" if "list-type" in key else "DELETE" if "?delete" in key else method
            self.counts[kind] += 1
            place = "input" if key.startswith("in/") else "output"
            self.counts[f"{kind} {place}"] += kind in ("GET", "HEAD")


def main() -> None:
    """Measures both sizes, and prints the counts for each further shard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file or model folder")
    parser.add_argument("--shards", type=int, nargs=2, default=[10, 40])
    options = parser.parse_args()
    server, requests = ThreadedMotoServer("127.0.0.1", port=0), Requests()
    log = logging.getLogger("werkzeug")
    log.setLevel(logging.INFO)
    log.addHandler(requests)
    log.propagate = False
    server.start()
    _, port = server.get_host_and_port()
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "made-up")
    os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_REGION="us-east-1", **keys)
    few, many = (_measure(options.model, shards, requests) for shards in options.shards)
    between = options.shards[1] - options.shards[0]
    for name in sorted(many):
        print(f"{name:18} {(many[name] - few[name]) / between:8.2f} for each further shard")
    server.stop()


def _measure(model: str, shards: int, requests: Requests) -> Counter[str]:
    """The requests and messages of a run of this number of shards."""
    bucket, client = f"bucket-{shards}", boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    for number in range(shards // SHARDS_A_FILE):
        ids = [f"{number}-{row}" for row in range(SHARDS_A_FILE * ROWS)]
        texts = [f"{each} {'word ' * ROW_BYTES}"[:ROW_BYTES] for each in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), file := io.BytesIO(), ROWS)
        client.put_object(Bucket=bucket, Key=f"in/{number:08d}.parquet", Body=file.getvalue())
    requests.counts.clear()
    with TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        content = {
            "name": "requests",
            "model": {"path": str(Path(model).absolute()), "device": "cpu", "threads": 1},
            "input": {"path": f"s3://{bucket}/in", "id": "id", "shard_bytes": SHARD_BYTES},
            "output": f"s3://{bucket}/out",
            "tasks": [{"name": n, "question": "?", "labels": ["yes", "no"]} for n in ("a", "b")],
        }
        mailbox = folder / "mailbox.json"
        with patch("pipeline.runtime.watch.Mailbox", counting_mailbox(mailbox)):
            outcome = judged_run(spec_of(content), cache_dir=folder / "cache")
        assert outcome.complete and outcome.shards == shards, outcome
        counts = requests.counts + Counter(json.loads(mailbox.read_text()))
        print(f"{shards} shards in {time.monotonic() - started:.0f} s: {json.dumps(counts)}")
    return counts


if __name__ == "__main__":
    main()
