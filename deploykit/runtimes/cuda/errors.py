"""Map CUDA's error codes to our errors, without importing CUDA."""

from __future__ import annotations

from collections.abc import Mapping

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported


class DeviceLost(Unsupported):
    """The CUDA context is lost and every later call in this process fails: end the process."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class CaptureRefused(Unsupported):
    """The work cannot be captured as a CUDA graph; it can still be run without one."""


# CUDA Runtime API, "Data types used by CUDA Runtime", enum cudaError: codes after which the process
# must end, or with which hardware failed or the context is gone
_STICKY = {
    "CudartUnloading",
    "PriorLaunchFailure",
    "ECCUncorrectable",
    "NvlinkUncorrectable",
    "Contained",
    "IllegalAddress",
    "LaunchTimeout",
    "ContextIsDestroyed",
    "Assert",
    "HardwareStackError",
    "IllegalInstruction",
    "MisalignedAddress",
    "InvalidAddressSpace",
    "InvalidPc",
    "LaunchFailure",
    "TensorMemoryLeak",
    "MpsConnectionFailed",
    "MpsRpcFailure",
    "MpsClientTerminated",
    "ExternalDevice",
    "Unknown",
}
_UNUSABLE = {  # the driver, the GPU or a permission
    "InitializationError",
    "StubLibrary",
    "InsufficientDriver",
    "CallRequiresNewerDriver",
    "DevicesUnavailable",
    "IncompatibleDriverContext",
    "NoDevice",
    "DeviceNotLicensed",
    "SoftwareValidityNotEstablished",
    "StartupFailure",
    "DeviceUninitialized",
    "DeviceAlreadyInUse",
    "InsufficientLoaderVersion",
    "SharedObjectInitFailed",
    "OperatingSystem",
    "NotPermitted",
    "SystemNotReady",
    "SystemDriverMismatch",
    "CompatNotSupportedOnDevice",
    "MpsServerNotReady",
    "MpsMaxClientsReached",
    "MpsMaxConnectionsReached",
    "FabricNotReady",
}
_OTHER_GPU = {  # machine code for another GPU, or for a newer driver
    "InvalidDeviceFunction",
    "InvalidKernelImage",
    "NoKernelImageForDevice",
    "InvalidPtx",
    "UnsupportedPtxVersion",
    "JitCompilerNotFound",
    "JitCompilationDisabled",
}
_CAPTURE = {
    "StreamCaptureUnsupported",
    "StreamCaptureInvalidated",
    "StreamCaptureMerge",
    "StreamCaptureUnmatched",
    "StreamCaptureUnjoined",
    "StreamCaptureIsolation",
    "StreamCaptureImplicit",
    "StreamCaptureWrongThread",
    "CapturedEvent",
    "GraphExecUpdateFailure",
    "GraphRecaptureFailure",
    "StreamDetached",
}
_LACKING = {
    "NotYetImplemented",
    "NotSupported",
    "UnsupportedLimit",
    "UnsupportedExecAffinity",
    "LaunchOutOfResources",
    "CdpNotSupported",
}
CODES: Mapping[int, str] = {  # for libraries that report a code by its number
    1: "InvalidValue",
    2: "MemoryAllocation",
    3: "InitializationError",
    35: "InsufficientDriver",
    46: "DevicesUnavailable",
    100: "NoDevice",
    101: "InvalidDevice",
    209: "NoKernelImageForDevice",
    214: "ECCUncorrectable",
    220: "NvlinkUncorrectable",
    222: "UnsupportedPtxVersion",
    700: "IllegalAddress",
    702: "LaunchTimeout",
    709: "ContextIsDestroyed",
    710: "Assert",
    714: "HardwareStackError",
    715: "IllegalInstruction",
    716: "MisalignedAddress",
    717: "InvalidAddressSpace",
    718: "InvalidPc",
    719: "LaunchFailure",
    801: "NotSupported",
    900: "StreamCaptureUnsupported",
    901: "StreamCaptureInvalidated",
    906: "StreamCaptureImplicit",
    999: "Unknown",
}


def cuda_error(device: str, call: str, name: str, text: str) -> DeploykitError:
    """The error for a CUDA `call` that returned the code `name`.

    A code for wrong use of CUDA is a plain DeploykitError: a bug in deploykit.
    """
    code = name.removeprefix("cudaError")
    message = f"{device}: {call}: {name}: {text}"
    if code == "MemoryAllocation":
        return OutOfMemory(f"{device}: out of memory in {call}", hint=USE_LESS_MEMORY)
    if code in _STICKY:
        return DeviceLost(
            f"{device}: the GPU is lost to this process ({name} in {call}: {text})",
            hint="restart the process; if it happens again: dmesg | grep Xid; deploykit doctor",
        )
    if code in _UNUSABLE:
        return Unsupported(f"{device}: no usable GPU: {name}: {text}", hint="see: deploykit doctor")
    if code == "InvalidDevice":
        return Unsupported(f"{device}: this machine has no such GPU", hint="see: deploykit doctor")
    if code in _OTHER_GPU:
        return Unsupported(
            message, hint="the file or package was built for another GPU: build it on this machine"
        )
    if code in _CAPTURE:
        return CaptureRefused(message)
    if code in _LACKING:
        return Unsupported(message)
    return DeploykitError(message)


def out_of_memory(device: str, need_bytes: int, free_bytes: int, total_bytes: int) -> OutOfMemory:
    return OutOfMemory(
        f"{device}: out of memory: {_size(need_bytes)} needed, {_size(free_bytes)} free of "
        f"{_size(total_bytes)}",
        hint=USE_LESS_MEMORY,
    )


USE_LESS_MEMORY = "use a smaller batch, or stop other programs that use the GPU (see: nvidia-smi)"


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
