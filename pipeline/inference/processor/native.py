"""The compiled kernels of this package, which are part of its installation.

Entry points: `build`, which names the one for this processor; `attend_natively`; `normalise`,
`rotate`, `gate` and `round_rows`. An installation without a C++ compiler has none, nor has a
processor without AVX2 or NEON: torch's own functions take their place, and `assay check` reports
it.

`ASSAY_KERNELS` chooses another build that this processor can run; `off`: none.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.tiles import TilePlan

ROUNDED_TOGETHER = 32  # columns that `round_rows` evens out with one another

_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
# The fastest first, each with the instructions that it needs.
_BUILDS = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2",),
}
# Query heads of the rows in a tile of attention: enough to use a block of keys often, few enough to
# stay in the cache with it. The tiles of products hold 6 or 32.
_TILE_ROWS = 192
_OF_BFLOAT16 = ("amx", "avx512bf16")  # builds with products of bfloat16
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # of arch_prctl(2), whose number is 158
_MEMORY, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# Of the functions of build.h.
_ARGUMENTS = {
    "attend": (_MEMORY, _INT, _INT),
    "normalise": (_MEMORY, _MEMORY, _FLOAT, _MEMORY, _SIZE, _SIZE, _INT, _SIZE),
    "rotate": (
        *(_MEMORY, _SIZE, _MEMORY, _MEMORY, _MEMORY, _FLOAT),
        *(_SIZE, _SIZE, _SIZE, _INT, _SIZE),
    ),
    "gate": (_MEMORY, _MEMORY, _SIZE, _INT, _SIZE),
    "round_rows": (_MEMORY, _MEMORY, _MEMORY, _SIZE, _SIZE, _SIZE),
}


class Call(ctypes.Structure):
    """`Call` of attention.h."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "k", "v", "prefix_k", "prefix_v", "out", "lse")),
        *((n, ctypes.c_void_p) for n in ("tiles", "subtree_stops", "positions", "documents_at")),
        *((n, ctypes.c_int64 * 2) for n in ("of_q", "of_k", "of_v", "of_prefix_k", "of_prefix_v")),
        *((n, ctypes.c_int64) for n in ("tile_count", "tile_rows", "heads", "kv_heads", "dim")),
        *((n, ctypes.c_int64) for n in ("prefix_tokens", "documents", "first_query", "window")),
        ("threads", ctypes.c_int64),
        *((n, ctypes.c_float) for n in ("scale", "softcap")),
    ]


@cache
def build() -> str | None:
    """The build of this processor; None: this installation has none for it.

    ModelError if `ASSAY_KERNELS` names one that does not run here.
    """
    named = os.environ.get("ASSAY_KERNELS", "")
    if named == "off" or _library() is None:
        return None
    runnable = _runnable(torch.cpu.get_capabilities())
    if not named:
        return runnable[0] if runnable else None
    if named not in runnable:
        raise ModelError(
            f"ASSAY_KERNELS is {named!r}, and this processor runs {', '.join(runnable) or 'none'}"
        )
    return named


def _runnable(features: Mapping[str, object]) -> list[str]:
    """The builds that a processor with these features can run."""
    if platform.machine() in ("aarch64", "arm64"):
        return ["neon"]
    builds = [name for name, needed in _BUILDS.items() if all(map(features.get, needed))]
    return [name for name in builds if name != "amx" or _may_use_tiles()]


