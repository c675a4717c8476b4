"""The YAML that bundles write is read back as it was."""

from __future__ import annotations

import pytest
import yaml

from deploykit.bundling.yaml_text import Commented, yaml_document

DOCUMENT = {
    "kind": "X",
    "nested": {"a": [1, 2.5, True], "empty": {}, "none": [], "list": [{"k": "v", "d": {"x": 1}}]},
    "on a key": {"a/b.c": "yes", "no": "on", "1": "0x10", "null": "null"},
}


def test_a_document_is_read_back_as_it_was() -> None:
    assert yaml.safe_load(yaml_document(DOCUMENT)) == DOCUMENT


def test_several_documents_are_one_stream() -> None:
    assert list(yaml.safe_load_all(yaml_document(DOCUMENT, {"b": 2}))) == [DOCUMENT, {"b": 2}]


@pytest.mark.parametrize(
    "text",
    ['a "quoted" one', "two\nlines", "tab\t\r", "back\\slash", "größe ✓ 😀", "\x7f\x85\u2028",
     "#: -", "", " ", "~", "2026-11-23", "1e3", "{a}", "%x", "@y", "\ufeff", "\x00"],
)  # fmt: skip
def test_any_string_survives_as_value_and_key(text: str) -> None:
    assert yaml.safe_load(yaml_document({text: text})) == {text: text}


def test_a_comment_stands_above_its_key() -> None:
    text = yaml_document({"list": [{Commented("a", "why"): 1, Commented("b", "how"): 2}]})
    assert yaml.safe_load(text) == {"list": [{"a": 1, "b": 2}]}
    assert text.splitlines()[1:3] == ["  # why", "  - a: 1"]
