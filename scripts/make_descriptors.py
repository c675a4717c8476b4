"""Compile the .proto files of engines/oip to descriptors.binpb, for server and load generator.

Needs grpcio-tools, from the extra `dev`. To be run after each change of a .proto file.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "deploykit/engines/oip"


def compile_protos(out: Path) -> None:
    """Write the descriptor set of all .proto files to `out`. Raises RuntimeError."""
    from grpc_tools import protoc

    files = sorted(path.name for path in FOLDER.glob("*.proto"))
    if protoc.main(["protoc", f"--proto_path={FOLDER}", f"--descriptor_set_out={out}", *files]):
        raise RuntimeError(f"protoc does not compile {', '.join(files)}")


if __name__ == "__main__":
    compile_protos(FOLDER / "descriptors.binpb")
    sys.stdout.write(f"{FOLDER / 'descriptors.binpb'}\n")
