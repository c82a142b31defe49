"""The matrix products of a piece of work, noted while it runs and run again by themselves."""

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "baddbmm_"}


class Noted(TorchDispatchMode):
    """Keeps every matrix product's operands as they are, strides included."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            # In place it would change the operands from one repetition to the next.
            product = F.linear if name == "linear" else getattr(torch, name.rstrip("_"))
            self.products.append(_bound(product, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _bound(product: Callable, args: tuple, kwargs: dict) -> Callable[[], object]:
    return lambda: product(*args, **kwargs)


def products_of(work: Callable[[], object]) -> Callable[[], None]:
    """Return what runs all matrix products that `work` makes, in its order."""
    with torch.inference_mode(), Noted() as noted:
        work()

    @torch.inference_mode()
    def again() -> None:
        for product in noted.products:
            product()

    return again
