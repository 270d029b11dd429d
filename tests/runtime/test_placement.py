"""Where actors run, and in which number format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changing_corpus import Corpus
from finished import toy_spec

from pipeline.errors import SpecError
from pipeline.runtime.graph import shards_at_work
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.mailbox import STALL_LIMIT_S
from pipeline.runtime.placement import (
    PROCESS_BYTES,
    EngineBytes,
    Machine,
    Placement,
    cluster,
    engine_bytes,
    longest_batch_s,
    place,
    processor_formats,
    spread,
)
from pipeline.runtime.run import _spread
from pipeline.runtime.weights import ModelFiles
from pipeline.spec.model import ModelSpec
from pipeline.spec.schema import JobSpec

NARROW = frozenset({"float32", "bfloat16"})
OLD = Machine(gpus=(), cores=(8,))
NEW = Machine(gpus=(), cores=(8,), cpu_formats=NARROW)
BYTES = Machine(gpus=(), cores=(8,), cpu_formats=frozenset({"float32", "int8"}))
GPUS = Machine(gpus=(3, 1), cores=(16, 16))
OLD_GPUS = Machine(gpus=(1,), cores=(4,), cpu_formats=NARROW, gpu_formats=frozenset())
AMPERE = replace(GPUS, gpu_formats=frozenset({"bfloat16"}))


@pytest.mark.parametrize(
    ("model", "machine", "expected"),
    [
        ({}, OLD, Placement("cpu", "float32", actors=1, threads=8)),
        ({}, NEW, Placement("cpu", "bfloat16", actors=1, threads=8)),
        ({"dtype": "int8"}, BYTES, Placement("cpu", "float32", actors=1, threads=8)),
        ({"dtype": "bfloat16"}, OLD, Placement("cpu", "bfloat16", actors=1, threads=8)),
        ({"threads": 3}, OLD, Placement("cpu", "float32", actors=1, threads=3)),
        ({"threads": 9}, OLD, Placement("cpu", "float32", actors=1, threads=8)),
        ({}, GPUS, Placement("cuda", "bfloat16", actors=4, threads=1, gpus=1)),
        ({"dtype": "fp8"}, GPUS, Placement("cuda", "bfloat16", 4, threads=1, gpus=1)),
        ({"device": "cpu"}, GPUS, Placement("cpu", "float32", actors=2, threads=16)),
        ({}, OLD_GPUS, Placement("cuda", "float16", actors=1, threads=1, gpus=1)),
        (
            {"dtype": "float16", "threads": 2},
            GPUS,
            Placement("cuda", "float16", actors=4, threads=2, gpus=1),
        ),
        (
            {"engine": "vllm", "tensor_parallel": 2},
            Machine(gpus=(8, 3), cores=(16, 16)),
            Placement("cuda", "bfloat16", actors=5, threads=1, gpus=2),
        ),
    ],
)
def test_auto_takes_the_faster_number_format(
    model: dict[str, Any], machine: Machine, expected: Placement
) -> None:
    assert place(ModelSpec(path="m", **model), machine) == expected


@pytest.mark.parametrize(
    ("cpuinfo", "faster"),
    [
        ("GenuineIntel\nflags\t: avx2 avx512_vnni avx512_bf16 amx_int8 amx_bf16", {"bfloat16"}),
        ("GenuineIntel\nflags\t: avx2 avx512_vnni avx512_bf16", {"int8"}),
        ("GenuineIntel\nflags\t: avx2 avx_vnni", {"int8"}),
        ("AuthenticAMD\nflags\t: avx2 avx512_vnni avx512_bf16", {"bfloat16", "int8"}),
        ("AuthenticAMD\nflags\t: avx2", set()),
        ("\nFeatures\t: fp asimd i8mm bf16\nCPU implementer\t: 0x41", {"bfloat16", "int8"}),
        ("\nFeatures\t: fp asimd\nCPU implementer\t: 0x41", set()),
    ],
)
def test_a_processors_flags_give_the_formats_that_are_faster_than_float32(
    cpuinfo: str, faster: set[str], tmp_path: Path
) -> None:
    vendor = "vendor_id\t: " if cpuinfo[0] != "\n" else ""
    (file := tmp_path / "cpuinfo").write_text(f"{vendor}{cpuinfo}\n")
    assert processor_formats(file) == {"float32", *faster}
    assert processor_formats(tmp_path / "none") == {"float32", "int8"}


SHARED = {"engine": "vllm", "tensor_parallel": 4}


@pytest.mark.parametrize(
    ("model", "machine", "error"),
    [
        ({"device": "cuda"}, OLD, r"model\.device: there is no GPU here"),
        (SHARED, GPUS, r"model\.tensor_parallel: .*more than 3 GPUs; write at most that"),
        (SHARED, OLD, r"model\.tensor_parallel: no GPUs are here .* write 1"),
        ({"dtype": "int8"}, OLD, "not faster .* have float32 at speed; write auto"),
        ({"dtype": "int8"}, NEW, "not faster .* have bfloat16 at speed; write auto"),
        ({"dtype": "int8"}, GPUS, "for CPUs; on GPUs write fp8 .* or auto"),
        ({"dtype": "fp8"}, AMPERE, r"needs GPUs of compute capability 8\.9 or later; write auto"),
        ({"dtype": "fp8"}, BYTES, "needs a GPU, and the model runs on CPUs; write auto, or int8"),
        ({"dtype": "fp8"}, replace(GPUS, gpus=()), "needs a GPU"),
    ],
)
def test_what_a_machine_lacks_or_does_not_do_faster_is_a_spec_error(
    model: dict[str, Any], machine: Machine, error: str
) -> None:
    expected = rf"model\.dtype: {error}" if "dtype" in model else error
    with pytest.raises(SpecError, match=expected):
        place(ModelSpec(path="m", **model), machine)


def test_a_cluster_is_as_wide_as_its_smallest_node_with_processors() -> None:
    machine = cluster(
        [{"CPU": 0.0}, {"CPU": 16.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}], cpu_formats=NARROW
    )
    assert (machine.gpus, machine.cores) == ((1, 2), (16, 8))
    assert machine.gpu_formats == {"bfloat16", "fp8"} and machine.cpu_formats == NARROW
    assert place(ModelSpec(path="m", device="cpu"), machine).threads == 8


def test_one_node_with_an_older_card_decides_for_the_cluster() -> None:
    def dtype_on(*cards: str, **model: str) -> str:
        nodes = [{"CPU": 8.0, "GPU": 1.0, f"accelerator_type:{name}": 1.0} for name in cards]
        machine = cluster(nodes, cpu_formats=NARROW)
        return place(ModelSpec.model_validate({"path": "m", **model}), machine).dtype

    assert (dtype_on("H100"), dtype_on("H100", "T4")) == ("bfloat16", "float16")
    assert dtype_on("L4", dtype="fp8") == "bfloat16"
    with pytest.raises(SpecError, match=r"model\.dtype: needs GPUs"):
        dtype_on("L4", "A100", dtype="fp8")


SMALL = EngineBytes(weights=0, own=1, max_tokens=1)


def engines(
    cores: tuple[int, ...], items: int, memory: float = 1e9, **model: Any
) -> tuple[int, int]:
    spec, machine = ModelSpec(path="m", **model), Machine((), cores, memory_bytes=memory)
    placed = spread(place(spec, machine), spec, machine, work_items=items, needs=[SMALL])
    return placed.actors, placed.threads


@pytest.mark.parametrize(
    ("cores", "items", "expected"),
    [
        # — enough work: one thread each
        ((1,), 1, (1, 1)),
        ((2,), 100, (2, 1)),
        ((64,), 10_000, (64, 1)),
        ((16, 64), 10_000, (80, 1)),
        # — fewer items than cores: more threads, so that no core idles
        ((2,), 1, (1, 2)),
        ((16,), 1, (1, 16)),
        ((16,), 4, (4, 4)),
        ((64,), 8, (8, 8)),
        ((16, 16), 2, (2, 16)),
    ],
)
def test_engines_have_the_fewest_threads_that_keep_all_cores_at_work(
    cores: tuple[int, ...], items: int, expected: tuple[int, int]
) -> None:
    assert engines(cores, items) == expected


@pytest.mark.parametrize("cores", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("items", [1, 2, 5, 17, 300])
@pytest.mark.parametrize("memory", [1, 3, 100])
def test_threads_times_engines_exceed_neither_the_cores_nor_the_memory(
    cores: int, items: int, memory: int
) -> None:
    for threads in ("auto", *range(1, cores + 1)):
        count, each = engines((cores,), items, memory, threads=threads)
        assert 1 <= count * each <= cores and count <= memory
        assert threads in ("auto", each)
        # — Ray starts as many on a node that comes later
        assert threads != "auto" or cores // each <= memory


GIB = 1024**3
# Qwen2.5-1.5B, of which a token needs 46 kB in attention, beside 56 kB of keys and values.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1_536,
    "intermediate_size": 8_960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "vocab_size": 151_936,
}


def needs_of(
    folder: Path,
    config: dict[str, Any],
    max_tokens: int,
    *,
    beam: int | None = None,
    system: str = "",
    **model: Any,
) -> EngineBytes:
    (folder / "config.json").write_text(json.dumps(config))
    question = {"question": "Is it rude? " * 9, "labels": ["yes", "no"], "beam": beam}
    content = toy_spec(
        folder,
        model={"path": str(folder), **model},
        documents={"max_tokens": max_tokens},
        prompt={"system": system},
        tasks=[{"name": "rude", **question}],
    )
    spec = JobSpec.model_validate(content)
    files = ModelFiles("folder", str(folder), None, {}, 2 * GIB)
    return engine_bytes(spec, files, "bfloat16")


@pytest.mark.parametrize(
    ("model", "gib", "expected"),
    [
        ({}, 100, (16, 1)),
        ({}, 7.5, (4, 4)),  # 2 GiB of weights, which all engines share
        ({"dtype": "int8"}, 7.5, (2, 8)),  # rounded weights are not shared
        ({"threads": 4}, 100, (4, 4)),
        ({"threads": 4}, 4.5, (2, 4)),
    ],
)
def test_no_more_engines_than_fit_into_memory(
    model: dict[str, Any], gib: float, expected: tuple[int, int], tmp_path: Path
) -> None:
    machine = replace(BYTES, cores=(16,), memory_bytes=gib * GIB)
    spec, needs = ModelSpec(path="m", **model), needs_of(tmp_path, QWEN, 2_048, **model)
    placed = spread(place(spec, machine), spec, machine, work_items=1_000, needs=[needs])
    assert (placed.actors, placed.threads) == expected


@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "with images"])
@pytest.mark.parametrize("max_tokens", [2_048, 32_768, 131_072])
def test_engines_for_long_documents_never_take_more_than_the_machine_has(
    max_tokens: int, wrapped: bool, tmp_path: Path
) -> None:
    needs = needs_of(tmp_path, {"text_config": QWEN} if wrapped else QWEN, max_tokens)
    # — hidden states, queries and what they attended, keys and values, a head of them in the
    # layout of the products, and the rotary embedding
    activations = max_tokens * (1_536 + 2 * 12 * 128 + 2 * 2 * 128 + 2 * 128 + 2 * 128) * 2
    assert activations < needs.own - PROCESS_BYTES < 1.5 * activations + 0.5 * GIB
    spec = ModelSpec(path="m")
    for gib in (4, 8, 16, 64, 256):
        machine = Machine(gpus=(), cores=(64,), memory_bytes=gib * GIB)
        if needs.weights + needs.own > machine.memory_bytes:
            with pytest.raises(SpecError, match=r"documents\.max_tokens: .* GB .*are available"):
                spread(place(spec, machine), spec, machine, work_items=9_000, needs=[needs])
            continue
        placed = spread(place(spec, machine), spec, machine, work_items=9_000, needs=[needs])
        assert placed.actors >= 1 and placed.cores <= 64
        assert needs.weights + placed.actors * needs.own <= machine.memory_bytes


def test_a_search_needs_the_keys_and_values_of_its_document(tmp_path: Path) -> None:
    searched, other = (needs_of(tmp_path, QWEN, 32_768, beam=beam).own for beam in (4, None))
    kept = 32_768 * 28 * 2 * 2 * 128 * 2
    assert kept < searched - other < 1.3 * kept


def test_a_long_prefix_is_planned_as_the_forward_that_reads_it(tmp_path: Path) -> None:
    """As one batch of 40,000 tokens, whose keys and values are kept."""
    long = needs_of(tmp_path, QWEN, 2_048, system="abc" * 40_000).own
    document = needs_of(tmp_path, QWEN, 40_000).own
    kept = 40_000 * 28 * 2 * 2 * 128 * 2
    assert kept < long - document < 1.3 * kept


@pytest.mark.parametrize("max_tokens", [2_048, 32_768])
def test_a_model_that_does_not_state_its_sizes_is_planned_by_its_weights(
    max_tokens: int, tmp_path: Path
) -> None:
    stated, unknown = (needs_of(tmp_path, config, max_tokens).own for config in (QWEN, {}))
    assert 0.8 * stated < unknown < 2.5 * stated


def test_a_batch_of_a_large_model_may_take_longer_than_the_usual_silence_of_a_worker() -> None:
    on_cpu = Placement("cpu", "bfloat16", 1, 2)
    small, large = (longest_batch_s(size, 512, on_cpu) for size in (138_000_000, 16_000_000_000))
    assert small < STALL_LIMIT_S < large < 24 * 3_600
    assert longest_batch_s(16_000_000_000, 8_192, on_cpu) > 3 * large
    on_gpu = Placement("cuda", "bfloat16", 1, 1, gpus=1)
    assert longest_batch_s(16_000_000_000, 8_192, on_gpu) == 0


def job_of_two(corpus: Corpus, other: dict[str, Any]) -> Job:
    """A job of a model with 12 GB of weights in float32, and of another one with 1 GB."""
    corpus.write("a", ["a text"])
    job = make_job(corpus.spec, Placement("cpu", "float32", 1, 1), corpus.cache)
    [reader] = job.readers
    model = reader.spec.model.model_copy(update=other)
    spec = reader.spec.model_copy(update={"model": model})
    big = replace(reader, files=replace(reader.files, size_bytes=6_000_000_000))
    small = replace(reader, spec=spec, files=replace(reader.files, size_bytes=500_000_000))
    return replace(job, readers=(small, big))


@pytest.mark.parametrize(
    ("other", "memory_bytes", "expected"),
    [
        ({"revision": "other"}, 100e9, (8, 1)),
        ({"revision": "other"}, 15e9, (2, 4)),  # alone: 8 x 1 and 2 x 3
        ({"revision": "other", "threads": 3}, 100e9, (2, 3)),
        ({"engine": "openai"}, 100e9, (1, 8)),  # one client, and the cores are for the big one
    ],
)
def test_an_actor_with_two_models_has_one_number_of_threads_and_the_memory_of_both(
    other: dict[str, Any], memory_bytes: float, expected: tuple[int, int], plain: Corpus
) -> None:
    machine = replace(OLD, memory_bytes=memory_bytes)
    job = _spread(job_of_two(plain, other), machine, work_items=100)
    assert (job.placement.actors, job.placement.threads) == expected
    for reader in job.readers:
        assert (reader.placement.actors, reader.placement.threads) == expected


def test_a_server_beside_a_model_on_gpus_has_one_client(plain: Corpus) -> None:
    job = _spread(job_of_two(plain, {"engine": "openai"}), GPUS, work_items=100)
    assert (job.placement.actors, job.placement.gpus) == (1, 1)
    assert {reader.placement.actors for reader in job.readers} == {1}
    # — whose kept answers are those of one shard at a time
    server = job.spec.model_copy(update={"model": job.readers[0].spec.model})
    assert (shards_at_work(job), shards_at_work(replace(job, spec=server))) == (2, 1)


def test_two_models_of_which_only_one_fits_into_memory_are_a_spec_error(plain: Corpus) -> None:
    """At the place of the longest document, which may be of a stage alone."""
    job, machine = job_of_two(plain, {"revision": "other"}), replace(OLD, memory_bytes=13.5e9)
    for reader in job.readers:
        assert _spread(replace(job, readers=(reader,)), machine, work_items=100)
    of_stage = {"documents": "tasks.0.cascade.stages.1.documents"}
    readers = tuple(replace(own, places={**own.places, **of_stage}) for own in job.readers)
    expected = r"^tasks\.0\.cascade\.stages\.1\.documents\.max_tokens: .*takes 13\.8 GB "
    with pytest.raises(SpecError, match=f"{expected}.*13\\.0 GB are the weights of all"):
        _spread(replace(job, readers=readers), machine, work_items=100)
