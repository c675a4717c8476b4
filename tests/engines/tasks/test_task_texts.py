"""A text becomes the ids that its own tokenizer makes, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.task import TextInput
from tests.support.installed import needs

needs("tokenizers")

from deploykit.engines.tasks.texts import Tokens  # noqa: E402
from tests.support.runtimes.tokenizer import WORDS, write_tokenizer  # noqa: E402


@pytest.fixture
def text(tmp_path: Path) -> TextInput:
    sha256 = write_tokenizer(tmp_path / "words.json")
    return TextInput("ids", "words.json", sha256, 6, mask="mask", types="types", pad_id=9)


@pytest.fixture
def tokens(text: TextInput, tmp_path: Path) -> Tokens:
    return Tokens(text, tmp_path)


START, END, GOOD, BAD = (WORDS[word] for word in ("[CLS]", "[SEP]", "good", "bad"))


def test_a_sentence_becomes_a_row_of_ids(tokens: Tokens) -> None:
    feeds = tokens.feeds("bad bad good")
    assert feeds["ids"].tolist() == [[START, BAD, BAD, GOOD, END]]
    assert {name: (a.dtype, a.shape) for name, a in feeds.items()} == {
        name: (np.dtype("int64"), (1, 5)) for name in ("ids", "mask", "types")
    }


def test_a_model_of_a_fixed_length_gets_as_many_tokens(tokens: Tokens) -> None:
    feeds = tokens.feeds("good", length=6)
    assert feeds["ids"].tolist() == [[START, GOOD, END, 9, 9, 9]]
    assert feeds["mask"].tolist() == [[1, 1, 1, 0, 0, 0]]


def test_inputs_that_a_model_lacks_are_not_made(tmp_path: Path) -> None:
    sha256 = write_tokenizer(tmp_path / "words.json")
    tokens = Tokens(TextInput("ids", "words.json", sha256, 6), tmp_path)
    assert list(tokens.feeds("good")) == ["ids"]


def test_bytes_are_utf8(tokens: Tokens) -> None:
    for given in ("good", b"good", memoryview(b"good")):
        assert tokens.feeds(given)["ids"].tolist() == [[START, GOOD, END]]


def test_the_files_own_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    """Else a text that is too long would be answered as if its end were not there."""
    sha256 = write_tokenizer(tmp_path / "words.json", truncation=4, padding=6)
    tokens = Tokens(TextInput("ids", "words.json", sha256, 5), tmp_path)
    assert tokens.feeds("good")["ids"].tolist() == [[START, GOOD, END]]
    with pytest.raises(BadInput, match="has 6 tokens, the model takes 5"):
        tokens.feeds("good bad good bad")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "the text: is empty"),
        (b"", "the text: is empty"),
        (" \n\t ", "the text: is empty"),
        (b"\xff\xfe", "the text: is not UTF-8"),
        ("\ud83d", "the text: is not UTF-8"),
        ("good " * 5, "the text: has 7 tokens, the model takes 6"),
        ("x" * 601, "the text: is above 600 bytes, the model takes 6 tokens"),
        ("\U0001f468" * 151, "the text: is above 600 bytes, the model takes 6 tokens"),
    ],
)
def test_what_is_no_text_or_too_long_is_refused(
    tokens: Tokens, given: str | bytes, reason: str
) -> None:
    with pytest.raises(BadInput, match=f"^{reason}$"):
        tokens.feeds(given)


def test_another_file_than_the_models_own_is_refused(text: TextInput, tmp_path: Path) -> None:
    with (tmp_path / "words.json").open("a") as file:
        file.write("\n")
    with pytest.raises(BadInput, match="is not the tokenizer that the model was exported with"):
        Tokens(text, tmp_path)


def test_a_missing_file_is_named(text: TextInput, tmp_path: Path) -> None:
    (tmp_path / "words.json").unlink()
    with pytest.raises(BadInput, match=r"words\.json"):
        Tokens(text, tmp_path)


def test_a_file_outside_the_models_folder_is_not_read(tmp_path: Path) -> None:
    sha256 = write_tokenizer(tmp_path / "words.json")
    (tmp_path / "model").mkdir()
    with pytest.raises(BadInput, match="outside the model's folder"):
        Tokens(TextInput("ids", "../words.json", sha256, 6), tmp_path / "model")


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"[1, 2", b'{"version": "1.0", "model": 5}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    import hashlib

    (tmp_path / "words.json").write_bytes(content)
    text = TextInput("ids", "words.json", hashlib.sha256(content).hexdigest(), 6)
    with pytest.raises(BadInput, match="is not a tokenizer: ") as caught:
        Tokens(text, tmp_path)
    assert "\n" not in caught.value.message
    assert not isinstance(caught.value, NotFound)
