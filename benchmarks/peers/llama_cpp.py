"""llama.cpp, through llama-cpp-python's low-level interface. Number formats: float32, q8_0.

A document is decoded once, below the kept prefix; its questions are sequences that share its cells
of the KV cache. The weights come from the GGUF file of the model, dequantised.
"""

from __future__ import annotations

from pathlib import Path

import llama_cpp as lib
import numpy as np

from benchmarks.peers.serve import Answers, Asked, Documents, Setup

_KINDS = {"float32": lib.LLAMA_FTYPE_ALL_F32, "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0}
_BATCH = 2_048
_CONTEXT = 8_192


class Engine:
    """One context with a unified KV cache."""

    version = lib.__version__

    def __init__(self, setup: Setup) -> None:
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(
            str(_converted(setup)).encode(), lib.llama_model_default_params()
        )
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = _CONTEXT, _BATCH, _BATCH
        options.n_seq_max, options.kv_unified = 64, True
        options.n_threads = options.n_threads_batch = setup.threads
        if setup.number_format == "float32":
            options.type_k = options.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(model, options)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)

    def prepare(self, asked: Asked) -> None:
        self._asked = asked
        lib.llama_memory_clear(self._memory, True)
        self._decode([(token, i, 0, False) for i, token in enumerate(asked.prefix)])

    def label(self, documents: Documents) -> Answers:
        return [self._label(document) for document in documents]

    def _label(self, document: list[int]) -> list[dict[int, float]]:
        asked, start = self._asked, len(self._asked.prefix)
        lib.llama_memory_seq_rm(self._memory, -1, start, -1)
        self._decode([(token, start + i, 0, False) for i, token in enumerate(document)])
        start += len(document)
        rows = []
        for number, question in enumerate(asked.questions, 1):
            lib.llama_memory_seq_rm(self._memory, number, -1, -1)
            lib.llama_memory_seq_cp(self._memory, 0, number, -1, -1)
            last = len(question) - 1
            rows += [(token, start + i, number, i == last) for i, token in enumerate(question)]
        logits = self._decode(rows)
        logits = logits - logits.max(1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return [
            {token: float(of_question[token]) for token in tokens}
            for tokens, of_question in zip(asked.tokens, log_probs, strict=True)
        ]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """The logits of the rows (token, position, sequence, is_read) that are read."""
        logits = [np.empty((0, self._vocab), np.float32)]
        for first in range(0, len(rows), _BATCH):
            part = rows[first : first + _BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, is_read) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_read
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if status := lib.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {status} for {len(part)} tokens")
            for i, (*_, is_read) in enumerate(part):
                if is_read:
                    row = lib.llama_get_logits_ith(self._context, i)
                    logits.append(np.ctypeslib.as_array(row, (1, self._vocab)).copy())
        return np.concatenate(logits)


def _converted(setup: Setup) -> Path:
    """The GGUF file in the number format, made on first use of the model's own."""
    if setup.gguf is None:
        raise RuntimeError("model.path: llama.cpp needs a GGUF file")
    path = Path(setup.cache) / f"{setup.number_format}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        options = lib.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = _KINDS[setup.number_format], True
        status = lib.llama_model_quantize(setup.gguf.encode(), str(part).encode(), options)
        if status:
            raise RuntimeError(f"llama_model_quantize returned {status}")
        part.rename(path)
    return path
