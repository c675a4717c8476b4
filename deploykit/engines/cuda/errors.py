"""Map CUDA's error codes to our errors, without importing CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported


class DeviceLost(Unsupported):
    """The CUDA context is lost, so that every later call fails: end the process."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class CaptureRefused(Unsupported):
    """The work cannot be captured as a CUDA graph; it can still be run without one."""


# Source: CUDA Runtime API, "Data types used by CUDA Runtime", enum cudaError. A row holds number,
# class, name and message; the driver API's CUresult has the same numbers. "lost": hardware failed
# or the context is gone, so that the process must end; "unusable": the driver, the GPU or a
# permission is at fault; "other-gpu": the code is for another GPU or a newer driver.
_TABLE = """\
1 bug InvalidValue invalid argument
2 memory MemoryAllocation out of memory
3 unusable InitializationError initialization error
4 lost CudartUnloading driver shutting down
31 lacking NotYetImplemented feature not yet implemented
34 unusable StubLibrary CUDA driver is a stub library
35 unusable InsufficientDriver CUDA driver version is insufficient for CUDA runtime version
36 unusable CallRequiresNewerDriver API call is not supported in the installed CUDA driver
46 unusable DevicesUnavailable CUDA-capable device(s) is/are busy or unavailable
49 unusable IncompatibleDriverContext incompatible driver context
53 lost PriorLaunchFailure unspecified launch failure in prior launch
98 other-gpu InvalidDeviceFunction invalid device function
100 unusable NoDevice no CUDA-capable device is detected
101 no-device InvalidDevice invalid device ordinal
102 unusable DeviceNotLicensed device doesn't have valid Grid license
103 unusable SoftwareValidityNotEstablished integrity checks failed
127 unusable StartupFailure startup failure in cuda runtime
200 other-gpu InvalidKernelImage device kernel image is invalid
201 unusable DeviceUninitialized invalid device context
209 other-gpu NoKernelImageForDevice no kernel image is available for execution on the device
214 lost ECCUncorrectable uncorrectable ECC error encountered
215 lacking UnsupportedLimit limit is not supported on this architecture
216 unusable DeviceAlreadyInUse exclusive-thread device already in use by a different thread
218 other-gpu InvalidPtx a PTX JIT compilation failed
220 lost NvlinkUncorrectable uncorrectable NVLink error detected during the execution
221 other-gpu JitCompilerNotFound PTX JIT compiler library not found
222 other-gpu UnsupportedPtxVersion the provided PTX was compiled with an unsupported toolchain.
223 other-gpu JitCompilationDisabled PTX JIT compilation was disabled
224 lacking UnsupportedExecAffinity the provided execution affinity is not supported
226 lost Contained Invalid access of peer GPU memory over nvlink or a hardware error
227 unusable InsufficientLoaderVersion Loader version is insufficient for fatbin
303 unusable SharedObjectInitFailed shared object initialization failed
304 unusable OperatingSystem OS call failed or operation not supported on this OS
400 bug InvalidResourceHandle invalid resource handle
700 lost IllegalAddress an illegal memory access was encountered
701 lacking LaunchOutOfResources too many resources requested for launch
702 lost LaunchTimeout the launch timed out and was terminated
709 lost ContextIsDestroyed context is destroyed
710 lost Assert device-side assert triggered
714 lost HardwareStackError hardware stack error
715 lost IllegalInstruction an illegal instruction was encountered
716 lost MisalignedAddress misaligned address
717 lost InvalidAddressSpace operation not supported on global/shared address space
718 lost InvalidPc invalid program counter
719 lost LaunchFailure unspecified launch failure
721 lost TensorMemoryLeak tensor memory not completely freed
800 unusable NotPermitted operation not permitted
801 lacking NotSupported operation not supported
802 unusable SystemNotReady system not yet initialized
803 unusable SystemDriverMismatch system has unsupported display driver / cuda driver combination
804 unusable CompatNotSupportedOnDevice forward compatibility was attempted on non supported HW
805 lost MpsConnectionFailed MPS client failed to connect to the MPS control daemon or the MPS \
server
806 lost MpsRpcFailure the remote procedural call between the MPS server and the MPS client failed
807 unusable MpsServerNotReady MPS server is not ready to accept new MPS client requests
808 unusable MpsMaxClientsReached the hardware resources required to create MPS client have been \
exhausted
809 unusable MpsMaxConnectionsReached the hardware resources required to support device \
connections have been exhausted
810 lost MpsClientTerminated the MPS client has been terminated by the server
811 lacking CdpNotSupported is using CUDA Dynamic Parallelism, but the current configuration, \
like MPS, does not support it
900 capture StreamCaptureUnsupported operation not permitted when stream is capturing
901 capture StreamCaptureInvalidated operation failed due to a previous error during capture
902 capture StreamCaptureMerge operation would result in a merge of separate capture sequences
903 capture StreamCaptureUnmatched capture was not ended in the same stream as it began
904 capture StreamCaptureUnjoined capturing stream has unjoined work
905 capture StreamCaptureIsolation dependency created on uncaptured work in another stream
906 capture StreamCaptureImplicit operation would make the legacy stream depend on a capturing \
blocking stream
907 capture CapturedEvent operation not permitted on an event last recorded in a capturing stream
908 capture StreamCaptureWrongThread attempt to terminate a thread-local capture sequence from \
another thread
910 capture GraphExecUpdateFailure the graph update was not performed because it included \
changes which violated constraints specific to instantiated graph update
911 lost ExternalDevice an async error has occured in external entity outside of CUDA
917 capture StreamDetached API call not permitted since the green context associated with the \
stream has been destroyed
918 capture GraphRecaptureFailure recapturing to the source graph failed and had to be terminated
919 unusable FabricNotReady GPU fabric is not ready within the probe wait budget; application \
may retry (see CUDA_FABRIC_INIT_TIMEOUT_MS)
999 lost Unknown unknown error
"""
_ROWS = [line.split(" ", 3) for line in _TABLE.splitlines()]
_KINDS = {name: kind for _, kind, name, _ in _ROWS}
CODES: Mapping[int, str] = {int(number): name for number, _, name, _ in _ROWS}
MESSAGES: Mapping[str, str] = {text: name for _, _, name, text in _ROWS}  # libraries log these


