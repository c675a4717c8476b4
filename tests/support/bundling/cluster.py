"""A Ray cluster of two nodes on this machine, one of which can lose its power."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import psutil
import yaml

from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.files import sha256
from deploykit.core.profile import load_profile
from deploykit.core.tensors import TensorSpec
from deploykit.deploying.clusters import write_ray
from deploykit.deploying.folder import Contents
from tests.support.onnx_zoo import save

WAIT_S = 120
SHAPE = (1, 64)


class TwoNodes:
    """The first node has the proxy that clients connect to; `second` can be lost."""

    def __init__(self, cpus: int) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # one machine, loopback alone
        self.ray: Any = importlib.import_module("ray")
        utils: Any = importlib.import_module("ray.cluster_utils")
        self.cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
        self.second = self.cluster.add_node(num_cpus=cpus)
        self.ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def lose_second(self) -> int:
        """Kill all processes of the second node at once, as a power cut does; their number."""
        raylet = psutil.Process(self.second.all_processes["raylet"][0].process.pid)
        processes = [raylet, *raylet.children(recursive=True)]
        for each in processes:
            each.kill()
        return len(processes)

    def serve(self, bundle: Path, port: int, fronts: int, replicas: int, cpus: float) -> None:
        """Deploy a bundle as `serve deploy` does, with a fixed number of replicas."""
        serve: Any = importlib.import_module("ray.serve")
        schema: Any = importlib.import_module("ray.serve.schema")
        context: Any = importlib.import_module("ray.serve.context")
        config = yaml.safe_load((bundle / "serve.yaml").read_text("utf-8"))
        del config["proxy_location"], config["http_options"]  # two nodes would share one port
        front, model = config["applications"][0]["deployments"]
        del model["autoscaling_config"]
        front["num_replicas"] = fronts
        model |= {"num_replicas": replicas, "ray_actor_options": {"num_cpus": cpus}}
        model["max_replicas_per_node"] = max(1, replicas // fronts)
        path = os.pathsep.join([str(bundle), os.environ.get("PYTHONPATH", "")])
        config["applications"][0]["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        context._get_global_client().deploy_apps(schema.ServeDeploySchema(**config))
        name, end = config["applications"][0]["name"], time.monotonic() + WAIT_S
        while (found := serve.status().applications.get(name)) is None or found.status != "RUNNING":
            if time.monotonic() > end or (found and "FAILED" in found.status):
                raise AssertionError(f"the application does not run: {found}")
            time.sleep(0.2)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what a lost node leaves behind
            importlib.import_module("ray.serve").shutdown()
        self.ray.shutdown()
        self.cluster.shutdown()


@contextlib.contextmanager
def two_nodes(cpus: int = 2) -> Iterator[TwoNodes]:
    nodes = TwoNodes(cpus)
    try:
        yield nodes
    finally:
        nodes.close()


def gather_model() -> onnx.ModelProto:
    """Rows of a table of 4 by their number: ids int64[N,2] -> y float32[N,2,3]."""
    text = "gather (int64[N,2] ids) => (float[N,2,3] y) { y = Gather (W, ids) }"
    return parse(text, np.ones((4, 3), np.float32))


def parse(text: str, weights: np.ndarray) -> onnx.ModelProto:
    """A model in ONNX's own language; `weights` are its `W`."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "W"))
    return model


def slow_model() -> onnx.ModelProto:
    """A call takes about 0.1 s on one core, so that requests are running when a node is lost."""
    text = """slow (float[1,64] x) => (float[1,64] y) {
        s = ReduceSum <keepdims = 0> (x)
        B = Add (W, s)
        C = MatMul (W, B)
        t = ReduceSum <keepdims = 0> (C)
        y = Mul (x, t)
    }"""
    weights = np.random.default_rng(0).standard_normal((1400, 1400)).astype(np.float32) / 40
    return parse(text, weights)


def slow_bundle(folder: Path) -> Path:
    """A Ray bundle of `slow_model`, which is served one request at a time."""
    model = save(slow_model(), folder / "slow.onnx")
    specs = [(TensorSpec(name, "float32", SHAPE),) for name in "xy"]
    write_manifest(model, Manifest("onnx", *specs, sha256=sha256(model)))
    out = folder / "out"
    out.mkdir()
    write_ray(out, Contents(Artefact.open(model), load_profile("cpu"), "slow", (1, 8, 32)))
    return out
