"""Where this process stands in the kernel's control groups, as /proc describes it on machines of several
kinds."""

from pathlib import Path

from penstock_services.node_reporter.shell.limits.cgroups import own_groups

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def test_version_two_alone() -> None:
    """A systemd machine: one hierarchy, the service's own group in it."""
    found = own_groups(V2, "0::/system.slice/penstock-node-reporter.service\n")
    assert found == {"unified": Path("/sys/fs/cgroup/system.slice/penstock-node-reporter.service")}


def test_version_one_beside_version_two() -> None:
    """A hybrid machine: a hierarchy per controller, two of them in one; `systemd` names one without a
    controller."""
    mounts = "\n".join(
        [
            "31 23 0:27 / /sys/fs/cgroup/unified rw - cgroup2 none rw",
            "32 23 0:28 / /sys/fs/cgroup/memory rw shared:5 master:1 - cgroup none rw,memory",
            "33 23 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup none rw,cpu,cpuacct",
            "34 23 0:30 / /proc rw - proc proc rw",
        ]
    )
    found = own_groups(mounts, "4:memory:/jobs/a:b\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n")
    assert found["memory"] == Path("/sys/fs/cgroup/memory/jobs/a:b")
    assert found["cpu"] == found["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found["unified"] == Path("/sys/fs/cgroup/unified")


def test_a_container_sees_its_own_group_at_the_mount() -> None:
    """Without a cgroup namespace the path is the machine's, and the mount shows it from the container's group
    on."""
    mounts = "40 23 0:28 /docker/12ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    assert own_groups(mounts, "4:memory:/docker/12ab\n")["memory"] == Path("/sys/fs/cgroup/memory")
    assert own_groups(mounts, "4:memory:/docker/12ab/jobs\n")["memory"] == Path("/sys/fs/cgroup/memory/jobs")
