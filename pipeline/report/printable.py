"""Text of strangers, as people may look at it: nothing in it steers a terminal or a page.

Knows characters. Knows nothing of what they say.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with whatever does not print written out: control and direction marks, halves."""
    return "".join(char if char.isprintable() else _written_out(char) for char in text)


def shortened(text: str, chars: int) -> str:
    """The text's beginning, printable, and a mark where something is left out."""
    return printable(text if len(text) <= chars else text[: chars - 1].rstrip() + "…")


def _written_out(char: str) -> str:
    return " " if char in "\n\t\r" else char.encode("unicode_escape").decode()
