"""A photo through HTTP is answered as PyTorch and torchvision's own transforms answer it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from tests.support.campaign import only_in_a_campaign
from tests.support.installed import needs
from tests.support.serving.running import running

needs("PIL", "sklearn", "torch", "torchvision", "onnxscript")

from PIL import Image  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import photo  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch, only_in_a_campaign]
ATOL = 1e-4  # of a probability; 1.4e-8 was seen


def test_a_photo_is_answered_as_torchvision_answers_it(tmp_path: Path) -> None:
    import torch

    from tests.support.zoo.models import register_torchvision

    register_torchvision()
    from torchvision import models

    torch.manual_seed(0)
    module = models.resnet18().eval()
    torch.save(module.state_dict(), tmp_path / "resnet18.pth")
    made = dk.export(tmp_path / "resnet18.pth", arch="resnet18", task="classify")
    weights = models.ResNet18_Weights.IMAGENET1K_V1
    (engine,) = open_proven(made.path)
    with engine, running({"m": engine}) as server:
        client = dk.client(f"http://127.0.0.1:{server.port}")
        for name in ("china", "flower"):
            file = tmp_path / f"{name}.jpg"
            file.write_bytes(photo(name))
            with Image.open(file) as opened, torch.no_grad():
                scores = module(weights.transforms()(opened)[None]).softmax(1)[0].numpy()
            found = client.predict(file)
            assert found["label"] == weights.meta["categories"][int(scores.argmax())]
            for each in found["top"]:
                np.testing.assert_allclose(each["score"], scores[each["index"]], atol=ATOL)
        client.close()
