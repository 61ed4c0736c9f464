"""Where a shard keeps payloads between sending and receiving."""

from typing import Any, Protocol

from torch import Tensor


class Store(Protocol):
    """Holds payloads between sending and receiving."""

    shards: int  # number of shards that share it

    def empty(self, size: int) -> Tensor: ...
    def put(self, tensor: Tensor) -> Any: ...
    def open(self, place: Any) -> Tensor: ...
    def to_private(self, tensor: Tensor) -> Tensor: ...
    def clear(self) -> None:
        """Forget all payloads; their memory may be used again."""

    def free(self) -> None:
        """Forget all payloads, and return their memory to the system."""
