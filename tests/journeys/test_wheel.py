"""The wheel in a new environment, without the checkout and without an extra."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from person import REPOSITORY, Person, comments

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
TASK = 'tasks: [{name: toxic, question: "Is it toxic?", labels: [toxic, clean]}]\n'
LANGUAGE = """\
name: language
input: {path: corpus.csv, id: id}
output: out/language
tasks: [{name: language, classifier: {kind: language}, labels: [English, German]}]
"""


@pytest.fixture
def installed(person: Person, tmp_path_factory: pytest.TempPathFactory) -> Person:
    """Somebody whose environment has torch and the wheel, and nothing of the tests."""
    source = tmp_path_factory.mktemp("source") / "assay"
    keep = shutil.ignore_patterns(".*", "build", "out", "site", "models", "*.egg-info")
    shutil.copytree(REPOSITORY, source, ignore=keep)
    built = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True)
    (wheel,) = built.glob("corpus_assay-*.whl")
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/pip"), "install", "--quiet"]
    for package in ("torch==2.13.0", str(wheel)):
        subprocess.run([*pip, package], check=True, cwd=built)
    return Person(person.folder, person.home, programs=environment / "bin")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_wheel_alone_labels_and_names_the_extra_that_is_missing(installed: Person) -> None:
    assert not list(installed.programs.parent.rglob("site-packages/polars"))
    help = installed.types("assay --help")
    assert "assay" in help.out and help.seconds < 10
    installed.writes_csv("corpus.csv", comments(20))
    installed.writes_csv("gold.csv", comments(20))
    installed.types("assay init corpus.csv --to my.yaml --model smollm2.gguf")
    spec = (installed.folder / "my.yaml").read_text()
    head = spec.partition("\ntasks:")[0]
    installed.writes("my.yaml", f"{head}\n{TASK}")
    output = installed.types("assay run my.yaml")
    assert re.search(r"labelled now +20;", output.out)
    assert "10 of 20 documents" in installed.types("assay export my.yaml --head 10").out
    installed.types("assay export my.yaml --to labels.csv && assay verify my.yaml")
    assert len(installed.reads_csv("labels.csv")) == 20

    installed.writes("language.yaml", LANGUAGE)
    bucket = re.sub(r"^output:.*$", "output: gs://bucket/out", head, flags=re.MULTILINE)
    installed.writes("gs.yaml", f"{bucket}\n{TASK}")
    frame = "import pipeline; pipeline.open_labels('out/corpus').to_polars()"
    for extra, line, code in (
        ("classifiers", "assay run language.yaml", 2),
        ("gcs", "assay run gs.yaml", 2),
        ("frames", f'python -c "{frame}" 2>&1 | tail -n 1', 0),
    ):
        last = installed.types(line, code=code).text.splitlines()[-1]
        assert f"pip install 'corpus-assay[{extra}]'" in last, last
