"""Gold labels of people: an append-only file of JSON lines, each one action of one person.

Entry points: `GoldFile.open` to read and to append, `label_columns` for the verbs that read gold.
A line is `{"doc_id", "content_hash", "task", "action", "label", "by", "at", "seconds", "shown"}`.
The current answer of a person for a document is the last action that is not undone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Literal, Self, TypeVar

from pipeline.errors import Option, Problem, SpecError, StorageError, option_error
from pipeline.gold.files import HASH, LINE_FIELDS, GoldRows, is_beginning
from pipeline.hashes import parse_json, validated
from pipeline.spec.tasks import TaskSpec

logger = logging.getLogger(__name__)

Action = Literal["label", "skip", "flag", "undo"]
Given = TypeVar("Given", bound=Hashable)
Label = str | tuple[str, ...]  # of a task of kind `multi`: the labels that apply, or ()
# Values of `Shown.chosen` of rows that are no random sample.
_TEACHING = frozenset({"diverse", "uncertain", "where"})


@dataclass(frozen=True, slots=True)
class Drawn:
    """How a text was drawn for an audit: a stratified random sample of the texts of a snapshot."""

    sample: str  # the name of the sample
    snapshot: int
    rule: str  # of the filter whose decisions are strata
    texts: int  # that the sample was drawn from
    drawn: int  # texts of the sample
    stratum: int
    size: int  # texts of the stratum
    inclusion: float  # the probability with which each text of the stratum was drawn


@dataclass(frozen=True, slots=True)
class Shown:
    """What a person saw beside the document."""

    question: str | None  # the task's guide, or its question
    labels: tuple[str, ...]  # the task's, in the spec's order
    fp: str | None = None  # fingerprint of the model's answer; None: not shown
    p: Mapping[str, float] | None = None  # the model's probabilities; None: not shown
    blind: bool = False  # whether the model's answer was hidden
    chosen: str = ""  # why this document was shown, such as `diverse`
    audit: Drawn | None = None  # of a document that was drawn for an audit

    @property
    def sample(self) -> str | None:
        """The name of the audit's sample that the document is of."""
        return None if self.audit is None else self.audit.sample

    @classmethod
    def of(cls, task: TaskSpec, **others: object) -> Self:
        """The task's question and labels as they are now, and the other fields."""
        question = task.guide or task.question
        return validated(cls, {"question": question, "labels": tuple(task.labels), **others})


@dataclass(frozen=True, slots=True)
class GoldLine:
    """One action of one person on one document, for one task."""

    doc_id: str
    content_hash: str
    task: str
    action: Action
    label: Label | None  # None of an action that is not `label`
    by: str  # the person
    at: str  # ISO 8601, UTC
    seconds: float  # from when the document was shown
    shown: Shown

    def __post_init__(self) -> None:
        for name in ("content_hash", "by"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if (self.label is None) != (self.action != "label"):
            raise ValueError(f"an action {self.action} has the label {self.label!r}")
        if datetime.fromisoformat(self.at).utcoffset() != timedelta(0):
            raise ValueError(f"at is {self.at!r}; write the time in UTC, as 2026-01-31T09:00:00Z")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}, and no duration")

    @property
    def key(self) -> tuple[str, str]:
        """Whose answer it is, for which document: (content_hash, by)."""
        return self.content_hash, self.by


