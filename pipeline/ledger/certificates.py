"""The certificates of an output: what its runs proved about cascades.

Entry points: `read_certificates` and `write_certificate`. A later certificate of a task is
kept beside the earlier ones: a snapshot names the one that it was made with.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipeline.errors import StorageError
from pipeline.fitted.certificate import Certificate, parse_certificate
from pipeline.ledger.keys import certificate_key
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.stores.store import Store


def read_certificates(store: Store, task: str) -> Iterator[Certificate]:
    """The certificates of a task, the newest one first.

    StorageError if one is damaged.
    """
    key_of = partial(certificate_key, task)
    for number in reversed(numbers(store, key_of)):
        try:
            yield parse_certificate(store.read(key_of(number)))
        except ValueError as error:
            fix = "remove the object, and run again"
            raise StorageError(f"{store.url}/{key_of(number)}: {error}; {fix}") from error


def write_certificate(store: Store, certificate: Certificate) -> None:
    """Writes the certificate as the task's newest one, unless that says the same."""
    if next(read_certificates(store, certificate.task), None) == certificate:
        return
    key_of = partial(certificate_key, certificate.task)
    for number in free_numbers(store, key_of):
        if store.create(key_of(number), certificate.json()):
            return
