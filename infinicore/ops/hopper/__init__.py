"""Kernels in CUDA C++ for GPUs of compute capability 9.0, where Triton has no word for what they need.

A family is a file in CUDA C++ and one that launches it. NVRTC compiles it when it is first wanted, for the
sizes that are wanted; Triton's cache keeps what came of it. Both come with torch.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # a torch for the CPU alone, or one that brings no bindings
    driver = nvrtc = None

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")


@cache
def is_there(device: torch.device) -> bool:
    """Whether these kernels can run on a device"""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and has_compiler()


@cache
def has_compiler() -> bool:
    """Whether there is an NVRTC that knows these GPUs"""
    if nvrtc is None:
        return False
    try:
        status, major, _ = nvrtc.nvrtcVersion()
    except RuntimeError:  # the library itself is not there
        return False
    return int(status) == 0 and major >= 12


def checked(result: tuple[Any, ...]) -> Any:
    """What a function of CUDA returned beside its status"""
    status, *values = result
    if int(status):
        raise RuntimeError(f"a call of CUDA failed: {status.name}")
    return values[0] if values else None


def compiled(source: str, options: Sequence[str]) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"a kernel could not be compiled:\n{log.decode()}")
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def code_of(source: str, options: Sequence[str]) -> bytes:
    """Compiled now, or by a process before this one"""
    from triton.runtime.cache import get_cache_manager

    everything = repr((source, options, nvrtc.nvrtcVersion()))
    kept = get_cache_manager(hashlib.sha256(everything.encode()).hexdigest())
    path = kept.get_file("kernel.cubin")
    if path is not None:
        return Path(path).read_bytes()
    code = compiled(source, options)
    kept.put(code, "kernel.cubin")
    return code


def bind_context(device: torch.device) -> None:
    """What is asked of the driver is asked in a context, which a thread has when torch has worked in it."""
    if not int(checked(driver.cuCtxGetCurrent())):
        context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device.index))))
        checked(driver.cuCtxSetCurrent(context))


def source(*names: str) -> str:
    """A family's, behind what it has in common with others"""
    return "".join((Path(__file__).parent / name).read_text("utf-8") for name in ("hopper.cuh", *names))


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def loaded(source: str, defines: Mapping[str, int], shared_bytes: int) -> Any:
    """The kernel of a source on the current device"""
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))
    module = checked(driver.cuModuleLoadData(code_of(source, options)))
    kernel = checked(driver.cuModuleGetFunction(module, b"kernel"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(kernel, attribute, shared_bytes))
    return kernel


def launch(
    kernel: Any, num_programs: int, num_threads: int, shared_bytes: int, is_early: bool, *addresses: int
) -> None:
    """With the arguments that lie at these addresses, on the current stream; an early one comes up while the
    kernel before it ends"""
    stream = torch.cuda.current_stream().cuda_stream
    config = launch_config(num_programs, num_threads, shared_bytes, is_early, stream)
    arguments = (ctypes.c_void_p * len(addresses))(*addresses)
    checked(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(arguments), 0))


@lru_cache(maxsize=1024)
def launch_config(num_programs: int, num_threads: int, shared_bytes: int, is_early: bool, stream: int) -> Any:
    config, early = plain_config(num_programs, num_threads, shared_bytes), driver.CUlaunchAttribute()
    config.hStream = stream
    if is_early:
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
    return config


def plain_config(num_programs: int, num_threads: int, shared_bytes: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = shared_bytes
    return config


def most_clusters(kernel: Any, size: int, num_threads: int, shared_bytes: int) -> int:
    """How many clusters of so many of a kernel's programs there is room for at once"""
    config, cluster = plain_config(size, num_threads, shared_bytes), driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
    config.attrs, config.numAttrs = [cluster], 1
    return int(checked(driver.cuOccupancyMaxActiveClusters(kernel, config)))


@lru_cache(maxsize=4096)
def tensor_map(
    address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], num_bytes: int = 2
) -> Any:
    """How a box of values of 1, 2 or 8 bytes goes to shared memory, where those of 1 or 2 make rows of 128
    bytes that are swizzled; what is beyond the sizes is zero. Dimensions begin with the last, whose stride
    is 1."""
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    long, word = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_UINT{8 * num_bytes}"),
            len(sizes),
            address,
            [long(size) for size in sizes],
            [long(num_bytes * stride) for stride in strides],
            [word(size) for size in box],
            [word(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if num_bytes < 8 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
