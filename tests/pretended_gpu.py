"""A GPU that the CPU pretends to be, to find what a real one would refuse or wait for.

Its tensors have the device ``cuda:0`` for everything that asks in Python, and values, which the CPU
computes. So a whole trainer runs on it: the code for CUDA, metrics, evaluation, sampling and saves.
What a GPU would refuse is an error here: tensors of both devices in one operation, ``numpy`` of a
tensor on the device. What the host would wait for is a ``Wait``, with the lines that led to it: a
value that is read, a copy that is not from or to pinned memory, an operation whose shape depends on
values. A copy to the host that is not waited for arrives when an event after it, or a stream, is
waited for; until then the memory holds no numbers, and who reads too early computes with those.

C++ takes the tensors for the CPU's: for another device, torch's autograd would look for streams.
What C++ makes for them without being told a device is recognized by its caller.

Not pretended: kernels that CPUs lack (varlen attention is computed in place of its kernel, and
autocast follows the CPU's lists), several streams that race, memory that runs out, rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.checkpoint.disk import _bytes

SOURCE = str(Path(__file__).parents[1] / "src" / "surefoot")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# The host must know a value, or the shape of the result (``torch.cuda.set_sync_debug_mode``).
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.multinomial.default,  # checks its probabilities
    aten.linalg_svd.default,
    aten._linalg_svd.default,
    aten._linalg_eigh.default,
    aten.linalg_qr.default,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
# Tensors without dimensions may be on the host beside tensors of the device.
SCALARS_ALLOWED = {"masked_fill", "masked_fill_", "where", "fill_", "fill"}


@dataclass(frozen=True)
class Wait:
    """The host would wait for the device."""

    operation: str
    lines: tuple[str, ...]  # the innermost first: of a library the first one, then of Surefoot
    functions: frozenset[str]  # of all callers

    def __str__(self) -> str:
        return f"{self.operation} at {' < '.join(self.lines[:4]) or 'no line of Surefoot'}"


class MixedDevicesError(RuntimeError):
    """An operation got tensors of both devices."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``held`` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CPU,  # for C++, whose autograd would look for streams otherwise
        )
        made.held = held
        return made

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __tensor_flatten__(self):  # so that ``Module.to`` swaps parameters, and sets no ``data``
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return DeviceTensor(inner["held"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _FUNCTIONS and isinstance(args[0], torch.Tensor):
            return _FUNCTIONS[name](*args, **kwargs)
        if name == "__set__" and function is torch.Tensor.data.__set__:
            args[0].held = args[1].held
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _current().run(operation, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.held})"


def _to(tensor, *args, **kwargs):
    """``to`` of another tensor, whose device C++ does not see."""
    with torch._C.DisableTorchFunctionSubclass():
        if args and isinstance(args[0], torch.Tensor):
            other = args[0]
            return tensor.to(other.device, other.dtype, *args[1:], **kwargs)
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, (str, torch.device)) and torch.device(wanted).type != "meta":
            # C++ would see a tensor that is on the CPU already
            is_there = torch.device(wanted).type == tensor.device.type
            rest = {**kwargs}
            if "device" not in kwargs:
                rest["device"] = args[0]
                names = ("dtype", "non_blocking", "copy")
                rest |= dict(zip(names, args[1:], strict=False))
            dtype = rest.get("dtype") or tensor.dtype
            if is_there and dtype == tensor.dtype and not rest.get("copy"):
                return tensor
            blocks = not rest.get("non_blocking", False)
            return aten._to_copy.default(
                tensor, dtype=dtype, device=torch.device(wanted), non_blocking=not blocks
            )
        return tensor.to(*args, **kwargs)


def _refused(tensor, *_args, **_kwargs):
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


def _cpu(tensor, *_args, **_kwargs):
    return _to(tensor, CPU)


def _cuda(tensor, *_args, non_blocking=False, **_kwargs):
    return _to(tensor, GPU, non_blocking=non_blocking)


def _tolist(tensor):
    return _cpu(tensor).tolist()


def _new_tensor(tensor, data, *, dtype=None, device=None, requires_grad=False):
    where = tensor.device if device is None else device
    dtype = tensor.dtype if dtype is None else dtype
    return torch.tensor(data, dtype=dtype, device=where, requires_grad=requires_grad)


_FUNCTIONS = {
    "to": _to,
    "cpu": _cpu,
    "cuda": _cuda,
    "tolist": _tolist,
    "numpy": _refused,
    "__array__": _refused,
    "new_tensor": _new_tensor,
    "type_as": lambda tensor, other: _to(tensor, other),
    "pin_memory": _refused,
    "get_device": lambda tensor: GPU.index,
}


