"""GPUs of the nodes of Muri's published simulator, filled one after the other."""

from collections.abc import Sequence


class Nodes:
    """First fit."""

    def __init__(self, free: Sequence[int]) -> None:
        self.free = list(free)

    def take(self, gpus: int) -> bool:
        free = self.free
        size = max(free)
        if gpus <= 8:
            for node, here in enumerate(free):
                if here >= gpus:
                    free[node] -= gpus
                    return True
            return False
        empty = [node for node, here in enumerate(free) if here == 8][: gpus // 8]
        if size < 8 or len(empty) < gpus // 8:
            return False
        for node in empty:
            free[node] = 0
        return True
