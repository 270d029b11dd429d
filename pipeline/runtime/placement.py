"""Where the labelling actors run: device, number of actors, threads, number format.

Entry points: `place` for one engine a machine, and `spread` for as many engines as a run has work
and memory for, of the size that `engine_bytes` plans; `shard_bytes`. Must not import torch: the
driver decides this without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from pipeline.errors import Problem, SpecError
from pipeline.inference.memory import CPU_BATCH_TOKENS, ENCODER_BATCH_TOKENS, ModelShape
from pipeline.runtime.limits import available_bytes, usable_cores, usable_gpus
from pipeline.runtime.weights import ModelFiles, model_config
from pipeline.sources.shards import MAX_SHARD_BYTES
from pipeline.spec.model import ModelSpec
from pipeline.spec.schema import JobSpec

Resources = dict[str, float]  # of one Ray node, by name

# Flags of processors that multiply matrices of bfloat16 faster than of float32, by vendor; ARM's
# state none. Without either flag bfloat16 has about a hundredth of float32's rate. Intel's
# AVX512-BF16 without AMX has .6 of it (SmolLM2, Xeon of model 207); AMD's has 4 times float32's.
_FAST_BFLOAT16 = {
    "GenuineIntel": {"amx_bf16"},
    "AuthenticAMD": {"avx512_bf16", "amx_bf16"},
    "": {"bf16"},
}
# Flags of products of bytes. With AMX, bfloat16 is faster, and closer to float32.
_BYTES, _FASTER_THAN_BYTES = {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}, "amx_bf16"
# Ray's names for GPUs without products of a number format: those of before Ampere, and before Ada.
_OLD = ("K80", "P4", "P100", "V100", "T4")
_WITHOUT = {"bfloat16": _OLD, "fp8": (*_OLD, "A10", "A10G", "A30", "A40", "A100")}

# A process with torch, Ray and a shard, without weights and batches.
PROCESS_BYTES = 768 * 1024**2
# Numbers of a token in a layer, of a model of this many weights that does not state its sizes.
# They grow with the width, and so with the cube root of the weights.
_UNKNOWN_NUMBERS, _OF_WEIGHTS = 24_576, 1.5e9
# A token of a prompt has this many bytes of UTF-8 or more, in most languages.
_TOKEN_BYTES = 3
# A crash costs at most a shard: about a minute of one worker at these rates.
_SHARD_SECONDS = 60
_FLOPS = {"cpu": 100e9, "cuda": 200e12}
_LEAST_FLOPS = 5e9  # a second, of a thread of an old processor that is shared
_BYTES_PER_TOKEN = 4
_MIN_SHARD_BYTES = 32 * 1024
SERVER_SHARD_BYTES = 1024**2  # some hundred requests


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one machine, or of the nodes of a cluster."""

    gpus: tuple[int, ...]  # the usable number of each node that has any
    cores: tuple[int, ...]  # the usable number of each node that has any
    memory_bytes: float = inf  # that the node with the least memory has free
    cpu_formats: frozenset[str] = frozenset({"float32"})  # that each processor computes at speed
    gpu_formats: frozenset[str] = frozenset(_WITHOUT)  # in which all GPUs multiply
    grows: bool = False  # whether more machines come with the work
    unable: frozenset[str] = frozenset()  # ids of nodes that run nothing


@dataclass(frozen=True, slots=True)
class Placement:
    """How one labelling actor runs, and the number of actors."""

    device: str  # cpu | cuda
    dtype: str  # a torch dtype's name
    actors: int
    threads: int
    gpus: int = 0  # of one actor
    grows: bool = False  # whether more actors may start, as many as Ray has room for

    @property
    def cores(self) -> int:
        """The processor cores that the actors use together."""
        return self.actors * self.threads


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """The memory of one engine on a CPU."""

    weights: int
    own: int  # its process, its prefix and its longest document
    max_tokens: int  # of that document
    shares_weights: bool = True  # with the other engines of its machine
    place: str = "documents"  # the spec's key for the length of documents


