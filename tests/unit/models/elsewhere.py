"""A device that is not the CPU, for machines that have no other: tensors that say so, computed on the CPU underneath.

Every operation is refused whose tensors lie on two devices, as a GPU refuses it; only a CPU tensor without axes, or one
that indexes or is copied, may go along. So a model that runs here places everything that it makes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Any name that torch knows and that needs no driver.
DEVICE = torch.device("meta")
_MAY_MIX = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}


class Elsewhere(torch.Tensor):
    """A tensor that claims to lie on DEVICE."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Elsewhere":
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
            )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class DeviceElsewhere(TorchDispatchMode):
    """While entered, whatever is made on DEVICE is an `Elsewhere`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class FunctionsElsewhere(TorchFunctionMode):
    """Leads the two functions that no dispatch mode sees through a copy to the other device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return torch.tensor(*args, **kwargs).to(device)
        if func is torch.Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].inner.tolist()
        return func(*args, **kwargs)


@contextmanager
def device_elsewhere() -> Iterator[torch.device]:
    """Let there be DEVICE."""
    with FunctionsElsewhere(), DeviceElsewhere():
        yield DEVICE


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    name = func.overloadpacket.__name__
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.ndim]
    if there and here and name not in _MAY_MIX:
        raise RuntimeError(f"{name}: tensors on {DEVICE} and on the CPU")
    target = kwargs.get("device")
    goes_there = target is not None and torch.device(target).type == DEVICE.type
    is_there = goes_there or (bool(there) and (target is None or goes_there))
    if goes_there:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if name == "copy_" and there and not isinstance(args[0], Elsewhere):
        is_there = False
    unwrapped = tree_map_only(Elsewhere, lambda tensor: tensor.inner, (args, kwargs))
    result = func(*unwrapped[0], **unwrapped[1])
    if not is_there:
        return result
    # What was changed in place is the tensor that came in.
    known = {id(tensor.inner): tensor for tensor in there}
    return tree_map_only(torch.Tensor, lambda made: known[id(made)] if id(made) in known else Elsewhere(made), result)
