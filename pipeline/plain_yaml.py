"""YAML as a spec is written: what surprises in it is refused, and no line of it is repeated.

Knows YAML. Knows nothing of a spec's keys.
"""

from __future__ import annotations

from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """YAML without its surprises: `yes` is a string, a key stands once, no anchors."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"write the value out: anchors are not read, line {line}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is one word, line {key_node.start_mark.line + 1}")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise yaml.YAMLError(f"{key!r} stands twice, line {mark.line + 1}; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads yes, no, on, off as booleans and 2026-11-01 as a date: labels, here.
PlainLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def reason(error: Exception) -> str:
    """Why YAML cannot be read, and in which line; not the line itself, which may hold a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{' '.join(part for part in (error.context, error.problem) if part)}{line}"
