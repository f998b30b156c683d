"""Meters of a machine that measures neither stalls nor memory traffic."""

from collections.abc import Mapping, Sequence

from penstock_services.node_reporter.shell.ports import Key, PressureTrigger


class MetersWithoutContention:
    """That part of `ports.Meters`."""

    def pressure(self, groups: Sequence[str] | None) -> PressureTrigger | None:
        return None

    def waits(self, shim: int) -> Mapping[int, int]:
        return {}

    def traffic(self, key: Key | None) -> Mapping[str, int]:
        return {}

    def follow_traffic(self, key: Key, shim: int) -> None:
        del key, shim

    def forget_traffic(self, key: Key) -> None:
        del key
