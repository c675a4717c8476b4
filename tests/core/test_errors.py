from __future__ import annotations

import pickle

import pytest

from deploykit.core import errors

CODES = {  # exit code, HTTP, gRPC: the published ones
    "GateFailed": (1, 500, "INTERNAL"),
    "BadInput": (2, 400, "INVALID_ARGUMENT"),
    "NotFound": (2, 404, "NOT_FOUND"),
    "TooLarge": (2, 413, "RESOURCE_EXHAUSTED"),
    "UnknownEncoding": (2, 415, "INVALID_ARGUMENT"),
    "Unsupported": (3, 501, "UNIMPLEMENTED"),
    "MissingExtra": (3, 501, "UNIMPLEMENTED"),
    "Overloaded": (3, 503, "UNAVAILABLE"),
    "Expired": (3, 504, "DEADLINE_EXCEEDED"),
    "DeploykitError": (70, 500, "INTERNAL"),
}


def test_exit_codes_and_statuses_are_the_published_ones() -> None:
    kinds = [getattr(errors, name) for name in CODES]
    assert all(issubclass(kind, errors.DeploykitError) for kind in kinds)
    found = [(kind.exit_code, kind.http_status, kind.grpc_status) for kind in kinds]
    assert found == list(CODES.values())


def test_message_and_hint_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(errors.BadInput("m.onnx: is empty", hint="make it again")))
    assert (str(error), error.hint) == ("m.onnx: is empty", "make it again")


@pytest.mark.parametrize(
    ("text", "line"), [("a\nb", "a"), ("\n  \n b \nc", "b"), (" \n", "ValueError")]
)
def test_first_line_returns_one_printable_line(text: str, line: str) -> None:
    assert errors.first_line(ValueError(text)) == line


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://me:secret@host:8000/v2?token=secret#secret", "http://host:8000/v2"),
        ("me:secret@host", "host"),
        ("http://me:sec@r?e#t/secret@host", "http://host"),
    ],
)
def test_no_url_in_a_message_holds_a_secret(url: str, shown: str) -> None:
    assert errors.without_secrets(url) == shown
