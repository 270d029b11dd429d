"""Assembles an engine from a reader: model, prompt, readouts. Entry point: `reader_engine`.

Also turns documents into chunks (`DocumentReader`).
Imports torch, so the driver must not import it. Must not import Ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, Problem, SpecError
from pipeline.hashes import canonical_json, short_hash
from pipeline.inference.chunking import Encoder, chunk_text, chunk_texts
from pipeline.inference.encoder import EncoderEngine, encoder_context, load_encoder
from pipeline.inference.engine import Engine, LabelEngine
from pipeline.inference.images import ImageReader
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import (
    context_reason,
    context_tokens,
    convert_gguf,
    converted_bytes,
    load_model,
    load_tokenizer,
)
from pipeline.inference.memory import (
    CPU_BATCH_TOKENS,
    ENCODER_BATCH_TOKENS,
    MemoryPlan,
    plan_memory,
)
from pipeline.inference.model.casting import cast_files, needs_cast
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.openai_client import Journal, ServerClient
from pipeline.inference.openai_engine import ByteEncoder, OpenAIEngine
from pipeline.inference.out_of_memory import naming_lack_of_memory
from pipeline.inference.schedules.staged import cache_copies
from pipeline.inference.vllm_engine import GENERATED_TOKENS, VllmOptions, load_vllm
from pipeline.runtime.fitted_files import load_readouts
from pipeline.runtime.job import Reader, Run
from pipeline.runtime.limits import available_bytes, usable_cores
from pipeline.runtime.model_cache import cached_model
from pipeline.runtime.model_folder import check_folder
from pipeline.runtime.progress import CONVERTING, FETCHING, LOADING, Send, WorkerReport, ignore
from pipeline.runtime.weights import ModelFiles, fetch, model_at
from pipeline.sources.documents import EMPTY, OK, TRUNCATED
from pipeline.spec.model import KeptFormat, ModelSpec
from pipeline.spec.stages import DocumentsSpec
from pipeline.spec.tasks import TaskSpec

CUDA_BATCH_TOKENS = 65_536

# The loaded models of a process, and the clients of servers, by their JSON in the spec.
Models = dict[str, LoadedModel | ServerClient]


def memory_plan(model: LoadedModel, prompt: PromptTokens, *, engines: int = 1) -> MemoryPlan:
    """The largest batch in tokens, and the memory that it takes on the model's device.

    `engines` share the memory of the device.
    """
    on_gpu = model.device.type == "cuda"
    return plan_memory(
        model,
        prefix_tokens=len(prompt.prefix),
        free_bytes=_free_bytes(model) // engines,
        most_tokens=CUDA_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS,
    )


def _free_bytes(model: LoadedModel) -> int:
    on_gpu = model.device.type == "cuda"
    return torch.cuda.mem_get_info(model.device)[0] if on_gpu else available_bytes()


def _engines(reader: Reader) -> int:
    """The engines that share the memory of the model's device: a GPU has one."""
    placement = reader.placement
    return (
        1
        if placement.device == "cuda"
        else max(1, min(placement.actors, usable_cores() // placement.threads))
    )


def local_model(files: ModelFiles, model: ModelSpec, cache_dir: Path, send: Send = ignore) -> Path:
    """A local folder with the model's safetensors, downloaded or converted where necessary."""
    is_remote = files.kind in ("hub", "remote")
    if is_remote:
        send(WorkerReport(FETCHING))
    fetched = fetch(files, cache_dir, model.storage_options)
    if is_remote:  # — others were checked before the workers started
        check_folder(fetched, engine=model.engine)
    if files.kind != "gguf":
        return fetched

    def convert(folder: Path) -> None:
        send(WorkerReport(CONVERTING))
        with naming_lack_of_memory(str(fetched), "convert it"):
            convert_gguf(fetched, folder)

    return cached_model(files.id, cache_dir, convert, needed=partial(converted_bytes, fetched))


def reader_model(
    reader: Reader, folder: Path, *, rounds: bool = True, kv: KeptFormat | None = None
) -> LoadedModel:
    """The reader's model; without `rounds` in its own format, and `kv` replaces the spec's setting.

    Several engines of one machine share the pages of its weights. From now on, torch uses the job's
    number of threads in this process. SpecError if another engine answers.
    """
    if reader.spec.model.engine != "assay":
        fix = "this command needs assay's own engine; write assay, or leave this out"
        raise SpecError([Problem("model.engine", fix, reader.spec.model.engine)])
    # — the machine may have fewer cores than the cluster states; Ray sets 1 in an actor
    torch.set_num_threads(min(reader.placement.threads, usable_cores()))
    placement = reader.placement
    rounded_to = reader.spec.model.rounded_to if rounds else None
    several = placement.device == "cpu" and placement.actors > 1
    if several and rounded_to is None and needs_cast(folder, placement.dtype):
        fill = partial(cast_files, folder, dtype=placement.dtype)
        name = f"{reader.files.id}-{placement.dtype}"
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        needed = stored * 2 if placement.dtype == "float32" else stored // 2
        folder = cached_model(name, Path(reader.cache_dir), fill, needed=lambda: needed)
    model = load_model(
        folder,
        dtype=placement.dtype,
        device=placement.device,
        rounded_to=rounded_to,
        sees_images=reader.spec.input.image is not None,
    )
    kept = reader.spec.model.kv if kv is None else kv
    if kept != "none" and model.schedule == "staged":
        fix = "layers with a recurrent state keep it in the model's own format; remove this"
        raise SpecError([Problem("model.kv", fix, kept)])
    if model.schedule == "staged":
        free_bytes = _free_bytes(model) // _engines(reader)
        longest = reader.spec.documents.max_tokens
        copies = cache_copies(model, tokens=longest, free_bytes=free_bytes)
        model = replace(model, cache_copies=copies)
    return replace(model, kv=kept)


def label_engine(reader: Reader, model: LoadedModel, prompt: PromptTokens) -> LabelEngine:
    """The reader's tasks on its model, with the batch size that fits its memory."""
    return LabelEngine(
        model,
        prompt,
        max_batch_tokens=memory_plan(model, prompt, engines=_engines(reader)).max_batch_tokens,
        readouts=load_readouts(
            reader.readouts, reader.spec, Path(reader.cache_dir), places=reader.places
        ),
    )


def reader_engine(reader: Reader, send: Send = ignore, models: Models | None = None) -> Engine:
    """The reader's engine, loaded; `send` takes the phases.

    `models` are those that readers of the same job have loaded: two readers of one model share its
    weights.
    """
    if reader.spec.uses_encoder:
        return _encoder_engine(reader, send)
    folder, _, prompt = reader_prompt(reader, send=send)
    send(WorkerReport(LOADING))
    if reader.spec.model.engine == "vllm":
        options = VllmOptions(
            reader.placement.dtype,
            reader.placement.device,
            min(reader.placement.threads, usable_cores()),
            reader.spec.model.tensor_parallel,
        )
        return load_vllm(folder, prompt, options, max_tokens=reader.spec.documents.max_tokens)
    models, name = {} if models is None else models, reader.spec.model.model_dump_json()
    model = models.get(name)
    if not isinstance(model, LoadedModel):
        model = models[name] = reader_model(reader, folder)
    return label_engine(reader, model, prompt)


def server_engine(reader: Reader, run: Run | None, models: Models) -> OpenAIEngine:
    """The server of the reader's model, which has answered once; SpecError if it cannot be used.

    In a run, answers that are paid and not committed are kept on this machine. Two readers of one
    server in `models` share its client, and so what the run may cost.
    """
    name = reader.spec.model.model_dump_json()
    client = models.get(name)
    with model_at(reader.places["model"]):
        if not isinstance(client, ServerClient):
            client = models[name] = _client(reader, run)
        engine = OpenAIEngine(client, reader.spec.prompt, reader.spec.model_parts)
        engine.prove()
    return engine


def _client(reader: Reader, run: Run | None) -> ServerClient:
    if run is None:
        return ServerClient(reader.spec.model)
    output = reader.spec.output
    output = output if "://" in output else os.path.abspath(output)
    name = short_hash(canonical_json([output, reader.spec.name]))
    journal = Journal(Path(reader.cache_dir) / "server-answers" / f"{name}.jsonl", run.id)
    return ServerClient(reader.spec.model, journal, max_cost=run.max_cost)


def _encoder_engine(reader: Reader, send: Send) -> EncoderEngine:
    """The encoder; SpecError unless it can read the longest document and has the classes."""
    folder = local_model(reader.files, reader.spec.model, Path(reader.cache_dir), send)
    tokenizer = load_tokenizer(folder)
    max_tokens, room = reader.spec.documents.max_tokens, encoder_context(folder, tokenizer)
    if max_tokens > room:
        fix = f"the encoder reads {room} tokens of a document; write at most that"
        raise SpecError([Problem(f"{reader.places['documents']}.max_tokens", fix, max_tokens)])
    send(WorkerReport(LOADING))
    torch.set_num_threads(min(reader.placement.threads, usable_cores()))
    network = load_encoder(folder, dtype=reader.placement.dtype, device=reader.placement.device)
    parts = reader.spec.model_parts
    labels = {part.name: part.labels for part in parts}
    scores = {part.name: part.values for part in parts if part.values}
    on_gpu = reader.placement.device == "cuda"
    most_tokens = CUDA_BATCH_TOKENS if on_gpu else ENCODER_BATCH_TOKENS
    return EncoderEngine(network, tokenizer, labels, scores, max_batch_tokens=most_tokens)


def reader_prompt(
    reader: Reader, tasks: Sequence[TaskSpec] | None = None, *, send: Send = ignore
) -> tuple[Path, PreTrainedTokenizerBase, PromptTokens]:
    """The model's local folder, its tokenizer, and the prompt of the reader's tasks or of `tasks`.

    SpecError unless the longest document and each question fit together into the model's context,
    or if all tasks have classifiers.
    """
    if tasks is None:
        tasks = reader.spec.model_parts
    if reader.spec.model.engine == "openai":
        fix = "this command reads the model itself; `assay run` labels with a server"
        raise SpecError([Problem("model.engine", fix, "openai")])
    if reader.spec.uses_encoder:
        fix = "this command is for language models; `assay run` labels with an encoder"
        raise SpecError([Problem("tasks", fix, [task.name for task in reader.spec.model_tasks])])
    if not tasks:
        fix = "all have classifiers or cascades, and this command needs a question or a readout"
        raise SpecError([Problem("tasks", fix, [task.name for task in reader.spec.tasks])])
    folder = local_model(reader.files, reader.spec.model, Path(reader.cache_dir), send)
    tokenizer = load_tokenizer(folder)
    prompt = tokenise_prompt(tokenizer, reader.spec.prompt, tasks, of=reader.spec.tasks)
    context = context_tokens(folder)
    max_tokens, room = reader.spec.documents.max_tokens, prompt.room(context)
    if reader.spec.model.engine == "vllm":
        room -= GENERATED_TOKENS
    if max_tokens > room:
        fix = (
            f"the model's context of {context} tokens{context_reason(folder)} leaves "
            f"{max(room, 0)} for a document beside the instruction and the longest question; "
            "write at most that"
        )
        raise SpecError([Problem(f"{reader.places['documents']}.max_tokens", fix, max_tokens)])
    return folder, tokenizer, prompt


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """Turns documents into the token ids that the model reads."""

    tokenizer: Encoder
    rules: DocumentsSpec
    images: ImageReader | None = None  # of documents with an image

    @classmethod
    def loaded(cls, reader: Reader, send: Send) -> DocumentReader:
        """The reader's, for which its model's folder is fetched if it is not here."""
        if reader.spec.model.engine == "openai":
            return cls(ByteEncoder(), reader.spec.documents)
        folder = local_model(reader.files, reader.spec.model, Path(reader.cache_dir), send)
        return cls.of(reader, folder, load_tokenizer(folder))

    @classmethod
    def of(cls, reader: Reader, folder: Path, tokenizer: PreTrainedTokenizerBase) -> DocumentReader:
        images = ImageReader.of(folder) if reader.spec.input.image is not None else None
        return cls(DocumentTokenizer(tokenizer), reader.spec.documents, images)

    def chunks(
        self, text: str | None, status: str, image: bytes | None = None
    ) -> tuple[Sequence[tuple[int, ...]], str]:
        """A document's chunks, and its status for labelling.

        `status` is that of reading it. A document that cannot be labelled has no chunks; its
        status has the reason. A document with an image is one chunk: the image, then the text.
        """
        if status != OK or text is None:
            return (), status
        if image is None:
            [of_text] = self.text_chunks([text])
            return of_text
        try:
            return self._with_text(image, text)
        except DocumentError as error:
            return (), f"error:{error}"

    def text_chunks(self, texts: Sequence[str]) -> Iterator[tuple[Sequence[tuple[int, ...]], str]]:
        """The same of readable documents without images, which are tokenised together."""
        for chunks in chunk_texts(self.tokenizer, texts, self.rules):
            if isinstance(chunks, DocumentError):
                yield (), f"error:{chunks}"
            elif not any(chunks.token_ids):
                yield (), EMPTY
            else:
                yield chunks.token_ids, TRUNCATED if chunks.truncated else OK

    def _with_text(self, image: bytes, text: str) -> tuple[Sequence[tuple[int, ...]], str]:
        assert self.images is not None, "no model for images"
        before, most = self.images.token_ids(image), self.rules.max_tokens
        room = most - len(before)
        if room < 0:
            raise DocumentError(f"the image has {len(before)} tokens, above max_tokens, {most}")
        if not text:
            return (before,), OK
        if not room:
            return (before,), TRUNCATED
        rules = self.rules.model_copy(update={"max_tokens": room})
        chunks = chunk_text(self.tokenizer, text, rules)
        return ((*before, *chunks.token_ids[0]),), TRUNCATED if chunks.truncated else OK
