"""A machine with GPUs, on one without: a libcuda in Python, and a torch.cuda whose memory is the host's.

pretuned runs on it unchanged: it asks this driver for its GPU, loads cubins with it and launches them. Launches of
``emulated_kernels.py`` store what the kernels' docstrings say; each is listed with all of its words. ``torch.cuda`` and
``ctypes.CDLL`` are replaced, nothing of pretuned.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import emulated_kernels
import pytest
import torch
from cudaconfig import Launch as Launched
from cudaconfig import LaunchConfig, words_of
from emulated_kernels import Code, code_at

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Fusion, Gpu, LocalGpu, Op, RowOp, Variant
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Spec
from pretuned.runtime.driver import cuda, launcher
from pretuned.runtime.driver import device as driver_device
from pretuned.runtime.launch.gemm import LoadedKernel, load_kernel

H200 = Gpu("NVIDIA H200", 132, 143771, emulated_kernels.DRIVER)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, emulated_kernels.DRIVER)
_MAP = struct.Struct("=Q5Q4Q5Iiiii")  # address, sizes, strides in bytes, box, type, rank, swizzle, promotion
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncLoad": (c_void_p,),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (c_void_p, c_void_p, c_int, c_size_t),
    "cuTensorMapEncodeTiled": (
        c_void_p,
        c_int,
        c_uint,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int,
        c_int,
        c_int,
        c_int,
    ),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemsetD8Async": (c_void_p, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
}
ELEMENT_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # by CUtensorMapDataType
_ERRORS = {
    2: b"out of memory",
    200: b"device kernel image is invalid",
    201: b"invalid device context",
    700: b"an illegal memory access was encountered",
    701: b"too many resources requested for launch",
    999: b"unknown error",
}


class Descriptor(NamedTuple):
    """A tensor map that the driver encoded; sizes and strides, in bytes, have the outermost dimension first."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    swizzle: int

    @classmethod
    def read(cls, encoded: bytes) -> Descriptor | None:
        """Back from its 128 bytes; None for none."""
        address, *numbers = _MAP.unpack_from(encoded)
        sizes, strides, box, (element, rank, swizzle, _) = numbers[:5], numbers[5:9], numbers[9:14], numbers[14:]
        if not rank:
            return None
        return cls(
            address,
            tuple(reversed(sizes[:rank])),
            tuple(reversed(strides[: rank - 1])),
            tuple(reversed(box[:rank])),
            element,
            swizzle,
        )


Words: TypeAlias = "Mapping[str, int | Descriptor | None]"


class Launch(NamedTuple):
    """One launch: of which code, how many programs, on which stream, and its words by name."""

    code: Code
    digest: bytes  # of the cubin
    grid: int
    threads: int  # of a program
    stream: int
    words: dict[str, Any]
    parameters: Launched  # as the driver was given them: good while it is in the launch

    def read(self) -> dict[str, Any]:
        """The words once more, from the caller's memory."""
        return _words(self.code, self.parameters)

    @property
    def kind(self) -> tuple[Op | RowOp, Fusion]:
        return self.code.op, self.code.fusion

    def addresses(self) -> dict[str, int]:
        """The words, of a descriptor the address."""
        return {name: word.address if isinstance(word, Descriptor) else word or 0 for name, word in self.words.items()}

    @property
    def descriptors(self) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Address, sizes, and strides in elements, of the words that are descriptors."""
        descriptors = {name: word for name, word in self.words.items() if isinstance(word, Descriptor)}
        return {
            name: (
                descriptor.address,
                descriptor.sizes,
                tuple(stride // ELEMENT_BYTES[descriptor.element] for stride in descriptor.strides),
            )
            for name, descriptor in descriptors.items()
        }

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of each descriptor."""
        return {name: word.sizes for name, word in self.words.items() if isinstance(word, Descriptor)}


def _words(code: Code, launched: Launched) -> dict[str, Any]:
    words: dict[str, Any] = words_of(code.arguments, launched)
    for name, kind in code.arguments:
        if kind.startswith("desc"):
            words[name] = Descriptor.read(words[name])
    return words


class Loaded(NamedTuple):
    code: Code
    digest: bytes


