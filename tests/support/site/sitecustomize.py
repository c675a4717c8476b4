"""Python imports this file at its start where its folder is on the path: see `register_torchvision`."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class _BeforeTorchvision(MetaPathFinder):
    """Register torchvision's operators when it is first imported; finds nothing itself."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from tests.support.zoo.models import register_torchvision

            register_torchvision()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
