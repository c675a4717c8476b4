"""Where a run puts its tensors, and several processes against one.

torch's fake and meta tensors stand in for a GPU's; gloo joins two processes on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from deploykit.core.errors import BadInput
from deploykit.core.recipe import Split
from deploykit.training import data as batches
from deploykit.training.data import Augmentation, Batches
from deploykit.training.distributed import Processes, join_processes, parallel
from deploykit.training.loop import run_training
from deploykit.training.options import TrainingOptions, choose_device
from tests.support.campaign import only_in_a_campaign
from tests.support.training import LINE, SPLITS

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
SPLIT = Split({"x": np.zeros((8, 3), np.float32)}, np.zeros(8, np.int64))
CPU, META = torch.device("cpu"), torch.device("meta")


def two_layers() -> torch.nn.Module:
    """With a buffer, as one that preprocesses has: processes share it before a step."""
    found = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    found.register_buffer("mean", torch.zeros(2))
    return found


def train_two_layers(options: dict[str, Any], group: Processes) -> dict[str, Any]:
    """What a run on the CPU with these options gives, as JSON values; all processes call it."""
    checkpoint = {"checkpoint": Path(options["checkpoint"])} if "checkpoint" in options else {}
    chosen = TrainingOptions(device="cpu", **options | checkpoint)
    recipe = replace(LINE, build=two_layers, clip_norm=1.0)
    made = run_training(recipe, SPLITS, chosen, group=group)
    return {
        "losses": [each["loss"] for each in made.history],
        "weights": torch.cat([each.flatten() for each in made.module.parameters()]).tolist(),
        "notes": list(made.notes),
        "figures": made.figures,
    }


def train_here(options: dict[str, Any], out: str) -> None:
    with join_processes("cpu") as group:
        made = train_two_layers(options, group)
        if group.first:
            Path(out).write_text(json.dumps(made))


def launch(options: dict[str, Any], out: str) -> None:
    """As `torchrun --standalone --nproc-per-node=2`, but torch is imported once for both."""
    import torch._dynamo  # noqa: F401 - not in each of them
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork"
    )
    elastic_launch(config, train_here)(options, out)


def run(*words: object, cwd: Path = ROOT) -> str:
    """Run Python with these words; returns what it and its processes print."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train_in_two(folder: Path, **options: object) -> dict[str, Any]:
    out = folder / "out.json"
    program = "from tests.training.test_parallel import launch"
    run("-c", f"{program}; launch({options!r}, {str(out)!r})")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 5, "batch_size": 21, "seed": 3},
        *(
            pytest.param({"epochs": 3, "batch_size": n, "fsdp": True}, marks=only_in_a_campaign)
            for n in (21, 199, 200)
        ),
    ],
    ids=str,
)
def test_two_processes_give_the_losses_of_one(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of 200 samples: the last batch is of an odd number, or of one: a process has none of it."""
    one = train_two_layers({**options, "fsdp": False}, Processes())
    two = train_in_two(tmp_path, **options)
    assert len(one["losses"]) == options["epochs"]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-4)
    figures = two["figures"]
    assert figures["processes"] == 2
    if "fsdp" not in options:
        shares = (figures["scaling_efficiency"], figures["communication_share"])
        assert all(0 <= each <= 1 for each in shares)
        note = "2 processes: scaling efficiency {:.1%}, communication {:.1%} of a step"
        assert note.format(*shares) in two["notes"]


@only_in_a_campaign
def test_two_processes_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"epochs": 3, "checkpoint": str(tmp_path / "run.ckpt")}
    runs = [train_in_two(tmp_path, **each) for each in ({"epochs": 3}, options, options)]
    assert runs[0]["losses"] == runs[1]["losses"] == runs[2]["losses"]
    assert "went on after epoch 3" in str(runs[2]["notes"])


@only_in_a_campaign
def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ["train", ROOT / "examples/own_recipe.py", "-o", "m.pt", "--epochs", "2", "--json"]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    printed = run(*torchrun, "-m", "deploykit", *words, "--device", "cpu", cwd=tmp_path)
    figures = json.loads(printed)["manifest"]["evidence"]["training"]["figures"]
    assert figures["processes"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.pt.json"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "'LOCAL_RANK'"),
        ({"LOCAL_RANK": "0"}, "RANK expected"),
        ({"LOCAL_RANK": "0", "RANK": "x"}, "'x'"),
    ],
)
def test_half_of_torchruns_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=f"that torchrun sets: .*{said}"), join_processes("cpu"):
        pass


@pytest.fixture(name="pinned")
def pinned_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The device of each tensor that was pinned. torch sees a GPU, whose memory is META."""
    found: list[Any] = []

    def pin(tensor: Any) -> Any:
        found.append(tensor.device)
        assert tensor.device == CPU, f"torch cannot pin a tensor on {tensor.device}"
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(batches, "WaitClock", lambda _device: nullcontext())
    return found


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_data_on_the_gpu_are_not_copied_again(name: str, pinned: list[Any]) -> None:
    made, device = Batches(SPLIT, META, 4, 0), choose_device(name)
    with FakeTensorMode():
        assert torch.empty(1, device=device).device.type == device.type == "cuda"
    made.device = device
    (x, *_), labels, share = next(iter(made))
    assert (x.device, labels.device, share, pinned) == (META, META, 1.0, [])


def test_batches_that_the_cpu_augments_are_pinned_and_copied(pinned: list[Any]) -> None:
    augmentation = Augmentation(lambda images, _: images, 0, CPU)
    (x, *_), labels, _ = next(iter(Batches(SPLIT, META, 4, 0, None, augmentation)))
    assert (x.device, labels.device, pinned[:2]) == (META, META, [CPU, CPU])


@pytest.mark.parametrize(("name", "ids"), [("cuda:2", [2]), ("cuda", [1]), ("cpu", None)])
def test_a_process_is_joined_on_the_gpu_of_its_weights_and_shares_batch_norm(
    name: str, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has local rank 1, whose GPU is meant where no index is named."""
    asked: list[Any] = []
    ddp = "torch.nn.parallel.DistributedDataParallel"
    monkeypatch.setattr(ddp, lambda run, device_ids: (run, asked.append(device_ids))[0])
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = parallel(module, Processes(1, 2, local=1), torch.device(name), shard=False)
    assert asked == [ids]
    assert type(found[1]).__name__ == ("SyncBatchNorm" if ids else "BatchNorm1d")


class Layers(torch.nn.Module):
    """Blocks in a list, as transformers have them, in a module that holds most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.by_name = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8)})
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.ReLU())


@pytest.mark.parametrize("wrap", [lambda module: module, torch.nn.Sequential], ids=["", "wrapped"])
def test_fsdp_shards_the_blocks_inside_of_lists_and_wrappers_on_the_cpu_next_to_a_gpu(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        run = parallel(wrap(Layers()), Processes(0, 2), CPU, shard=True)
        names = {name for name, part in run.named_modules() if isinstance(part, FSDPModule)}
        blocks = {f"encoder.layers.{n}" for n in range(3)} | {"by_name.a", "head.0", ""}
        blocks |= set() if wrap is torch.nn.Sequential else {"head"}  # a child of the whole
        assert {name.removeprefix("0.").removeprefix("0") for name in names} == blocks
        for weight in run.parameters():
            assert weight.device_mesh.device_type == weight.device.type == "cpu"
    finally:
        dist.destroy_process_group()
