"""The module `tensorrt` of the rig: NVIDIA's own bindings on the library of TensorRT for RTX.

`rig.py` copies this file to `tensorrt/__init__.py`. That library orders the C++ methods of some
classes otherwise than the bindings were compiled for: parser and builder work, but these members
would call another method than the one named. They raise here instead.
"""

from __future__ import annotations

import tensorrt_bindings
from tensorrt_bindings import *  # noqa: F403 - what NVIDIA's own package does
from tensorrt_bindings import __version__  # noqa: F401

IS_RTX_RIG = True

# of INetworkDefinition, the members that do what they are called
_NETWORK_WORKS = """
    builder num_inputs num_outputs num_layers get_input get_output get_layer
    add_input mark_output unmark_output remove_tensor
    add_activation add_concatenation add_constant add_convolution_nd add_elementwise add_gather
    add_identity add_matrix_multiply add_reduce add_shuffle add_softmax add_topk add_unary
"""
_BROKEN = {
    "ITensor": "allowed_formats broadcast_across_batch get_dimension_name location "
    "set_dimension_name",
    "Builder": "build_engine_with_config build_serialized_network_to_stream",
    "IBuilderConfig": "all_build_routes build_route remote_auto_tuning_config",
}


class _Refused:
    """A member that must be neither read, called nor set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> object:
        raise NotImplementedError(self.reason)

    def __set__(self, instance: object, value: object) -> None:
        raise NotImplementedError(self.reason)

    @property
    def reason(self) -> str:
        return f"{self.name} would call another method: this is TensorRT for RTX's library"


def _refuse() -> None:
    names = {kind: set(members.split()) for kind, members in _BROKEN.items()}
    network = {name for name in vars(tensorrt_bindings.INetworkDefinition) if name[0] != "_"}
    names["INetworkDefinition"] = network - set(_NETWORK_WORKS.split())
    for kind, members in names.items():
        owner = getattr(tensorrt_bindings, kind)
        for name in members & set(vars(owner)):
            setattr(owner, name, _Refused(f"{kind}.{name}"))
    tensor = tensorrt_bindings.ITensor
    tensor.is_shape_tensor = property(lambda _: False)
    tensor.is_execution_tensor = property(lambda _: True)


_refuse()
