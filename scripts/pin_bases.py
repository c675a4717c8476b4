#!/usr/bin/env python3
"""Write the digests of the base images into Dockerfile.lock and both Dockerfiles.

    python scripts/pin_bases.py            ask each registry what its tags are now, and write that
    python scripts/pin_bases.py --verify   the same, and write nothing; exit 1 where one changed
    python scripts/pin_bases.py --check    no network: the Dockerfiles have what the lock has

A tag can be moved to another image, a digest cannot. Asks as anybody may, without an account.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from deploykit.deploying.docker import LOCK, UNPINNED, read_digests

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILES = ("Dockerfile.x86", "Dockerfile.jetson")
KINDS = (  # an image for several architectures, else for one
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
TIMEOUT_S = 30.0
_ARGUMENT = re.compile(r"(?m)^(ARG \w+=)([^\s@$]+/[^\s@$]+:[^\s@$]+)(?:@\S+)?$")


def digest_of(image: str, address: str = "") -> str:
    """The digest of `HOST/REPOSITORY:TAG` in its registry, of all its architectures together.

    `address`: another registry, for tests. Raises OSError or ValueError.
    """
    name, _, tag = image.rpartition(":")
    host, _, repository = name.partition("/")
    place = address or f"https://{'registry-1.docker.io' if host == 'docker.io' else host}"
    url = f"{place}/v2/{repository}/manifests/{tag}"
    headers = {"Accept": ", ".join(KINDS)}
    try:
        body, stated = _get(url, headers)
    except urllib.error.HTTPError as exc:
        if exc.code != 401:
            raise
        headers["Authorization"] = f"Bearer {_token(exc.headers.get('WWW-Authenticate', ''))}"
        body, stated = _get(url, headers)
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if stated not in ("", digest):
        raise ValueError(f"{image}: the registry says {stated}, its answer has {digest}")
    return digest


def _get(url: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
    request = urllib.request.Request(url, headers=dict(headers))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.read(), answer.headers.get("Docker-Content-Digest", "")


def _token(challenge: str) -> str:
    """A token for anybody, from where the registry's `Bearer realm=...` says."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not challenge.lower().startswith("bearer ") or not realm:
        raise ValueError(f"the registry wants an account: {challenge or 'no challenge'}")
    body, _ = _get(f"{realm}?{urlencode(fields)}", {})
    document = json.loads(body)
    return str(document.get("token") or document["access_token"])


def lock_text(before: str, digests: Mapping[str, str | None]) -> str:
    """The lock file with these digests; its comments stay."""
    rows = []
    for line in before.splitlines():
        image = line.partition(" ")[0]
        rows.append(f"{image} {digests[image] or UNPINNED}" if image in digests else line)
    return "\n".join(rows) + "\n"


def dockerfile_text(before: str, digests: Mapping[str, str | None]) -> str:
    """A Dockerfile whose arguments name the images with their digests."""

    def pin(match: re.Match[str]) -> str:
        digest = digests.get(match[2])
        return f"{match[1]}{match[2]}" + (f"@{digest}" if digest else "")

    return _ARGUMENT.sub(pin, before)


def main(arguments: list[str] | None = None, root: Path = ROOT, address: str = "") -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--verify", action="store_true")
    options = parser.parse_args(arguments)
    digests = read_digests(root / LOCK)
    if not options.check:
        for image in digests:
            try:
                digests[image] = digest_of(image, address)
            except (OSError, ValueError, KeyError) as exc:
                print(f"error: {image}: {exc}; nothing was written", file=sys.stderr)
                return 1
    before = {name: (root / name).read_text(encoding="utf-8") for name in (LOCK, *DOCKERFILES)}
    after = {name: dockerfile_text(before[name], digests) for name in DOCKERFILES}
    after[LOCK] = lock_text(before[LOCK], digests)
    changed = [name for name in after if after[name] != before[name]]
    if options.check or options.verify:
        for name in changed:
            print(f"{name}: is not what the {'lock' if options.check else 'registry'} has")
        unpinned = [image for image, digest in digests.items() if digest is None]
        print(f"{len(digests) - len(unpinned)} images with a digest, {len(unpinned)} without")
        return 1 if changed else 0
    for name in changed:
        (root / name).write_text(after[name], encoding="utf-8")
    print(f"{len(digests)} images; written: {', '.join(changed) or 'nothing, all is the same'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