def _may_use_tiles() -> bool:
    """Asks the kernel for the tiles of this process, which it grants once or not at all."""
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(158, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@cache
def _library() -> ctypes.CDLL | None:
    library = find_spec("._kernels", __package__)
    return ctypes.CDLL(library.origin) if library is not None else None


def computes(dtype: torch.dtype) -> bool:
    """Whether there are kernels here with products of this number format."""
    own = build()
    return own is not None and (dtype == torch.float32 or own in _OF_BFLOAT16)


def takes(dtype: torch.dtype) -> bool:
    """Whether there are kernels here for tensors of this number format."""
    return build() is not None and dtype in _FORMATS


@cache
def _kernel(name: str) -> Any:
    library, own = _library(), build()
    assert library is not None and own is not None, f"{name} of an installation without kernels"
    kernel = library[f"{name}_{own}"]
    kernel.restype, kernel.argtypes = ctypes.c_bool if name == "attend" else None, _ARGUMENTS[name]
    return kernel


def attend_natively(
    q: Tensor,  # [queries, heads, dim]
    own: LayerKV,  # of the batch's own rows
    prefix: LayerKV | None,
    plan: TilePlan,
    scale: float,
    softcap: float | None,
    computed: torch.dtype | None = None,
) -> Attended:
    """The attention of all queries; its products are in the number format `computed`.

    None: in that of `q` if the processor has such products, and else in float32.
    """
    queries, heads, dim = q.shape
    kv_heads = own.k.shape[1]
    if own.v.shape != own.k.shape or dim % 2:
        raise ValueError(f"keys of {dim} numbers and values of {own.v.shape[-1]} a head")
    kept = prefix or LayerKV(own.k[:0], own.v[:0])
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, own.k, own.v, kept.k, kept.v)]
    rows = max(1, _TILE_ROWS // (heads // kv_heads))
    tiles = plan.tiles(rows)
    out, lse = q.new_empty(q.shape), q.new_empty(queries, heads, dtype=torch.float32)
    tables = (tiles, plan.subtree_stops, plan.positions, plan.document_starts)
    call = Call(
        *(x.data_ptr() for x in (*inputs, out, lse, *tables)),
        *(x.stride()[:2] for x in inputs),
        *(len(tiles), rows, heads, kv_heads, dim),
        *(len(kept.k), len(plan.document_starts) - 1, plan.first),
        torch.iinfo(torch.int32).max if plan.window is None else plan.window,
        torch.get_num_threads(),
        scale=scale,
        softcap=softcap or 0.0,
    )
    usual = q.dtype if computes(q.dtype) else torch.float32
    formats = _FORMATS[q.dtype], _FORMATS[computed or usual]
    done = _kernel("attend")(ctypes.byref(call), *formats)
    assert done, f"no kernel of {build()} for {q.dtype} and {computed or usual}"
    return Attended(out, lse)


def normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`operations.normalise`, of any number of dimensions before the last."""
    x, inputs = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    pointers = x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr()
    sizes = x.numel() // inputs, inputs
    _kernel("normalise")(*pointers, *sizes, _FORMATS[x.dtype], torch.get_num_threads())
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, epsilon: float) -> None:
    """`operations.rotate`."""
    rows, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1), f"heads of strides {x.stride()}"
    cos, sin = cos.contiguous(), sin.contiguous()
    weight = None if norm is None else norm.data_ptr()
    _kernel("rotate")(
        *(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), weight, epsilon),
        *(rows, heads, dim, _FORMATS[x.dtype], torch.get_num_threads()),
    )


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """`operations.gate`, of any shape."""
    assert gates.is_contiguous(), f"gates of strides {gates.stride()}"
    ups, format_ = ups.contiguous(), _FORMATS[gates.dtype]
    _kernel("gate")(
        gates.data_ptr(), ups.data_ptr(), gates.numel(), format_, torch.get_num_threads()
    )
    return gates


def round_rows(
    x: Tensor,  # [rows, inputs] fp32; inputs a multiple of ROUNDED_TOGETHER
) -> tuple[Tensor, Tensor]:  # [rows, inputs] uint8, [rows, 1] fp32
    """Rows evened out and in 8 bits, as `Int8Linear.round_rows` does it."""
    x = x.contiguous()
    rows, inputs = x.shape
    rounded, steps = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(rows, 1)
    pointers = (each.data_ptr() for each in (x, rounded, steps))
    _kernel("round_rows")(*pointers, rows, inputs, torch.get_num_threads())
    return rounded, steps
