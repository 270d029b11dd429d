"""Which model families the tree supports, and how long their prompts may be.

Entry points: `refuse_unsupported` and `longest_prompt`. Reads a configuration only: what it cannot
show is proved on the weights by `loading.prepare`.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import ModelError

_STATELESS = {"full_attention", "sliding_attention", "mlp", "moe"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
SUPPORTED = "use a decoder with full or sliding-window attention, or recurrent layers"


def family_name(config: Any) -> str:
    return f"model family {config.model_type!r}"


def refuse_unsupported(config: Any) -> None:
    """ModelError for a family whose attention has something that the tree does not model."""
    unknown = sorted(_layer_types(config) - _STATELESS - _RECURRENT)
    features = {
        f"layers of type {unknown}": bool(unknown),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "ALiBi positions": bool(getattr(config, "alibi", False)),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
    }
    if present := [feature for feature, is_present in features.items() if is_present]:
        raise ModelError(
            f"{family_name(config)} has {', '.join(present)}, which the tree does not model; "
            f"{SUPPORTED}"
        )


def is_recurrent(config: Any) -> bool:
    """Whether layers carry a state from token to token, so that only the staged schedule works."""
    return not _RECURRENT.isdisjoint(_layer_types(config))


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def longest_prompt(config: Any) -> int:
    """The most tokens whose rotary embedding depends on their own position only.

    LongRoPE (Ding et al., 2024) switches to other frequencies for all tokens of a forward once one
    of them is beyond the original length: a document's answer would depend on its batch. `dynamic`
    NTK scaling does the same, but only beyond `max_position_embeddings`; YaRN never does.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise ModelError(
            f"{family_name(config)} does not state its longest prompt (max_position_embeddings); "
            f"{SUPPORTED}"
        )
    # The parameters of all layers, or of each layer type.
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = [
        int(parameters["original_max_position_embeddings"])
        for parameters in (rope, *rope.values())
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope"
    ]
    return min([stated, *original])
