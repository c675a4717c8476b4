"""A session on a rented GPU: its plan, what is carried to it, its steps where they can run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.gpu import carry, server, session

METRICS = """# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1.5e+09
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 150000000000
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
"""


def test_what_matters_comes_first_and_each_step_has_a_limit(tmp_path: Path) -> None:
    found = list(session.planned(tmp_path, tmp_path))
    parts = [step.part for step in found]
    assert parts[:6] == ["probe", "train", "train", "train", "cuda", "session"]
    assert (parts[-2], found[-1].title) == ("faults", "a server under load")
    assert "TensorRT" not in " ".join(step.title for step in found if not step.skip)
    assert all(0 < step.limit_s <= 120 for step in found if not step.skip)


def test_a_bundle_is_unpacked_with_its_last_part_and_a_damaged_part_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "module.py").write_bytes(os.urandom(2500))
    archive = tmp_path / "site.tar.gz"
    with carry.tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "site", "site")
    sent, dest = carry.split(archive, tmp_path / "out", "base", part_bytes=1024), tmp_path / "dest"
    notes = [carry.unpack(folder, dest) for folder in reversed(sent)]
    assert notes[0] == "base: still missing: base.part.01 base.part.02"
    assert notes[-1] == f"base: unpacked to {dest / 'site'}"
    content = (tmp_path / "site" / "module.py").read_bytes()
    assert (dest / "site" / "module.py").read_bytes() == content
    assert not list((dest / "parts").iterdir())
    (part,) = sent[0].glob("*.part.*")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="damaged on its way"):
        carry.unpack(sent[0], tmp_path / "other")


def test_gpu_figures_of_the_server_are_compared_with_nvidia_smi() -> None:
    ours = server.gauges(METRICS)
    assert ours == {"nv_gpu_memory_used_bytes": 1.5e9, "nv_gpu_memory_total_bytes": 1.5e11}
    assert server.differences(ours, {**ours, "nv_gpu_memory_used_bytes": 2.5e9}) == []
    (wrong,) = server.differences(ours, {**ours, "nv_gpu_memory_used_bytes": 1.5e10})
    assert wrong.startswith("nv_gpu_memory_used_bytes: 1500000000.0 in /metrics")
    assert len(server.differences({}, ours)) == 1
    assert server.differences({}, {}) == []
