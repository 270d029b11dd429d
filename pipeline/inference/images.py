"""Images as documents: a picture becomes token ids, and what the vision tower reads.

Entry points: `ImageReader`, and `ImageDocument`, which the engine reads. Code that a model folder
carries is never run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, BatchFeature
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from pipeline.errors import DocumentError, ModelError, one_line
from pipeline.inference.decoding import decode_image

_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
# Images that are tokenised, and then read, together: 16 of 1,024 patches are rows enough for a GPU.
IMAGES_AT_ONCE = 16
# Of what the model reads of images that are kept. One image may have 50 MB of pixels.
_KEPT_BYTES = 1 << 29
# A private-use character, which no template writes.
_MARK = "\ue0d3"


class ImageDocument(tuple[int, ...]):
    """The token ids of a document: those of an image, then those of a text.

    Each row of the image has the model's image token.
    """

    image: bytes  # as its file has it

    def __new__(cls, token_ids: Iterable[int], image: bytes) -> ImageDocument:
        document = super().__new__(cls, token_ids)
        document.image = image
        return document


def as_document(token_ids: Sequence[int], image: bytes | None) -> Sequence[int]:
    """The token ids, with the image that they are of."""
    return token_ids if image is None else ImageDocument(token_ids, image)


class ImageReader:
    """A model's image processor: what the model reads of an image. Entry point: `of`."""

    @staticmethod
    @lru_cache(maxsize=2)
    def of(folder: Path) -> ImageReader:
        """The folder's, one for all that read its images. ModelError if it has none."""
        return ImageReader(folder)

    def __init__(self, folder: Path) -> None:
        self._kept: dict[bytes, BatchFeature] = {}  # the oldest first
        self._lock = Lock()  # — one shard is tokenised while another is read
        try:
            config = AutoConfig.from_pretrained(folder, **_LOCAL)
            self._processor = _processor(folder, config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise ModelError(
                f"{folder}: its image processor cannot be loaded: {one_line(error)}; copy "
                "preprocessor_config.json and processor_config.json, too"
            ) from error

    def token_ids(self, data: bytes) -> tuple[int, ...]:
        """The token ids of the image; DocumentError if it cannot be decoded."""
        return tuple(self.inputs(data)["input_ids"][0].tolist())

    def inputs(self, data: bytes) -> BatchFeature:
        """What the whole model reads of the image: `input_ids` [1, tokens], and its pixels.

        The latest images are kept: they are tokenised, and then read.
        """
        with self._lock:
            if (known := self._kept.get(data)) is not None:
                return known
        made = self._inputs(data)
        with self._lock:
            self._kept[data] = made
            while len(self._kept) > 2 * IMAGES_AT_ONCE or self._kept_bytes > _KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return made

    @property
    def _kept_bytes(self) -> int:
        return sum(x.nbytes for of_image in self._kept.values() for x in of_image.values())

    def _inputs(self, data: bytes) -> BatchFeature:
        picture = decode_image(data)
        try:
            inputs: BatchFeature = self._processor(
                images=[picture],
                text=[self._written],
                add_special_tokens=False,
                return_tensors="pt",
            )
            return inputs
        except (ValueError, ArithmeticError, MemoryError) as error:
            # — such as a side 200 times the other; some processors enlarge the shorter one
            reason = one_line(error)
            raise DocumentError(f"the model's processor refuses the image: {reason}") from error

    @cached_property
    def _written(self) -> str:
        """What the chat template writes for an image; without a template, the image token."""
        text = {"type": "text", "text": _MARK}
        template = self._processor.chat_template or self._processor.tokenizer.chat_template
        token: str = self._processor.image_token
        if not template:
            return f"{token}\n"
        try:
            without, with_image = (
                self._processor.tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    chat_template=template,
                    tokenize=False,
                )
                for content in ([text, text], [text, {"type": "image"}, text])
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"the model's chat template refuses an image: {error}") from error
        # — some templates write all images of a turn before its text
        pairs = enumerate(zip(without, with_image, strict=False))
        before = next((i for i, (a, b) in pairs if a != b), len(without))
        written: str = with_image[before : before + len(with_image) - len(without)]
        if written.count(token) != 1:
            raise ModelError(f"the model's chat template writes no {token} for an image")
        return written


def _processor(folder: Path, config: Any) -> Any:
    """The processor of the model's family, without its part for videos, which needs torchvision."""
    family: Any = PROCESSOR_MAPPING[type(config)]
    own = {"get_attributes": classmethod(lambda _class: ["image_processor", "tokenizer"])}
    images_only: Any = type(family.__name__, (family,), own)
    image_processor: Any = AutoImageProcessor
    settings, _ = family.get_processor_dict(folder, **_LOCAL)
    # — with Pillow on every machine: other backends round resized pixels otherwise
    parts = [
        image_processor.from_pretrained(folder, backend="pil", **_LOCAL),
        AutoTokenizer.from_pretrained(folder, **_LOCAL),
    ]
    if "video_processor" in family.__init__.__code__.co_varnames:
        parts.append(None)
    return images_only.from_args_and_dict(parts, settings)
