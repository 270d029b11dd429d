"""Pictures from files of unknown origin. Entry point: `decode_image`."""

from __future__ import annotations

import io
import struct
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from pipeline.errors import DocumentError, one_line

# Decoders that are fuzzed and in wide use. Pillow has others that run programs or read fonts.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# A picture of four bytes a pixel takes 256 MB decoded. Checked before the first pixel is decoded.
MAX_PIXELS = 64_000_000
# Modes whose conversion to RGB means the same to everyone. 16 and 32 bits have no fixed range.
_MODES = {"RGB", "RGBA", "RGBX", "L", "LA", "La", "P", "PA", "1", "CMYK", "YCbCr"}
# Decoders of damaged files, and of damaged EXIF data, raise nearly anything.
_RAISED = OSError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, struct.error


def decode_image(data: bytes) -> Image.Image:
    """The picture in RGB, turned upright by its EXIF data.

    Its size is known before a pixel is decoded, so a small file cannot take much memory.

    Raises:
        DocumentError: It is no picture of `FORMATS`, is truncated, is animated, is too large, or
            has a mode without a fixed meaning in RGB.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF data; too large is checked below
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise DocumentError(
                    f"the image has {width:,} x {height:,} pixels, above {MAX_PIXELS:,}"
                )
            if (frames := getattr(picture, "n_frames", 1)) > 1:
                raise DocumentError(f"the image is animated: {frames} frames")
            if picture.mode not in _MODES:
                raise DocumentError(f"the image has the mode {picture.mode}; convert it to RGB")
            picture.load()
            upright: Image.Image = ImageOps.exif_transpose(picture)
            return upright.convert("RGB")
    except UnidentifiedImageError:
        raise DocumentError(f"the image is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise DocumentError(f"the image has more than {MAX_PIXELS:,} pixels") from None
    except _RAISED as error:
        raise DocumentError(f"the image cannot be decoded: {one_line(error)}") from error