def engine_bytes(
    spec: JobSpec, files: ModelFiles, dtype: str, place: str = "documents"
) -> EngineBytes:
    """What an engine of the spec's model takes, in a torch dtype, for documents of full length.

    `place` is the spec's key for their length.
    """
    weights, own, max_tokens = files.loaded_bytes(dtype), PROCESS_BYTES, spec.documents.max_tokens
    if files.kind not in ("none", "server"):
        least = ENCODER_BATCH_TOKENS if spec.uses_encoder else CPU_BATCH_TOKENS
        item_bytes = 4 if dtype == "float32" else 2
        asked = sum(len((task.question or "").encode()) for task in spec.model_parts)
        prefix = len(spec.prompt.model_dump_json().encode()) // _TOKEN_BYTES
        # — of the largest forward: a batch, a long document, or the prefix, which is read whole
        tokens = max(least, max_tokens + asked // _TOKEN_BYTES, prefix)
        try:
            config = model_config(files, spec.model.storage_options)
            shape = ModelShape.of(SimpleNamespace(**config), item_bytes=item_bytes, on_cpu=True)
            searches = any(part.beam is not None for part in spec.model_parts)
            # — a search keeps the document's keys and values, after a copy of the prefix's
            kept = prefix + searches * (prefix + max_tokens)
            own += shape.engine_bytes(kept_tokens=kept, tokens=tokens)
        except (AttributeError, OSError, ValueError):
            # — GGUF, or the family's defaults; the loader of the model reports what is wrong with a
            # file
            width = (weights / item_bytes / _OF_WEIGHTS) ** (1 / 3)
            own += int(tokens * item_bytes * _UNKNOWN_NUMBERS * width)
    # — rounded weights are rounded in each process
    return EngineBytes(weights, own, max_tokens, not spec.model.rounded_to, place)


def this_machine() -> Machine:
    """The cores, the memory and the GPUs that this process may use."""
    gpus = usable_gpus()
    return Machine(
        gpus=(gpus.count,) if gpus.count else (),
        cores=(usable_cores(),),
        memory_bytes=available_bytes(),
        cpu_formats=processor_formats(),
        gpu_formats=gpus.formats,
    )


def processor_formats(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The number formats that this machine's processors compute at speed.

    float32, and those of bfloat16 and int8 that are faster. int8 is also named where the system
    does not list the features of its processors: the model is then refused when it is loaded.
    """
    if not cpuinfo.exists():  # — which Linux alone has
        return frozenset({"float32", "int8"})
    lines = cpuinfo.read_text().splitlines()
    # — the last processor's; all have the same
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    # — x86 has `flags`, ARM has `Features`
    flags = set(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())
    formats = {"float32"}
    if not flags.isdisjoint(_FAST_BFLOAT16.get(facts.get("vendor_id", ""), ())):
        formats.add("bfloat16")
    if not flags.isdisjoint(_BYTES) and _FASTER_THAN_BYTES not in flags:
        formats.add("int8")
    return frozenset(formats)


def cluster(nodes: Sequence[Resources], *, cpu_formats: frozenset[str]) -> Machine:
    """The hardware of a Ray cluster's nodes, of which at least one has a processor."""
    working = [node for node in nodes if node.get("CPU", 0) >= 1]
    cards = {name.removeprefix("accelerator_type:") for node in nodes for name in node}
    return Machine(
        gpus=tuple(int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1),
        cores=tuple(int(node["CPU"]) for node in working) or (1,),
        memory_bytes=min([inf, *(node.get("memory", inf) for node in working)]),
        cpu_formats=cpu_formats,
        gpu_formats=frozenset(name for name, old in _WITHOUT.items() if cards.isdisjoint(old)),
    )


def place(model: ModelSpec, machine: Machine) -> Placement:
    """Where engines run: one a machine on CPUs, one for each `tensor_parallel` GPUs of a machine.

    On a CPU the engine has `model.threads` threads, or all cores. SpecError if the machine lacks
    what the spec requires.
    """
    if model.engine == "openai":  # — one actor, so that its requests and their price are bounded
        return Placement("cpu", model.dtype, actors=1, threads=1)
    if model.device == "cuda" and not machine.gpus:
        fix = "there is no GPU here; write device: auto or cpu"
        raise SpecError([Problem("model.device", fix, model.device)])
    on_gpu = bool(machine.gpus) and model.device != "cpu"
    if on_gpu:
        fastest = "bfloat16" if "bfloat16" in machine.gpu_formats else "float16"
    else:
        fastest = "bfloat16" if "bfloat16" in machine.cpu_formats else "float32"
    dtype = fastest if model.chooses_dtype else model.dtype
    formats = machine.gpu_formats if on_gpu else machine.cpu_formats
    if model.rounded_to and model.rounded_to not in formats:
        fix = {
            ("int8", True): "for CPUs; on GPUs write fp8 (compute capability 8.9 or later) or auto",
            ("int8", False): f"not faster on the processors here, which have {fastest} at speed; "
            "write auto",
            ("fp8", True): "needs GPUs of compute capability 8.9 or later; write auto",
            ("fp8", False): "needs a GPU, and the model runs on CPUs; write auto, or int8 (VNNI)",
        }[model.rounded_to, on_gpu]
        raise SpecError([Problem("model.dtype", fix, model.rounded_to)])
    if not on_gpu:
        if model.tensor_parallel > 1:
            fix = "no GPUs are here to share it; try where they are, or write 1"
            raise SpecError([Problem("model.tensor_parallel", fix, model.tensor_parallel)])
        nodes, cores = len(machine.cores), min(machine.cores)
        threads = cores if model.threads == "auto" else min(model.threads, cores)
        return Placement("cpu", dtype, actors=nodes, threads=threads)
    threads, gpus = 1 if model.threads == "auto" else model.threads, model.tensor_parallel
    if gpus > (largest := max(machine.gpus)):
        fix = f"no machine here has more than {largest} GPUs; write at most that"
        raise SpecError([Problem("model.tensor_parallel", fix, gpus)])
    actors = sum(of_node // gpus for of_node in machine.gpus)
    return Placement("cuda", dtype, actors, threads, gpus=gpus)


def spread(
    placement: Placement,
    model: ModelSpec,
    machine: Machine,
    *,
    work_items: int,
    needs: Sequence[EngineBytes],
) -> Placement:
    """A placement on CPUs with as many engines as fit into the cores and the memory of each node.

    `needs` are those of all models in one process, which read one after the other.

    With fewer work items than cores, and with little memory, an engine has several threads, so that
    all cores are at work. SpecError if not even one engine fits. vLLM is one engine of all cores,
    and a server has one actor.
    """
    if model.engine != "assay":
        return placement
    weights = sum(each.weights for each in needs)
    shared = sum(each.weights for each in needs if each.shares_weights)
    most = max(needs, key=attrgetter("own"))
    in_memory = (machine.memory_bytes - shared) / (weights - shared + most.own)
    if in_memory < 1:
        fix = (
            f"one engine takes {(weights + most.own) / 1e9:,.1f} GB with documents of this "
            f"length ({weights / 1e9:,.1f} GB are the weights of all its models), and "
            f"{machine.memory_bytes / 1e9:,.1f} GB are available; write a smaller number, or use a "
            "smaller model or a larger machine"
        )
        raise SpecError([Problem(f"{most.place}.max_tokens", fix, most.max_tokens)])
    smallest, threads = min(machine.cores), placement.threads
    fit = int(min(in_memory, smallest))
    if model.threads == "auto":
        threads = max(1, min(smallest, sum(machine.cores) // work_items), ceil(smallest / fit))
    engines = sum(
        max(1, min(cores // threads, int(min(in_memory, cores)))) for cores in machine.cores
    )
    return replace(placement, actors=engines, threads=threads)


def longest_batch_s(reader_bytes: int, max_tokens: int, placement: Placement) -> float:
    """The seconds that a batch of an engine on CPUs may take with a model of this size; GPUs: 0.

    An engine that labels for longer without a batch hangs.
    """
    if placement.gpus:
        return 0.0
    flops = reader_bytes * max(CPU_BATCH_TOKENS, max_tokens)  # two for each number of two bytes
    return flops / (_LEAST_FLOPS * placement.threads)


def shard_bytes(device: str, model_bytes: int) -> int:
    """The size of a shard in bytes of text: about a minute of one worker with this model."""
    tokens = _SHARD_SECONDS * _FLOPS[device] / (2 * max(1, model_bytes // 2))
    return int(min(MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, tokens * _BYTES_PER_TOKEN)))
