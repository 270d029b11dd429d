"""Workers that cannot go on, and the nodes that are left out because no worker can load there.

Entry points: `end_worker` on a worker, `where_able` and `left_out` in the driver. Must not import
torch.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from pipeline.errors import AssayError, LoadError, ModelError, StorageError, WorkerError
from pipeline.runtime.job import Job
from pipeline.runtime.mailbox import Post, Sender
from pipeline.runtime.reading import output_of
from pipeline.runtime.session import NODE_ID, elsewhere, nodes_with

REPORT_TIMEOUT_S = 10.0
KILL_S = 10.0  # Ray takes less to end an actor that it is to kill


def end_worker(error: WorkerError, post: Post) -> None:
    """Reports the error, and ends this process; Ray starts another, with the same work.

    A worker that cannot load stays ended, and its shard is labelled in the next round.
    """
    if isinstance(error, LoadError):
        Sender(post).end(error.reason, starts_again=False)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        time.sleep(KILL_S)  # — Ray reports a process that ends itself as an unexpected death
    else:
        Sender(post).end(ModelError(str(error)))
    os.kill(os.getpid(), signal.SIGKILL)


def where_able(job: Job, post: Post | None) -> dict[str, Any]:
    """Ray's arguments of a stage, with which it runs on no node that is left out."""
    if post is not None and job.run.shown:
        # — also of the nodes that only read or commit
        look = ray.remote(num_cpus=0)(look_for_output)
        ids = {node["NodeID"] for node in nodes_with("CPU")} - post.unable
        selectors = [{NODE_ID: id} for id in ids]
        looked = [look.options(label_selector=each).remote(job, post) for each in selectors]
        with suppress(RayError):  # — a worker that begins there later looks, too
            ray.get(looked, timeout=REPORT_TIMEOUT_S)
    without, is_all = left_out(post)
    unable = job.run.unable
    return elsewhere(unable if is_all else unable | without.keys())


def look_for_output(job: Job, post: Post) -> None:
    """Reports why this node is left out, if its output is not that of the driver."""
    try:
        output_of(job)
    except StorageError as error:
        Sender(post).end(error, starts_again=False)


def left_out(post: Post | None) -> tuple[dict[str, AssayError], bool]:
    """By the id of a node, why a worker could not load there; and whether that is every node."""
    left_out: dict[str, AssayError] = {}
    if post is not None:
        with suppress(RayError):
            left_out = ray.get(post.mailbox.left_out.remote(), timeout=REPORT_TIMEOUT_S)
    nodes = {""}
    if post is not None and left_out:
        nodes = {node["NodeID"] for node in nodes_with("CPU")} - post.unable
    return left_out, left_out.keys() >= nodes
