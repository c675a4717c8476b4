"""The recipe of characters: perplexity, padding, and texts that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.files import folder, import_object  # noqa: E402
from deploykit.core.recipe import load_recipe  # noqa: E402
from deploykit.training import checks  # noqa: E402
from deploykit.training.loop import run_training  # noqa: E402
from deploykit.training.options import TrainingOptions  # noqa: E402
from tests.support.training import cut  # noqa: E402

pytestmark = pytest.mark.torch


def of_recipe(attribute: str) -> Any:
    return import_object(f"{folder('models') / 'char_lstm'}.py:{attribute}")


def test_char_lstm_reaches_less_than_half_of_the_unigrams_perplexity() -> None:
    """On a tenth of the text, after 60 steps; in full it is 5.8 against 21.8 after 4 epochs."""
    recipe = load_recipe("char-lstm")
    splits = recipe.data(None)
    options = TrainingOptions(device="cpu", epochs=4, batch_size=16)
    figures = run_training(recipe, cut(splits, 240), options).figures
    assert figures["perplexity"] < figures["unigram_perplexity"] / 2
    assert figures["sample"].startswith("The ")
    assert len(figures["sample"]) > 4


def test_the_text_is_split_padded_and_decoded() -> None:
    recipe = load_recipe("char-lstm")
    splits = recipe.data(None)
    ids, labels = splits.train.inputs["ids"], splits.train.labels
    assert ids.shape == labels.shape
    assert ids.shape[1] == 96
    assert ((ids == 0) == (labels == -100)).all()  # padding, and nothing else
    lengths = (labels != -100).sum(1)
    assert lengths.min() >= 1
    assert lengths.max() == 96
    same = ids[:, 1:] == labels[:, :-1]  # a label is the next input
    assert same[ids[:, 1:] > 0].all()
    text = of_recipe("decode")(labels[labels > 0])
    assert "We the People of the United States" in text


def test_no_piece_of_text_is_in_two_splits() -> None:
    recipe = load_recipe("char-lstm")
    assert sum(each.numel() for each in recipe.build().parameters()) == 432_609  # as it says
    splits = checks.check_splits(recipe, recipe.data(None))
    assert checks.shared_samples(splits) == {}


def test_padding_changes_no_prediction() -> None:
    torch.manual_seed(0)
    module = load_recipe("char-lstm").build().eval()
    ids = torch.randint(1, 97, (1, 10))
    padded = torch.nn.functional.pad(ids, (0, 6))
    with torch.no_grad():
        assert torch.allclose(module(ids), module(padded)[:, :10], atol=1e-6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"one paragraph", "1 paragraphs"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"\n\n \n\n" * 50, "0 paragraphs"),
        (b"the same\n\n" * 20, "repeats itself"),
    ],
    ids=str,
)
def test_a_text_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(BadInput, match=reason):
        load_recipe("char-lstm").data(tmp_path / "t.txt")


def test_characters_that_are_not_ascii_become_question_marks(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(
        "\n\n".join(f"{number} Größe ☃ \x07" for number in range(10)), encoding="utf-8"
    )
    labels = load_recipe("char-lstm").data(tmp_path / "t.txt").test.labels
    assert of_recipe("decode")(labels[labels > 0]) == "9 Gr??e ? ?\n"


# Transfer