class GoldFile:
    """A file of people's labels, open for one task; a lock keeps other processes from appending.

    >>> with GoldFile.open("gold.jsonl", task) as gold:
    ...     gold.append(line)
    ...     gold.answers[content_hash, person].label

    Lines of other tasks stay as they are. Use it from one thread.
    """

    def __init__(self, path: Path, task: TaskSpec, file: FileIO) -> None:
        self._path, self._task, self._file = path, task, file
        self._lines: list[GoldLine] = []
        self._stacks: dict[tuple[str, str], list[GoldLine]] = {}
        self._samples = set[str | None]()
        for line in _whole_lines(path, file, task):
            self._samples.add(line.shown.sample)
            if line.task == task.name:
                self._add(line)
        self._content = sha256(_content(file))  # when last read or written here

    @classmethod
    def open(cls, path: str | Path, task: TaskSpec) -> Self:
        """The file at a local path, which is created if it does not exist.

        A last line without a line break gets one. A partial line that a crash left is removed from
        the file, with a line in the log.

        Raises:
            SpecError: A line is malformed, has a label that the task does not have, or was
                answered with another question or other labels; or another process has the file
                open.
            StorageError: The file cannot be read or written.
        """
        local = _local_path(path)
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            file = _locked(local, os.O_CREAT)
            try:
                return cls(local, task, file)
            except BaseException:
                file.close()
                raise
        except BlockingIOError as error:
            fix = "another process has this file open; end that process, or name another file"
            raise option_error("to", fix, str(local)) from error
        except OSError as error:
            raise StorageError(f"{local}: cannot be opened as a gold file: {error}") from error

    @property
    def lines(self) -> tuple[GoldLine, ...]:
        """All lines of the task, in the file's order; also what was undone."""
        return tuple(self._lines)

    @property
    def answers(self) -> dict[tuple[str, str], GoldLine]:
        """The current answer (label, skip or flag) of each person for each document.

        Keyed by (content_hash, by), in the order of the first answers.
        """
        return {key: stack[-1] for key, stack in self._stacks.items() if stack}

    def check_sample(self, sample: str | None) -> None:
        """SpecError if the file has other lines than those of this sample; None is no sample.

        A file of an audit has no other lines, so that all of its lines are evidence.
        """
        if self._samples <= {sample}:
            return
        fix = "has answers to other documents than this audit's sample; name a new file"
        if sample is None:
            fix = "has the answers of an audit, which takes no other documents; go on with --by "
            fix += "audit, or name a new file"
        raise option_error("to", fix, str(self._path))

    def append(self, line: GoldLine) -> None:
        """Writes one line, and returns when it is on the disk.

        An `undo` takes the person's last answer for the document back; without one it has no
        effect.

        Raises:
            SpecError: The line is of another task, has a label that the task does not have, or is
                not of the sample that the answers are of.
            StorageError: It cannot be written; then the file is as it was. Or another program
                changed, replaced or deleted the file.
        """
        if line.task != self._task.name:
            raise option_error("task", f"the file is open for {self._task.name}", line.task)
        check_line(line, self._task, Option("to", part=f" {self._path}"))
        self.check_sample(line.shown.sample)
        data = json.dumps(asdict(line), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._find_unchanged()
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise StorageError(f"{self._path}: cannot be written: {error}") from error
        self._content.update(data)
        self._find_unchanged()  # — it may have been replaced meanwhile
        self._samples.add(line.shown.sample)
        self._add(line)

    def _find_unchanged(self) -> None:
        """Opens the file again if a copy replaced it; StorageError if its content differs."""
        reason = "another program changed it"
        try:
            if not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                copy = _locked(self._path)
                self._file.close()
                self._file = copy
            if sha256(_content(self._file)).digest() == self._content.digest():
                return
        except FileNotFoundError:
            reason = "it is not there any more"
        except OSError as error:
            reason = f"it cannot be read: {error}"
        fix = "your answer was not written; end the review and start it again to go on with"
        raise StorageError(f"{self._path}: {reason}; {fix} the file as it is")

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, line: GoldLine) -> None:
        self._lines.append(line)
        _act(self._stacks.setdefault(line.key, []), line)


def _content(file: FileIO) -> bytes:
    file.seek(0)
    return file.read() or b""


def _locked(path: Path, flags: int = 0) -> FileIO:
    """The file, open to read and to append; BlockingIOError if another process has it open."""
    file = FileIO(os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o666), "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def majority(labels: Sequence[Given]) -> Given | None:
    """The label that most people gave; None for a tie. At least one."""
    most, *others = Counter(labels).most_common(2)
    return None if others and others[0][1] == most[1] else most[0]


def _act(answers: list[GoldLine], line: GoldLine) -> None:
    """Changes a person's answers for a document, the last of which is the current one."""
    if line.action != "undo":
        answers.append(line)
    elif answers:
        answers.pop()


def _local_path(path: str | Path) -> Path:
    if "://" in str(path):
        fix = "people's labels are written to a local file, which can be locked; name one"
        raise option_error("to", fix, str(path))
    if Path(path).suffix != ".jsonl":
        raise option_error("to", "end the name in .jsonl", str(path))
    return Path(path)


def _whole_lines(path: Path, file: FileIO, task: TaskSpec) -> Iterator[GoldLine]:
    """All lines. When those of the task fit, the file ends in a whole line.

    A last line without a line break gets one. A partial line that a crash left is removed.
    """
    data = _content(file)
    *whole, last = data.split(b"\n")
    is_torn = bool(last) and is_beginning(last)
    for number, text in enumerate([*whole, last] if last and not is_torn else whole, start=1):
        if not text.strip():
            continue
        place = Option("to", part=f" {path}, line {number}")
        try:
            value = parse_json(text)
        except ValueError as error:
            fix = f"is not JSON ({error}); correct or remove this line"
            raise SpecError([Problem(place, fix, text.decode(errors="replace"))]) from error
        line = _line(value, place)
        if line.task == task.name:
            check_line(line, task, place)
        yield line
    if is_torn:
        words = "%s: the last line was unfinished (a crash?) and is removed: %s"
        logger.warning(words, path, last.decode(errors="replace"))
        file.truncate(len(data) - len(last))
    elif last:
        file.write(b"\n")


