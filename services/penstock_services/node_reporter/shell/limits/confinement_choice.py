"""Choice of the confinement of tasks, by `--isolation` and what the machine allows."""

import logging

from penstock.errors import ConfigurationError
from penstock_services.node_reporter.options import IsolationChoice
from penstock_services.node_reporter.shell.isolation.confinement import Confinement
from penstock_services.node_reporter.shell.isolation.users import TaskUser
from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.process.spawner import find_confinement

logger = logging.getLogger(__name__)


def confine(choice: IsolationChoice, groups: Cgroups, user: TaskUser | None) -> tuple[Confinement, str]:
    """The confinement of each task, and why no better one is possible. Raises `ConfigurationError` where the
    choice is not available."""
    plan, errors = Confinement(user=user and user[:3]), ["--isolation asks for nothing better"]
    if choice in (IsolationChoice.AUTO, IsolationChoice.PID_NAMESPACE):
        plan, errors = find_confinement(user)
    if plan.exits == "none" and choice in (IsolationChoice.AUTO, IsolationChoice.CGROUP) and groups.unified:
        groups.proves_ends = True
        plan = plan._replace(exits="cgroup")
    if choice is not IsolationChoice.AUTO and plan.exits != choice.value:
        raise ConfigurationError(f"--isolation {choice}: not to be had here: {'; '.join(errors)}")
    if plan.exits == "none":
        logger.warning(
            "the end of a task cannot be proven here, so this node shares no GPUs: %s", "; ".join(errors)
        )
    elif not plan.mounts:
        logger.warning("tasks see this node's folders and processes: %s", "; ".join(errors))
    return plan, "; ".join(errors)
