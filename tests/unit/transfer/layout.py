"""What the tests of this folder agree on: a cache of pages and states, without an engine."""

from prfaas.wire.transfer import LayerGroup, TensorLayout

PAGE_TOKENS = 4
GROUPS = (
    LayerGroup(
        "linear",
        (0, 2),
        (
            TensorLayout("conv", ("channel",), (96,), "bfloat16"),
            TensorLayout("state", ("head", "value"), (4, 32), "float32"),
        ),
    ),
    LayerGroup("attention", (1,), (TensorLayout("page", ("page", "byte"), (1000,), "uint8"),), PAGE_TOKENS, "Full"),
)
TOKENS = 42
