"""The gateway for tasks of jobs that may submit jobs: its URL, and a token that this node signs, in a file
of the task alone (decision 143)."""

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.model.decisions.orders import StartTask
from penstock.runtime.keys.job_tokens import Claim, made
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.ports import NotStartable
from penstock_services.node_reporter.shell.state_folder import state_folder

TOKEN, CA, PROGRAMS = "token", "ca.pem", "bin"
"""In the task's folder: its token, the gateway's authority, and a folder with `penstock`,
the last on its PATH."""
SERVER_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "PENSTOCK_SERVER", "PENSTOCK_TOKEN_FILE", "PENSTOCK_CA"
PROGRAM = "penstock"


class GatewayAccess:
    """Of one node."""

    def __init__(self, options: Options, keys: Callable[[], NodeKeys]) -> None:
        self._options, self._keys = options, keys
        self._program = Path(sys.executable).with_name(PROGRAM)

    def give(self, order: StartTask, folder: Path, path: str) -> tuple[dict[str, str], list[Path]]:
        """The task's variables, and what its folder then has for it; nothing for a job that may not submit.
        `path`: its PATH.

        Raises `NotStartable` where this node knows no gateway, `JournalFailed` where nothing can be written.
        """
        options = self._options
        if not order.may_submit:
            return {}, []
        server = options.task_gateway or options.gateway
        if server is None:
            raise NotStartable(
                "its job may submit jobs, and this node knows no gateway: give its reporter --gateway URL "
                "or --task-gateway URL"
            )
        claim = Claim(options.node_id, order.job_id, order.task_id, order.token)
        scheme, mark, address = server.partition("://")
        server = f"{scheme}{mark}{address.rpartition('@')[2]}"  # a password in it is the node's
        variables, paths = {SERVER_VARIABLE: server, TOKEN_VARIABLE: str(folder / TOKEN)}, [folder / TOKEN]
        with state_folder():
            (folder / TOKEN).touch(mode=0o600)
            (folder / TOKEN).write_text(made(self._keys(), claim) + "\n")
            if options.gateway_ca is not None and server.startswith("https://"):
                shutil.copyfile(options.gateway_ca, folder / CA)
                variables[CA_VARIABLE] = str(folder / CA)
                paths.append(folder / CA)
            in_image = order.environment is not None and order.environment.container is not None
            if self._program.exists() and not in_image:
                (folder / PROGRAMS).mkdir(exist_ok=True)
                with suppress(FileExistsError):
                    (folder / PROGRAMS / PROGRAM).symlink_to(self._program)
                variables["PATH"] = f"{path}:{folder / PROGRAMS}"
                paths.append(folder / PROGRAMS)
        return variables, paths

    @staticmethod
    def forget(folder: Path) -> None:
        """Removes it from the folder of a task that has ended, whose token is worthless since."""
        with suppress(OSError):
            (folder / TOKEN).unlink()
            shutil.rmtree(folder / PROGRAMS, ignore_errors=True)
            (folder / CA).unlink()
