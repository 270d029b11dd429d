"""The build for ARM computes the attention of the reference, in an emulator of the processor.

Skipped where the cross compiler or the emulator is missing: `apt-get install g++-aarch64-linux-gnu
qemu-user-static` brings both.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import views
from random_trees import Node, tree_of
from torch import Tensor

from pipeline.inference.attention.reference import LayerKV, attend_plainly
from pipeline.inference.attention.tiles import tile_plan
from pipeline.inference.processor import native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
HERE, KERNELS = Path(__file__).parent, Path(native.__file__).parent

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"needs {COMPILER} and {EMULATOR}",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neon") / "neon"
    options = ["-std=c++17", "-O2", "-fopenmp", "-static", f"-I{KERNELS}", "-o", str(path)]
    subprocess.run([COMPILER, *options, str(HERE / "one_call.cpp")], check=True)
    return path


class Emulated:
    """The function `attend` of the build for ARM, called as that of the processor."""

    def __init__(self, program: Path, file: Path) -> None:
        self._program, self._file = program, file
        self.storages: dict[int, torch.UntypedStorage] = {}  # by the pointer of a tensor in it

    def __call__(self, call: Any, *formats: int) -> bool:
        assert formats == (0, 0)
        moved, memory = (
            native.Call.from_buffer_copy(call._obj),
            bytearray(ctypes.sizeof(native.Call)),
        )
        places = []
        for name, _ in native.Call._fields_[:11]:
            pointer = getattr(moved, name)
            storage = self.storages[pointer]
            places.append((len(memory), storage))
            setattr(moved, name, len(memory) + pointer - storage.data_ptr())
            memory += ctypes.string_at(storage.data_ptr(), storage.nbytes())
        memory[: ctypes.sizeof(moved)] = bytes(moved)
        self._file.write_bytes(memory)
        subprocess.run([EMULATOR, str(self._program), str(self._file)], check=True)
        computed = self._file.read_bytes()
        for place, storage in places[5:7]:  # of the results
            ctypes.memmove(storage.data_ptr(), computed[place:], storage.nbytes())
        return True


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("heads, dim", [((6, 2), 8), ((9, 3), 64), ((14, 1), 10)])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_on_arm_is_that_of_the_reference(
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = tree_of([150, 1, 70], [Node(3, (Node(2), Node(40))), Node(6)], prefix_tokens=140)
    plan = tile_plan(tree, torch.device("cpu"), window=window, branches_only=False)
    q = views(0, tree.tokens, heads[0], dim, torch.float32)
    k, v, prefix_k, prefix_v = (
        views(i, rows, heads[1], dim, torch.float32)
        for i, rows in enumerate((tree.tokens, tree.tokens, 140, 140), 1)
    )
    inputs = q, LayerKV(k, v), LayerKV(prefix_k, prefix_v), plan, dim**-0.5, softcap
    attend, pointer_of = Emulated(program, tmp_path / "call"), Tensor.data_ptr

    def noted(tensor: Tensor) -> int:
        attend.storages[pointer_of(tensor)] = tensor.untyped_storage()
        return pointer_of(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "data_ptr", noted)
        patch.setattr(native, "_kernel", lambda name: attend)
        patch.setattr(native, "computes", lambda dtype: dtype == torch.float32)
        actual = native.attend_natively(*inputs)
    exact = [LayerKV(x.k.double(), x.v.double()) for x in inputs[1:3]]
    expected = attend_plainly(q.double(), *exact, plan, dim**-0.5, softcap)
    # — scores below 64, each rounded by half of the last bit, enter as a factor
    error = 64 * torch.finfo(torch.float32).eps
    largest = max(1.0, float(expected.out.abs().max()))
    assert (actual.out.double() - expected.out).abs().max() <= error * largest
    assert (actual.lse.double() - expected.lse).abs().max() <= error