class EmulatedGpu:
    """GPUs of one kind. What a test may change is here, and what was done.

    visible: tensors are on the GPU, else they are the host's. available: what torch says of CUDA; torch.compile imports
    code for CUDA graphs if so. capturing: the current stream is captured. contexts: this thread has a context.
    computes: launches store results, but for those of ``idle`` kinds of code. after: is called after each launch of a
    cubin, by its digest, and may spoil what was stored. fails: the CUDA error of a function's calls, by its name.
    refuses: that of launches of a cubin, by its digest. broken: a kernel has faulted, and waiting for the GPU raises,
    as it does once for each of ``raises``. on_load: is called after each cubin that is loaded.
    repeats_addresses: a tensor map has its address a second time, at its end. streams_asked: the device of each current
    stream that was asked for, and torch's current device then.
    """

    def __init__(self, gpu: Gpu = H200, sm: int = 90, count: int = 1, per_sm: int = 1) -> None:
        self.gpu, self.sm, self.count, self.per_sm = gpu, sm, count, per_sm
        self.visible = self.computes = self.available = True
        self.capturing, self.contexts = False, True
        self.broken, self.repeats_addresses = "", False
        self.current = 0
        self.fails: dict[str, int] = {}
        self.refuses: dict[bytes, int] = {}
        self.raises: list[Exception] = []
        self.idle: frozenset[Op | RowOp] = frozenset()
        self.after: dict[bytes, Callable[[Launch], None]] = {}
        self.real_cubins: dict[bytes, Variant] = {}  # real cubins, by their bytes' digest
        self.launches: list[Launch] = []
        self.encoded: list[Descriptor] = []
        self.loads: list[Code] = []
        self.on_load: Callable[[], None] = lambda: None
        self.allocated: list[int] = []
        self.streams_asked: list[tuple[int, int]] = []
        self.errors: list[BaseException] = []
        self._loaded: dict[int, Loaded] = {}
        self._memory: list[Any] = []
        self._streams = 100
        self._local = threading.local()

    @property
    def loaded(self) -> list[Loaded]:
        """Return the loaded kernels, in order."""
        return list(self._loaded.values())

    @property
    def local(self) -> LocalGpu:
        """The GPU, as dispatch knows it."""
        return LocalGpu(self.sm, self.gpu)

    def know(self, *paths: Path) -> None:
        """Have it load the cubins of these bundles."""
        for path in paths:
            with open_bundle(path) as bundle:
                self.real_cubins |= {variant.cubin_sha256: variant for variant in bundle.variants()}

    def load(self, spec: Spec | RowOpSpec) -> LoadedKernel:
        """A kernel of ``emulated_kernels.py``, loaded."""
        variant, cubin = emulated_kernels.variant_and_code(spec, self.sm)
        return load_kernel(variant, cubin, 0, self.gpu.sm_count, "a test")

    @property
    def products(self) -> list[Launch]:
        """The launches of products."""
        return [launch for launch in self.launches if isinstance(launch.code.op, Op)]

    @property
    def passes(self) -> list[Launch]:
        """The launches of row kernels."""
        return [launch for launch in self.launches if isinstance(launch.code.op, RowOp)]

    # torch's side

    @property
    def stream(self) -> int:
        """The current stream of this thread."""
        return getattr(self._local, "stream", 0)

    @stream.setter
    def stream(self, stream: int) -> None:
        self._local.stream = stream

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams

    def wait(self) -> None:
        if self.raises:
            raise self.raises.pop(0)
        if self.broken:
            raise RuntimeError(f"CUDA error: {self.broken}\nCUDA kernel errors might be reported later")

    # The driver's side: each returns CUDA's error code

    def cuInit(self, flags: int) -> int:
        return 1 if flags else 0 if self.count else 100

    def cuDriverGetVersion(self, version: int) -> int:
        return _put(version, self.gpu.driver)

    def cuGetErrorString(self, error: int, text: int) -> int:
        return _put(text, ctypes.cast(ctypes.c_char_p(_ERRORS.get(error, b"?")), c_void_p).value or 0, c_void_p)

    def cuDeviceGetCount(self, count: int) -> int:
        return _put(count, self.count)

    def cuDeviceGet(self, device: int, ordinal: int) -> int:
        return _put(device, ordinal) if 0 <= ordinal < self.count else 101

    def cuDeviceGetName(self, name: int, length: int, device: int) -> int:
        ctypes.memmove(name, self.gpu.name.encode()[: length - 1] + b"\0", min(len(self.gpu.name) + 1, length))
        return 0

    def cuDeviceGetAttribute(self, value: int, attribute: int, device: int) -> int:
        return _put(value, {75: self.sm // 10, 76: self.sm % 10, 16: self.gpu.sm_count}[attribute])

    def cuDeviceTotalMem_v2(self, size: int, device: int) -> int:
        return _put(size, self.gpu.memory_mib << 20, c_size_t)

    def cuDevicePrimaryCtxRetain(self, context: int, device: int) -> int:
        return _put(context, 1 + device, c_void_p)

    def cuCtxSetCurrent(self, context: int) -> int:
        self.contexts = True
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: int) -> int:
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        return 0

    def cuModuleLoadData(self, module: int, image: int) -> int:
        code = code_at(image)
        if code is None:
            code = self._real(image)
        if code is None:
            return 200
        handle = 1 + len(self._loaded)
        self._loaded[handle] = Loaded(*code)
        self.loads.append(code[0])
        self.on_load()
        return _put(module, handle, c_void_p)

    def _real(self, image: int) -> tuple[Code, bytes] | None:
        variant = self.real_cubins.get(hashlib.sha256(ctypes.string_at(image, elf_bytes(image))).digest())
        if variant is None:
            return None
        code = Code(
            variant.op, variant.dtype, variant.layout, variant.fusion, variant.config, variant.arguments, variant.entry
        )
        return code, variant.cubin_sha256

    def cuModuleGetFunction(self, function: int, module: int, name: int) -> int:
        if ctypes.string_at(name).decode() != self._loaded[module].code.entry:
            return 500
        return _put(function, module, c_void_p)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        return 0

    def cuFuncLoad(self, function: int) -> int:
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: int, function: int, threads: int, shared: int) -> int:
        return _put(blocks, self.per_sm)

    def cuTensorMapEncodeTiled(
        self,
        map: int,
        kind: int,
        rank: int,
        address: int,
        sizes: int,
        strides: int,
        box: int,
        steps: int,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        arrays = [
            list((kind * n).from_address(where))
            for kind, n, where in (
                (ctypes.c_uint64, rank, sizes),
                (ctypes.c_uint64, rank - 1, strides),
                (ctypes.c_uint32, rank, box),
                (ctypes.c_uint32, rank, steps),
            )
        ]
        if map % 64 or rank > 5 or interleave or fill or set(arrays[3]) != {1}:
            return 1
        filled = [values + [0] * (n - len(values)) for values, n in zip(arrays[:3], (5, 4, 5), strict=True)]
        encoded = _MAP.pack(address or 0, *filled[0], *filled[1], *filled[2], kind, rank, swizzle, promotion)
        again = (address or 0) if self.repeats_addresses else 0
        ctypes.memmove(map, encoded.ljust(120, b"\0") + again.to_bytes(8, "little"), 128)
        self.encoded.append(Descriptor.read(encoded))  # type: ignore[arg-type]
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        how, loaded = LaunchConfig.from_address(config), self._loaded[function]
        if extra or how.attributes or how.attribute_count or (how.grid_y, how.grid_z) != (1, 1) or not how.grid_x:
            return 1
        if not self.contexts:
            return 201
        launched = Launched(config, function, parameters)
        words = _words(loaded.code, launched)
        launch = Launch(*loaded, how.grid_x, how.block_x, how.stream or 0, words, launched)
        self.launches.append(launch)
        if loaded.digest in self.refuses:
            return self.refuses[loaded.digest]
        if self.computes and loaded.code.op not in self.idle:
            emulated_kernels.compute(loaded.code, launch.addresses(), how.grid_x, launch.sizes())
        if loaded.digest in self.after:
            self.after[loaded.digest](launch)
        return 0

    def cuMemAlloc_v2(self, memory: int, size: int) -> int:
        buffer = (ctypes.c_char * (size + 256)).from_buffer(bytearray(b"\xff" * (size + 256)))
        self._memory.append(buffer)
        self.allocated.append(size)
        return _put(memory, ctypes.addressof(buffer) + 255 & ~255, c_void_p)

    def cuMemsetD8Async(self, at: int, value: int, size: int, stream: int) -> int:
        ctypes.memset(at, value, size)
        return 0

    def cuStreamCreate(self, stream: int, flags: int) -> int:
        return _put(stream, self.new_stream(), c_void_p)

    def cuStreamDestroy_v2(self, stream: int) -> int:
        return 0

    def cuStreamSynchronize(self, stream: int) -> int:
        return 700 if self.broken else 0


def elf_bytes(image: int) -> int:
    """The size of an ELF file in memory: up to the end of its last section or table."""
    head = ctypes.string_at(image, 64)
    programs, sections = struct.unpack_from("<QQ", head, 32)
    _, program_bytes, program_count, section_bytes, count = struct.unpack_from("<5H", head, 52)
    ends = [64, programs + program_bytes * program_count, sections + section_bytes * count]
    for i in range(count):
        kind, offset, size = struct.unpack("<4xI16xQQ", ctypes.string_at(image + sections + section_bytes * i, 40))
        ends.append(offset + size if kind != 8 else 0)  # (of NOBITS the file has no bytes)
    return max(ends)


def _put(where: int, value: int, kind: Any = c_int) -> int:
    kind.from_address(where).value = value
    return 0


class Library:
    """The result of ``ctypes.CDLL("libcuda.so.1")``: functions that C could call."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        for name, types in _PROTOTYPES.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *types)(self._guarded(name)))

    def __getitem__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(c_int, *_PROTOTYPES[name])(self._guarded(name))

    def _guarded(self, name: str) -> Callable[..., int]:
        function = getattr(self._gpu, name)

        def call(*args: Any) -> int:
            if name in self._gpu.fails:
                return self._gpu.fails[name]
            try:
                return int(function(*args))
            except BaseException as error:  # C can't raise
                self._gpu.errors.append(error)
                return 999

        return call


KEPT = (cuda.library, cuda.launch_kernel, cuda.driver_version, cuda.primary_context, launcher.repeats_rows)
LOAD = ctypes.CDLL


class _Stream:
    def __init__(self, gpu: EmulatedGpu, handle: int) -> None:
        self.gpu, self.cuda_stream = gpu, handle

    def synchronize(self) -> None:
        self.gpu.wait()

    def query(self) -> bool:
        self.gpu.wait()
        return True

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...


class _Event:
    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu = gpu

    def record(self, _stream: object = None) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def query(self) -> bool:
        self.gpu.wait()
        return True

    def synchronize(self) -> None:
        self.gpu.wait()


def _index(device: Any, gpu: EmulatedGpu) -> int:
    if device is None:
        return gpu.current
    return int(device if isinstance(device, int) else torch.device(device).index or 0)


def _torch_cuda(gpu: EmulatedGpu) -> dict[str, Any]:
    """torch.cuda's functions that pretuned calls."""

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before, gpu.current = gpu.current, _index(index, gpu)
        try:
            yield
        finally:
            gpu.current = before

    @contextlib.contextmanager
    def stream(current: _Stream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, current.cuda_stream
        try:
            yield
        finally:
            gpu.stream = before

    def current_stream(of: Any = None) -> _Stream:
        gpu.streams_asked.append((_index(of, gpu), gpu.current))
        return _Stream(gpu, gpu.stream)

    major, minor = divmod(gpu.sm, 10)
    properties = SimpleNamespace(
        name=gpu.gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.gpu.sm_count,
        total_memory=gpu.gpu.memory_mib << 20,
    )
    return {
        "is_available": lambda: gpu.available and gpu.count > 0,
        "device_count": lambda: gpu.count,
        "current_device": lambda: gpu.current,
        "device": device,
        "stream": stream,
        "current_stream": current_stream,
        "Stream": lambda *_, **__: _Stream(gpu, gpu.new_stream()),
        "Event": lambda *_, **__: _Event(gpu),
        "synchronize": lambda _device=None: gpu.wait(),
        "is_current_stream_capturing": lambda: gpu.capturing,
        "get_device_properties": lambda _device=None: properties,
        "get_device_capability": lambda _device=None: (major, minor),
        "get_device_name": lambda _device=None: gpu.gpu.name,
        "_lazy_init": lambda: None,
    }


@functools.cache
def host_memory_for_cuda() -> torch.library.Library:
    """Have torch take the host's memory where memory of a CUDA device is asked for. It lasts as long as the process.

    (Without ``_lazy_init`` of torch.cuda, which the fixtures replace, torch still refuses.)
    """
    host, library = torch.device("cpu"), torch.library.Library("_", "IMPL")

    def on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
        def moved(value: Any) -> Any:
            return host if isinstance(value, torch.device) and value.type == "cuda" else value

        return operator(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})

    library.fallback(on_host, "CUDA")
    return library


def install(patch: pytest.MonkeyPatch, gpu: EmulatedGpu) -> None:
    """Have this process find these GPUs."""
    forget()
    host_memory_for_cuda()
    libcuda = Library(gpu)
    patch.setattr(
        ctypes, "CDLL", lambda name, *args, **how: libcuda if name == "libcuda.so.1" else LOAD(name, *args, **how)
    )
    for name, value in _torch_cuda(gpu).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current, raising=False)
    is_host, index = torch.Tensor.is_cpu.__get__, torch.Tensor.get_device

    def is_cuda(tensor: torch.Tensor) -> bool:
        return gpu.visible and is_host(tensor)

    patch.setattr(torch.Tensor, "is_cuda", property(is_cuda))
    patch.setattr(torch.Tensor, "get_device", lambda tensor: gpu.current if is_cuda(tensor) else index(tensor))


def forget() -> None:
    """Clear what the runtime caches of a driver."""
    for name in KEPT:
        name.cache_clear()
    driver_device.devices.clear()


@contextlib.contextmanager
def emulated(gpu: EmulatedGpu) -> Iterator[EmulatedGpu]:
    """These GPUs for a while; what went wrong in the driver is raised at the end."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, gpu)
        try:
            yield gpu
        except Exception as error:
            if gpu.errors:
                raise gpu.errors[0] from error
            raise
        finally:
            patch.undo()
            forget()
    if gpu.errors:
        raise gpu.errors[0]
