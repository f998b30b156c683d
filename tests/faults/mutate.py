"""Runs with one guard removed: a module's source is changed on import, in this process only.

    PENSTOCK_MUTANT='{"module": …, "old": …, "new": …}' python -m tests.faults.mutate [pytest arguments]

`old` must stand in the module exactly `count` times (default 1), else the mutant no longer fits the code: exit
status 99. Without the variable the tests run on the code as it is. A mutant whose module was never imported
shows nothing, and ends with 98. Otherwise the exit status is pytest's.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "PENSTOCK_MUTANT"
DOES_NOT_FIT = 99
NOT_IMPORTED = 98


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from its changed source."""

    def __init__(self, name: str, path: str, mutant: Mapping[str, Any]) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        """Never from the bytecode cache."""
        source = self.get_data(self.path).decode()
        old, new = self._mutant["old"], self._mutant["new"]
        if source.count(old) != self._mutant.get("count", 1):
            print(
                f"mutant does not fit {fullname}: found {source.count(old)} times: {old!r}", file=sys.stderr
            )
            sys.stderr.flush()
            os._exit(DOES_NOT_FIT)
        return compile(source.replace(old, new), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._mutant["applied"].append(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before the ordinary finders for one module."""

    def __init__(self, mutant: Mapping[str, Any]) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant["module"]:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None, fullname
        assert found.origin is not None, fullname
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=_Loader(fullname, found.origin, self._mutant)
        )


def apply_from_environment() -> list[str]:
    """Installs the mutant that the environment names, if any; returns the list of modules it was applied to."""
    text = os.environ.get(VARIABLE)
    applied: list[str] = []
    if text:
        mutant = {**json.loads(text), "applied": applied}
        assert mutant["module"] not in sys.modules, f"{mutant['module']} is imported already"
        sys.meta_path.insert(0, _Finder(mutant))
    return applied


def main() -> int:
    applied = apply_from_environment()
    import pytest  # only now: its plugins may import what is to be changed

    code = int(pytest.main(sys.argv[1:]))
    if VARIABLE in os.environ and not applied and code == 0:
        return NOT_IMPORTED
    return code


if __name__ == "__main__":
    sys.exit(main())
