"""A Hugging Face tokenizer of a few words, with the special tokens of BERT."""

from __future__ import annotations

import hashlib
from pathlib import Path

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "good": 3, "bad": 4, "film": 5}


def write_tokenizer(path: Path, *, truncation: int = 0, padding: int = 0) -> str:
    """Write it; returns the file's SHA-256."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, WORDS[word]) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, special)
    if truncation:
        made.enable_truncation(truncation)
    if padding:
        made.enable_padding(length=padding)
    made.save(str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()
