"""Two processes, joined by gloo on the CPU, against one: the same losses and weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, Unsupported  # noqa: E402
from deploykit.training.distributed import Processes, join_processes  # noqa: E402
from tests.support.campaign import only_in_a_campaign  # noqa: E402
from tests.support.training import train_two_layers  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from pathlib import Path
from deploykit.training.distributed import join_processes
from tests.support.training import train_two_layers
with join_processes("cpu") as group:
    made = train_two_layers(json.loads(sys.argv[1]), group)
    if group.first:
        Path(sys.argv[2]).write_text(json.dumps(made))
"""


def trained(tmp_path: Path, processes: int, **options: object) -> dict[str, Any]:
    """What a run gave; one process is this one, more are started by torchrun on a free port."""
    if processes == 1:
        return train_two_layers(options, Processes())
    (tmp_path / "run.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [tmp_path / "run.py", json.dumps(options), tmp_path / "out.json"]
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    """50 steps; batches of 20 and, at the end of each epoch, one of 11: an odd number."""
    options = {"epochs": 5, "batch_size": 21, "seed": 3}
    one, two = (trained(tmp_path, count, **options) for count in (1, 2))
    assert len(one["losses"]) == 5
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-4)
    figures = two["figures"]
    assert figures["processes"] == 2
    assert 0 <= figures["scaling_efficiency"] <= 1
    assert 0 <= figures["communication_share"] <= 1
    shares = (figures["scaling_efficiency"], figures["communication_share"])
    note = "2 processes: scaling efficiency {:.1%}, communication {:.1%} of a step".format(*shares)
    assert note in two["notes"]


@only_in_a_campaign
@pytest.mark.parametrize("size", [21, 199, 200])
def test_sharded_weights_give_the_losses_of_one_process(tmp_path: Path, size: int) -> None:
    """A batch of 199 leaves one sample for the last step: one process has none."""
    options = {"epochs": 3, "batch_size": size}
    one, two = trained(tmp_path, 1, **options), trained(tmp_path, 2, **options, fsdp=True)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-4)


@only_in_a_campaign
def test_two_processes_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    state = tmp_path / "run.ckpt"
    unbroken = trained(tmp_path, 2, epochs=3)
    first = trained(tmp_path, 2, epochs=3, checkpoint=str(state))
    again = trained(tmp_path, 2, epochs=3, checkpoint=str(state))
    assert unbroken["losses"] == first["losses"] == again["losses"]
    assert "went on after epoch 3" in str(again["notes"])


@only_in_a_campaign
def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    """One process prints, and one writes."""
    pytest.importorskip("sklearn")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["train", ROOT / "examples/own_recipe.py", "-o", "m.pt", "--epochs", "2", "--json"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "deploykit", *words, "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)["manifest"]["evidence"]["training"]["figures"]
    assert figures["processes"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.pt.json"]


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "x"}], ids=str
)
def test_half_of_torchruns_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((BadInput, Unsupported), match="torchrun"), join_processes("cpu"):
        pass
