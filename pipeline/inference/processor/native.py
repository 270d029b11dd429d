"""The compiled kernels of this package.

Entry points: `formats`; `attend_into`; `normalise`, `rotate`, `gate` and `add`; `round_rows`.

The first process of a machine that needs them compiles them, which takes a second; they are kept in
a folder of the cache that only this user may write. Without a C++ compiler (`CXX`) or AVX-512 there
are none, and torch's own kernels take their place. `ASSAY_KERNELS=off` turns them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeline.cache import cache_dir

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")
_NEEDED = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_COMPILE_SECONDS = 120
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

ROUNDED_TOGETHER = 32  # columns that `round_rows` evens out with one another

log = logging.getLogger(__name__)


class _Shape(ctypes.Structure):
    """`Shape` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "queries", "keys")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64 * 3) for name in ("q", "k", "v", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("causal", "offset", "window", "merge", "threads")),
    ]


@cache
def formats() -> frozenset[torch.dtype]:
    """The number formats for which this machine has kernels; none without a compiler or AVX-512."""
    library = _library()
    if library is None:
        return frozenset()
    return frozenset(_NAMES if library.computes_bfloat16() else [torch.float32])


@cache
def _library() -> ctypes.CDLL | None:
    features = torch.cpu.get_capabilities()
    if os.environ.get("ASSAY_KERNELS") == "off" or not all(map(features.get, _NEEDED)):
        return None
    compiler = os.environ.get("CXX") or "c++"
    try:
        library = ctypes.CDLL(str(_compiled(compiler, features)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error).encode()
        reason = output.decode(errors="replace").strip().splitlines()[-1:]
        log.warning(
            "torch's kernels are used, which are slower: assay's need a C++ compiler, and %s "
            "gives: %s",
            compiler,
            *(reason or ["it printed nothing"]),
        )
        return None
    library.computes_bfloat16.restype = ctypes.c_bool
    return library


def _compiled(compiler: str, features: Mapping[str, object]) -> Path:
    """The compiled library, made unless it is in the cache; OSError if it is not only ours.

    `compiler` may have words before it, such as `ccache g++`.
    """
    sources = sorted(_FOLDER.glob("*.cpp")) + sorted(_FOLDER.glob("*.h"))
    known = hashlib.sha256(repr((compiler, _FLAGS, sorted(features.items()))).encode())
    for source in sources:
        known.update(source.read_bytes())
    folder = cache_dir() / f"kernels-{os.geteuid()}"
    library = folder / f"{known.hexdigest()[:20]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / library.name
            code = [str(source) for source in sources if source.suffix == ".cpp"]
            command = [*shlex.split(compiler), *_FLAGS, *code, "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, timeout=_COMPILE_SECONDS, cwd=temporary
            )
            made.chmod(0o700)
            made.replace(library)  # — processes may compile at once: the last one's stays
    for path in (folder, library):  # — who may write one of them would run code as this user
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} is of another user, or others may write it; delete it")
    return library


def _kernel(name: str) -> Any:
    library = _library()
    assert library is not None, f"{name} of a machine without kernels"
    return getattr(library, name)


def attend_into(
    out: Tensor,  # [batch, tokens, heads, dim]
    lse: Tensor,  # [batch, tokens, heads] fp32
    q: Tensor,  # [batch, tokens, heads, dim]
    k: Tensor,  # [batch, keys, kv_heads, dim]
    v: Tensor,  # [batch, keys, kv_heads, dim]
    *,
    scale: float,
    computed: torch.dtype,
    causal: bool = False,
    offset: int = 0,
    window: int | None = None,
    merge: bool = False,
) -> None:
    """Write attention and its log-sum-exp to `out` and `lse`.

    Args:
        scale: Factor of the scores.
        computed: The number format of the products: that of `q`, or bfloat16.
        causal: Whether a query sees no key after its own position.
        offset: The first query's position minus the first key's.
        window: How many positions back a query sees; None: all.
        merge: Whether `out` and `lse` hold attention over other keys, which is merged.
    """
    (batch, tokens, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    assert out.stride(-1) == 1, f"an output of strides {out.stride()}"
    strides = [(ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (q, k, v, out, lse)]
    places = (causal, offset, window or 0, merge, torch.get_num_threads())
    shape = _Shape(batch, tokens, keys, heads, kv_heads, dim, *strides, *places)
    name = _NAMES[q.dtype] if computed == q.dtype else "narrowed"
    tensors = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out, lse)]
    _kernel(f"attend_{name}")(ctypes.byref(shape), *tensors, ctypes.c_float(scale))


def normalise(
    x: Tensor,  # [..., inputs]
    weight: Tensor,  # [inputs]
    epsilon: float,
    out: Tensor,  # [..., inputs], contiguous; it may be x
) -> None:
    """Write an RMS norm (Zhang and Sennrich, 2019), computed in float32."""
    inputs = x.shape[-1]
    _call("normalise", x.contiguous(), weight, epsilon, out, x.numel() // inputs, inputs)


def rotate(
    x: Tensor,  # [1, rows, heads, dim]
    cos: Tensor,  # [1, rows, dim]
    sin: Tensor,  # [1, rows, dim]
    out: Tensor,  # [1, rows, heads, dim], contiguous
) -> None:
    """Write the rotary embedding (Su et al., 2021), whose pairs are i and i + dim / 2."""
    _, rows, heads, dim = x.shape
    _call("rotate", x.contiguous(), cos.contiguous(), sin.contiguous(), out, rows, heads, dim)


def add(
    x: Tensor,  # contiguous, which is written
    y: Tensor,  # of the same shape
) -> None:
    """x + y, in place."""
    _call("add", x, y.contiguous(), x.numel())


def gate(
    gates: Tensor,  # contiguous, which is written
    up: Tensor,  # of the same shape
) -> None:
    """silu(gates) * up, in place (Shazeer, 2020: GLU variants)."""
    _call("gate", gates, up.contiguous(), gates.numel())


def _call(name: str, x: Tensor, *others: Tensor | float | int) -> None:
    """A kernel for the number format of all tensors, which are contiguous."""
    arguments: list[object] = []
    for each in (x, *others):
        if isinstance(each, Tensor):
            assert each.dtype == x.dtype and each.is_contiguous(), f"{each.shape} of {each.dtype}"
            arguments.append(ctypes.c_void_p(each.data_ptr()))
        elif isinstance(each, float):
            arguments.append(ctypes.c_float(each))
        else:
            arguments.append(ctypes.c_int64(each))
    threads = ctypes.c_int64(torch.get_num_threads())
    _kernel(f"{name}_{_NAMES[x.dtype]}")(*arguments, threads)


def round_rows(
    x: Tensor,  # [rows, inputs] fp32; inputs a multiple of ROUNDED_TOGETHER
) -> tuple[Tensor, Tensor]:  # [rows, inputs] uint8, [rows, 1] fp32
    """Rows evened out and in 8 bits, as `even_out` and `round_rows` of `int8_products` do it."""
    x = x.contiguous()
    rows, inputs = x.shape
    rounded, steps = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(rows, 1)
    tensors = [ctypes.c_void_p(each.data_ptr()) for each in (x, rounded, steps)]
    sizes = [ctypes.c_int64(size) for size in (rows, inputs, torch.get_num_threads())]
    _kernel("round_rows_float32")(*tensors, *sizes)
    return rounded, steps


Way = TypeVar("Way")


def least_seconds(ways: Mapping[Way, Callable[[], object]], *, rounds: int = 5) -> dict[Way, float]:
    """The least time of each way; they take turns."""
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - started)
    return least