def _line(value: object, place: Option) -> GoldLine:
    try:
        return validated(GoldLine, value)
    except ValueError as error:
        fix = f"is not an action of a person ({error}); correct or remove this line"
        raise SpecError([Problem(place, fix, value)]) from error


def check_line(line: GoldLine, task: TaskSpec, place: str) -> None:
    """SpecError if a line of the task has another wording, or a label that the task lacks."""
    labels = tuple(task.labels)
    of_line = {"question": line.shown.question, "labels": list(line.shown.labels)}
    of_task = {"question": task.guide or task.question, "labels": list(labels)}
    if changed := [name for name in of_task if of_line[name] != of_task[name]]:
        fix = f"has an older wording of task {task.name}: {changed[0]} was another, and is now "
        fix += f"{of_task[changed[0]]!r}; use another gold file, or the older wording"
        raise SpecError([Problem(place, fix, of_line[changed[0]])])
    if line.label is None:
        return
    if isinstance(line.label, str) == (task.kind == "multi"):
        fix = "write a list of labels" if task.kind == "multi" else "write one label"
        raise SpecError([Problem(place, f"{fix} of task {task.name}", line.label)])
    own = (line.label,) if isinstance(line.label, str) else line.label
    if unknown := [label for label in own if label not in labels]:
        fix = f"is not a label of task {task.name}, which has {', '.join(labels)}"
        raise SpecError([Problem(place, fix, unknown[0])])
    if len(set(own)) < len(own):
        raise SpecError([Problem(place, "names a label twice; name it once", list(own))])


def is_audit(rows: GoldRows) -> bool:
    """Whether rows of actions are of an audit."""
    shown = rows.columns["shown"] if rows.columns.keys() >= LINE_FIELDS else ()
    return any(isinstance(each, Mapping) and each.get("audit") for each in shown)


def label_columns(rows: GoldRows, tasks: Collection[TaskSpec]) -> GoldRows:
    """The current labels in rows of actions, as a gold file has them; other rows unchanged.

    A row is a document and a person who gave it a label: with doc_id, content_hash and a column
    for each of the tasks that has labels, of texts or, for the kind `multi`, of lists. `chosen` has
    why rows are no random sample. SpecError for a malformed action, an older wording or an unknown
    label of these tasks.
    """
    if not rows.columns.keys() >= LINE_FIELDS:
        return rows
    current = current_lines(rows, tasks)
    chosen: dict[str, Counter[str]] = {}
    for line in current:
        if (reason := line.shown.chosen) in _TEACHING:
            chosen.setdefault(line.task, Counter())[reason] += 1
    return GoldRows(rows.path, _columns(current), chosen=chosen)


def current_lines(rows: GoldRows, tasks: Collection[TaskSpec]) -> list[GoldLine]:
    """The lines of the tasks' current labels; SpecError as `label_columns` raises it."""
    by_name = {task.name: task for task in tasks}
    stacks: dict[tuple[str, str, str], list[GoldLine]] = {}
    for row in range(rows.rows):
        line = _line({name: rows.columns[name][row] for name in LINE_FIELDS}, rows.place(row))
        if line.task in by_name:
            check_line(line, by_name[line.task], rows.place(row))
            _act(stacks.setdefault((*line.key, line.task), []), line)
    return [stack[-1] for stack in stacks.values() if stack and stack[-1].label is not None]


def _columns(labelled: Collection[GoldLine]) -> dict[str, list[object]]:
    of_row: dict[tuple[str, str], dict[str, GoldLine]] = {}
    for line in labelled:
        of_row.setdefault(line.key, {})[line.task] = line
    first_lines = [next(iter(lines.values())) for lines in of_row.values()]
    columns: dict[str, list[object]] = {
        "doc_id": [line.doc_id for line in first_lines],
        HASH: [line.content_hash for line in first_lines],
    }
    for task in dict.fromkeys(line.task for line in labelled):
        answers = [lines.get(task) for lines in of_row.values()]
        labels = [line and line.label for line in answers]
        columns[task] = [list(label) if isinstance(label, tuple) else label for label in labels]
    return columns
