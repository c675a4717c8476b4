"""Python imports this file at its start where its folder is on the path: torchvision then imports."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class _BeforeTorchvision(MetaPathFinder):
    """Declare torchvision's operators when it is first looked up; finds nothing itself."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import deploykit.engines.torch.files  # noqa: F401 - declares them
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
