"""Images of unknown origin become pictures, or errors, in bounded memory."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision import encoded_picture, picture, saved

from pipeline.errors import DocumentError
from pipeline.inference.decoding import MAX_PIXELS, decode_image


def png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG file whose header names a size that its data need not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pictures_of_each_format_are_read(format: str) -> None:
    decoded = decode_image(encoded_picture(30, 20, format=format))
    assert (decoded.size, decoded.mode) == ((30, 20), "RGB")
    if format in ("PNG", "BMP", "TIFF"):
        assert (np.asarray(decoded) == np.asarray(picture(30, 20))).all()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK"])
def test_modes_of_a_fixed_meaning_become_rgb(mode: str) -> None:
    format = "TIFF" if mode == "CMYK" else "PNG"
    assert decode_image(saved(picture(8, 8).convert(mode), format)).mode == "RGB"


def test_a_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    assert decode_image(saved(picture(30, 20), "JPEG", exif=exif)).size == (20, 30)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_modes_without_a_fixed_range_are_refused(mode: str) -> None:
    image = Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).convert(mode)
    with pytest.raises(DocumentError, match=r"has the mode .*; convert it to RGB"):
        decode_image(saved(image, "TIFF"))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animated_pictures_are_refused(format: str) -> None:
    frames = {"save_all": True, "append_images": [picture(8, 8, seed=i) for i in (1, 2)]}
    with pytest.raises(DocumentError, match="is animated: 3 frames"):
        decode_image(saved(picture(8, 8), format, **frames))


@pytest.mark.parametrize(
    "data", [b"", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a"]
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError, match="the image "):
        decode_image(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_truncated_files_are_refused(format: str) -> None:
    data = encoded_picture(60, 60, format=format)
    for kept in (10, len(data) // 3, len(data) // 2):
        with pytest.raises(DocumentError, match="the image "):
            decode_image(data[:kept])


@given(st.integers(0, 5), st.binary(min_size=1, max_size=40), st.floats(0, 1))
def test_damaged_files_raise_nothing_else(kind: int, damage: bytes, place: float) -> None:
    format = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")[kind]
    data = bytearray(encoded_picture(20, 20, format=format))
    start = int(place * len(data))
    data[start : start + len(damage)] = damage
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(DocumentError):
            assert decode_image(bytes(data)).mode == "RGB"


@pytest.mark.parametrize(
    "bomb",
    [
        lambda: png(20_000, 20_000, b""),  # 1.2 GB, of which nothing is there
        lambda: png(2**31 - 1, 2**31 - 1, b""),
        lambda: png(30_000, 3_000, bytes(30_000 * 3_000 * 3)),  # 270 MB in 260 kB
    ],
    ids=["large", "largest", "compressed"],
)
def test_bombs_are_refused_before_they_are_decoded(bomb: Callable[[], bytes]) -> None:
    data = bomb()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_kb("VmRSS")
    with pytest.raises(DocumentError, match=f"pixels, above {MAX_PIXELS:,}|has more than"):
        decode_image(data)
    assert resident_kb("VmHWM") - before < 10_000


def resident_kb(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_damaged_exif_data_is_refused(format: str) -> None:
    data = saved(Image.new("RGB", (9, 9)), format, exif=b"Exif\0\0MM\0*")
    with pytest.raises(DocumentError, match="the image cannot be decoded"):
        decode_image(data)
