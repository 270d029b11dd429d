"""Arrays arrive on the device as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.inference.attention.compiled import to_device


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_arrive_in_order_with_their_type(device: str, dtype: type) -> None:
    arrays = [np.arange(3, dtype=dtype), np.array([], dtype=dtype), np.array([7], dtype=dtype)]
    tensors = to_device(arrays, torch.device(device))
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [], [7]]
    assert {(tensor.device.type, str(tensor.dtype)) for tensor in tensors} == {
        (device, f"torch.{np.dtype(dtype)}")
    }
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