@dataclass
class PretendedGPU:
    """The device, and what it has found so far."""

    waits: list[Wait] = field(default_factory=list)
    num_operations: int = 0
    # Memory that a GPU copies while it computes: kept, or another tensor would get its address.
    _pinned: dict[int, object] = field(default_factory=dict)
    _registered: dict[int, int] = field(default_factory=dict)  # of the host, by address: bytes
    _coming: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # to the host
    refuses_to_pin: bool = False
    _error: str | None = None  # that CUDA keeps, for whoever looks at the next kernel

    def run(self, operation, args, kwargs):
        """What ``operation`` returns on a GPU."""
        tensors = list(_tensors((args, kwargs)))
        on_device = [t for t in tensors if isinstance(t, DeviceTensor)]
        device = kwargs.get("device")
        if operation is aten._pin_memory.default:
            return self.pin(args[0])
        if operation is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            return self.pin(operation(*args, **{**kwargs, "device": CPU}))
        if device == CPU and (on_device or not tensors) and _is_made_by_torch():
            device = kwargs["device"] = GPU
        if not on_device and (device is None or device.type != "cuda"):
            return operation(*args, **kwargs)
        self.num_operations += 1
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"CUDA error: {error}")
        if operation in COPIES and (copied := self._copied(operation, args, kwargs)) is not None:
            return copied
        if on_device:
            self._check(operation, args, kwargs, tensors, len(on_device))
        if operation.namespace == "torch_attn":
            result = _VARLEN[operation._schema.name](*_held(args), **_held(kwargs))
        else:
            inside = {**_held(kwargs), **({} if device is None else {"device": CPU})}
            result = operation(*_held(args), **inside)
        if device is not None and device.type == "cpu":
            return result
        changed = _written(operation)
        if changed:
            return _first_written(changed, args, kwargs, result)
        return _on_device(result)

    def _check(self, operation, args, kwargs, tensors, num_on_device) -> None:
        """Whether a GPU would refuse ``operation``, or the host would wait for it."""
        name = operation._schema.name.partition("::")[2]
        hosts = [t for t in tensors if not isinstance(t, DeviceTensor)]
        if operation in INDEXING:
            indices = [t for t in args[1] if t is not None]
            if any(not isinstance(t, DeviceTensor) for t in indices):
                self.wait(f"{name} by a tensor of the host")
            is_mask = [t.dtype in (torch.bool, torch.uint8) for t in indices]
            is_filled = name != "index" and len(args) > 2 and args[2].numel() == 1
            if any(is_mask) and not (is_filled and len(indices) == 1):
                self.wait(f"{name} by a mask")
            hosts = [t for t in hosts if all(t is not index for index in indices)]
        if operation in READS:
            self.wait(name)
        if operation is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait(name)
        takes_scalars = torch.Tag.pointwise in operation.tags or name in SCALARS_ALLOWED
        takes_scalars |= operation in INDEXING
        wrong = [t for t in hosts if t.ndim or not takes_scalars]
        if wrong and num_on_device:
            shapes = ", ".join(str(tuple(t.shape)) for t in wrong)
            raise MixedDevicesError(
                f"{operation}: tensors on cuda:0, and on the CPU of shape {shapes}"
            )

    def _copied(self, operation, args, kwargs):
        """What a copy between both returns; None if it stays on the device."""
        if operation is aten._to_copy.default:
            source, device = args[0], kwargs.get("device")
            blocks = not kwargs.get("non_blocking", False)
            if device is None or device.type == source.device.type or device.type == "meta":
                if device is not None and device.type == "meta":
                    return aten._to_copy.default(source.held, **kwargs)
                return None
            options = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
            if device.type == "cuda":
                self._sent(source, blocks)
                return DeviceTensor(aten._to_copy.default(source, **options))
            values = aten._to_copy.default(source.held, **options)
            if values.data_ptr() == source.held.data_ptr():
                values = values.clone()
            if blocks:
                self.wait("copy to the host")
                return values
            target = self.pin(torch.empty_like(values))  # as torch does
            self._receive(target, values)
            return target
        target, source = args[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.device.type == source.device.type:
            return None
        if isinstance(target, DeviceTensor):
            if source.ndim or source.numel() != 1:
                self._sent(source, blocks)
            target.held.copy_(source)
            return target
        if blocks:
            self.wait("copy to the host")
            target.copy_(source.held)
        elif not self.is_pinned(target):
            self.wait("copy to memory of the host that is not pinned")
            target.copy_(source.held)
        else:
            self._receive(target, source.held.clone())
        return target

    def _sent(self, source: torch.Tensor, blocks: bool) -> None:
        at = source.untyped_storage().data_ptr()
        if any(target.untyped_storage().data_ptr() == at for target, _ in self._coming):
            self.arrived()  # a stream copies in order
        if blocks:
            self.wait("copy to the device")
        elif source.numel() and not self.is_pinned(source):
            self.wait("copy to the device of memory that is not pinned")

    def _receive(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Until somebody waits, there are no numbers in ``target``."""
        target.fill_(float("nan") if target.is_floating_point() else 1)
        self._coming.append((target, values))

    def arrived(self, count: int | None = None) -> None:
        """The first ``count`` copies to the host have ended."""
        done, self._coming = self._coming[:count], self._coming[len(self._coming[:count]) :]
        for target, values in done:
            target.copy_(values)

    def wait(self, operation: str) -> None:
        """Note that the host waits here."""
        lines, functions = [], set()
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            functions.add(code.co_name)
            place = code.co_filename
            if place.startswith(SOURCE) and code.co_name != "wait_for_ranks":  # a mark
                lines.append(f"{place.removeprefix(SOURCE + '/')}:{frame.f_lineno}")
            elif "site-packages" in place and not lines:
                library = place.rpartition("site-packages/")[2]
                if not library.startswith(("torch/_", "torch/nn/modules/module", "torch/utils")):
                    lines.append(f"{library}:{frame.f_lineno}")
            frame = frame.f_back
        self.waits.append(Wait(operation, tuple(lines), frozenset(functions)))
        self.arrived()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory."""
        copy = tensor.clone()
        self._pinned[copy.untyped_storage().data_ptr()] = copy.untyped_storage()
        return copy

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a GPU would copy from and to it while it computes."""
        if isinstance(tensor, DeviceTensor):
            return False
        at = tensor.untyped_storage().data_ptr()
        inside = any(start <= at < start + size for start, size in self._registered.items())
        return at in self._pinned or inside

    # The part of ``cudart`` that pins memory in place.
    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if self.refuses_to_pin:
            self._error = "out of memory"
            return 2
        self._registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self._registered[address]
        return 0


def _is_made_by_torch() -> bool:
    """Whether C++ makes this tensor for others of the device, which it takes for the CPU's."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("run", "__torch_dispatch__"):
        frame = frame.f_back
    while frame.f_code.co_filename.endswith(("torch/_compile.py", "_dynamo/eval_frame.py")):
        frame = frame.f_back
    if frame.f_code is DeviceTensor.__torch_function__.__code__:
        return frame.f_locals["kwargs"].get("device") is None
    return frame.f_code is _ENGINE


_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class _Event:
    """A place in the queue of the device."""

    def __init__(self, **_options: object) -> None:
        self._count = 0
        self.device = GPU

    def record(self, _stream: object = None) -> None:
        self._count = len(_current()._coming)

    def synchronize(self) -> None:
        _current().arrived(self._count)
        self._count = 0

    def wait(self, _stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 1.0


class _Stream:
    """A queue; here all of them are one."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.device = GPU

    def synchronize(self) -> None:
        _current().wait("synchronize")

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Generator(torch.Generator):
    """The CPU's, for both."""

    def __new__(cls, device=CPU):
        return super().__new__(cls, CPU)


class _Everywhere(TorchDispatchMode):
    """Operations that get no tensor of the device, as they make one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _current().run(operation, args, kwargs or {})


_running: list[PretendedGPU] = []


def _current() -> PretendedGPU:
    return _running[-1]


@contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """While it lasts, this machine has one GPU."""
    gpu = PretendedGPU()
    _running.append(gpu)
    autocast = torch.autocast

    @contextmanager
    def both(device_type: str, dtype=None, enabled=True, cache_enabled=None):
        """Autocast of the pretended device computes by the rules of the CPU."""
        kinds = ("cuda", "cpu") if device_type == "cuda" else (device_type,)
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(autocast(kind, dtype, enabled, cache_enabled))
            yield

    def grouped(group):
        def by_device(lists, with_indices=False):
            found = group(lists, with_indices)
            return {
                (GPU if isinstance(parts[0][0][0], DeviceTensor) else device, dtype): parts
                for (device, dtype), parts in found.items()
            }

        return staticmethod(by_device)

    properties = SimpleNamespace(
        name="pretended GPU", total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
    )
    runtime = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_args, **_options: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda _device: None,
        "device": lambda _device: nullcontext(),
        "stream": lambda _stream: nullcontext(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "Stream": _Stream,
        "Event": _Event,
        "synchronize": lambda _device=None: gpu.wait("synchronize"),
        "empty_cache": lambda: None,
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda _state, _device=None: None,
        "get_device_name": lambda _device=None: properties.name,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_properties": lambda _device=None: properties,
        "mem_get_info": lambda _device=None: (1 << 36, 1 << 36),
        "memory_allocated": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "max_memory_reserved": lambda _device=None: 0,
        "reset_peak_memory_stats": lambda _device=None: None,
        "cudart": lambda: gpu,
    }
    optimizers = torch.optim.Optimizer
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, function in runtime.items():
            patch.setattr(torch.cuda, name, function)

        # what is saved has to be of the type that tensors of a true GPU have
        def plain(tensor):
            return torch.Tensor if type(tensor) is DeviceTensor else type(tensor)

        patch.setattr(_bytes, "type", plain, raising=False)
        patch.setattr(torch, "autocast", both)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: gpu.pin(tensor))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: gpu.is_pinned(tensor))
        group = optimizers._group_tensors_by_device_and_dtype
        patch.setattr(optimizers, "_group_tensors_by_device_and_dtype", grouped(group))
        torch._C._set_only_lift_cpu_tensors(True)  # ``torch.tensor`` sends them by an operation
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(_Everywhere())
        try:
            yield gpu
        finally:
            _running.pop()


def _tensors(tree) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _tensors(part)


def _mapped(tree, kind: type, change: Callable):
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(part, kind, change) for part in tree])
    if isinstance(tree, dict):
        return {name: _mapped(part, kind, change) for name, part in tree.items()}
    return tree


def _held(tree):
    return _mapped(tree, DeviceTensor, lambda tensor: tensor.held)


def _on_device(tree):
    return _mapped(tree, torch.Tensor, DeviceTensor)


_WRITTEN: dict[object, tuple[tuple[int, str], ...]] = {}


def _written(operation) -> tuple[tuple[int, str], ...]:
    """The arguments that ``operation`` changes and returns: place and name."""
    if operation not in _WRITTEN:
        arguments = enumerate(operation._schema.arguments)
        changed = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
        _WRITTEN[operation] = tuple(changed)
    return _WRITTEN[operation]


def _first_written(changed, args, kwargs, result):
    if result is None:
        return None
    values = [args[i] if i < len(args) else kwargs[name] for i, name in changed]
    for value in (v for v in values if isinstance(v, DeviceTensor)):
        assert value.shape == value.held.shape, "an operation in place that changes the shape"
    return values[0] if len(values) == 1 or not isinstance(result, tuple) else tuple(values)


def _documents(query, key, value, bounds, scale):
    """Of each document its place, and heads [H, T, E] and weights [H, T, T] of its attention, as
    torch's kernel for GPUs has them."""
    if {each.dtype for each in (query, key, value)} not in ({torch.bfloat16}, {torch.float16}):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    places = ([slice(*each) for each in pairwise(values.tolist())] for values in bounds)
    for of_queries, of_keys in zip(*places, strict=True):
        q = query[of_queries].transpose(0, 1).float()
        k, v = (each[of_keys].transpose(0, 1).float() for each in (key, value))
        k, v = (each.repeat_interleave(groups, dim=0) for each in (k, v))
        later = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1])
        scores = (q @ k.mT * scale).masked_fill(later > 0, -1e9)
        yield of_queries, of_keys, q, k, v, scores.softmax(-1), scale


def _varlen(query, key, value, bounds, *others, scale=None, **_options):
    scale = others[4] if len(others) > 4 else scale
    output = torch.empty_like(query)
    both = bounds, others[0]
    for place, _, _, _, v, weights, _ in _documents(query, key, value, both, scale):
        output[place] = (weights @ v).transpose(0, 1).to(query.dtype)
    lse = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return output, lse, torch.zeros(2, dtype=torch.int64)


def _varlen_backward(gradient, *arguments, scale=None, **_options):
    (query, key, value), bounds = arguments[:3], arguments[5:7]
    scale = arguments[11] if len(arguments) > 11 else scale
    results = [torch.empty_like(each) for each in (query, key, value)]
    for at, at_keys, q, k, v, weights, factor in _documents(query, key, value, bounds, scale):
        of_output = gradient[at].transpose(0, 1).float()
        of_weights = of_output @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        parts = (of_scores @ k, of_scores.mT @ q, weights.mT @ of_output)
        places = (at, at_keys, at_keys)
        for result, part, place in zip(results, parts, places, strict=True):
            # query heads share a key head
            shared = part.unflatten(0, (result.shape[1], -1)).sum(1)
            result[place] = shared.transpose(0, 1).to(result.dtype)
    return tuple(results)


_VARLEN = {
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}
