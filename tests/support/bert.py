"""A BERT of two heads and one layer, small enough to be exported in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deploykit.engines.torch.files  # noqa: F401 - declares torchvision's operators


def save_tiny_bert(folder: Path, kind: str = "BertForSequenceClassification", **more: Any) -> Path:
    """Write a folder as `save_pretrained` does; `kind`: the class, `more`: of its configuration."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        **more,
    )
    model = getattr(transformers, kind)(config)
    model.save_pretrained(folder)
    return folder
