"""The model of a spec, and at which layer it stops. Entry points: `ModelSpec` and `ExitSpec`.

Also the base class of all parts of a spec, `Frozen`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.locations import Location, StorageOptions

Quantize = Literal["none", "int8", "int8_dynamic", "fp8"]
KeptFormat = Literal["none", "int8", "fp8"]


class Frozen(BaseModel):
    """Immutable, strict about types, and a misspelt key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class ModelSpec(Frozen):
    """The model that answers."""

    path: Location = Field(min_length=1)
    """Model folder, GGUF file or URL, or the name of a model on the Hugging Face Hub."""
    kind: Literal["decoder", "encoder"] = "decoder"
    """`decoder`: a language model, which is asked. `encoder`: a sequence classifier such as BERT,
    DeBERTa, XLM-R or ModernBERT; the texts of a task's labels are then classes of its head."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `path`, such as `endpoint_url` or `profile`.
    Secrets are refused: name a profile or set the environment."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub. Default: the branch `main`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the model. `auto` takes bfloat16 where it is faster. Else it is
    float32 on CPUs, and float16 on GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto` takes a GPU if there is one."""
    gpus: PositiveInt = 1
    """Number of GPUs of one worker. The model's layers are distributed over them."""
    threads: Literal["auto"] | PositiveInt = "auto"
    """Threads of one engine on a CPU; a machine has as many engines as its usable cores divided by
    this. `auto` takes one thread where there is enough work, else more."""
    quantize: Quantize = "none"
    """8-bit weights: half the memory of 16-bit weights, and slightly different answers. `int8` runs
    on CPUs and GPUs, `fp8` on recent GPUs. `int8_dynamic` also rounds activations and multiplies
    8-bit integers, which is faster; it needs a processor with VNNI or AMX, or a GPU."""
    kv: KeptFormat = "none"
    """Number format of cached keys and values, which outlive one forward: those of the instruction
    and its examples, and of documents whose labels are found by beam search. 8 bits take half the
    memory of 16, and change answers slightly."""

    @field_validator("gpus", "quantize", "kv")
    @classmethod
    def _suits_an_encoder(cls, value: object, other: ValidationInfo) -> object:
        if other.data.get("kind") == "encoder" and value not in (1, "none"):
            raise ValueError("not supported for an encoder; remove it")
        return value

    @field_validator("gpus")
    @classmethod
    def _are_used(cls, gpus: int, other: ValidationInfo) -> int:
        if gpus > 1 and other.data.get("device") == "cpu":
            raise ValueError("device: cpu uses no GPU; write device: cuda, or gpus: 1")
        return gpus

    @field_validator("quantize")
    @classmethod
    def _runs(cls, quantize: str, other: ValidationInfo) -> str:
        # torchao multiplies by the integers and then scales: products of 460,000 in SmolLM2-135M.
        if quantize == "int8" and other.data.get("dtype") == "float16":
            raise ValueError("sums of int8 weights overflow float16; write another dtype, or fp8")
        if quantize != "none" and other.data.get("gpus", 1) > 1:
            raise ValueError("8-bit weights run on one GPU only; write none, or gpus: 1")
        return quantize


class ExitSpec(Frozen):
    """Early exit: all documents stop at one layer, or each stops when its answers are confident."""

    layer: PositiveInt | None = None
    """Layer at which every document stops. Layers are counted from 1."""
    layers: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Rising layers at which a document may stop, together with `confidence`."""
    confidence: float | None = Field(default=None, gt=0, le=1)
    """Probability that the likeliest label of every task must reach for a document to stop."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> ExitSpec:
        fixed = self.layer is not None and not self.layers and self.confidence is None
        confident = self.layer is None and bool(self.layers) and self.confidence is not None
        if not (fixed or confident):
            raise ValueError("write {layer: N}, or {layers: [N, ...], confidence: P}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must rise")
        return self


# The model of a spec whose tasks all have a classifier.
NO_MODEL = ModelSpec.model_construct(path="", device="cpu", dtype="float32")