USE_LESS_MEMORY = "use a smaller batch, or stop other programs that use the GPU (see: nvidia-smi)"
_PLAIN = "{device}: {call}: {name}: {text}"
_DOCTOR = "see: deploykit doctor"
_ERRORS: Mapping[str, tuple[type[DeploykitError], str, str | None]] = {  # kind -> message, hint
    "memory": (OutOfMemory, "{device}: out of memory in {call}", USE_LESS_MEMORY),
    "lost": (
        DeviceLost,
        "{device}: the GPU is lost to this process ({name} in {call}: {text})",
        "restart the process; if it happens again: dmesg | grep Xid; deploykit doctor",
    ),
    "unusable": (Unsupported, "{device}: no usable GPU: {name}: {text}", _DOCTOR),
    "no-device": (Unsupported, "{device}: this machine has no such GPU", _DOCTOR),
    "other-gpu": (
        Unsupported,
        _PLAIN,
        "the file or package was built for another GPU: build it on this machine",
    ),
    "capture": (CaptureRefused, _PLAIN, None),
    "lacking": (Unsupported, _PLAIN, None),
    "bug": (DeploykitError, _PLAIN, None),
}


def cuda_error(device: str, call: str, name: str, text: str) -> DeploykitError:
    """Return the error for a CUDA `call` that returned the code `name`.

    A code for wrong use of CUDA, a bug in deploykit, gives a plain DeploykitError.
    """
    kind, message, hint = _ERRORS[_KINDS.get(name.removeprefix("cudaError"), "bug")]
    if name.endswith("InitializationError"):
        hint = f"a process that fork() made cannot use CUDA (multiprocessing: use 'spawn'); {hint}"
    return kind(message.format(device=device, call=call, name=name, text=text), hint=hint)


@contextlib.contextmanager
def unless_lost() -> Iterator[None]:
    """Ignore any DeploykitError in the block except DeviceLost."""
    try:
        yield
    except DeviceLost:
        raise
    except DeploykitError:
        return


def out_of_memory(device: str, need_bytes: int, free_bytes: int, total_bytes: int) -> OutOfMemory:
    need, free, total = (
        f"{count / 2**20:,.1f} MiB" for count in (need_bytes, free_bytes, total_bytes)
    )
    return OutOfMemory(
        f"{device}: out of memory: {need} needed, {free} free of {total}", hint=USE_LESS_MEMORY
    )
