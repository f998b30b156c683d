"""Options of a node: flags, variables and units reach the node as one value."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from penstock import commandline
from penstock_services.node_reporter.options import Options


def options(*arguments: str, **env: str) -> Options:
    """What the command gets."""
    taken: list[Options] = []
    app = commandline.new_app()

    @app.command()
    @commandline.takes(Options)
    def node(ctx: typer.Context, options: Options) -> None:
        taken.append(options)

    result = CliRunner().invoke(app, ["--node-id", "n1", *arguments], env=env)
    assert result.exit_code == 0, result.output
    return taken[0]


def test_a_unit_file_sets_a_node_up_without_flags() -> None:
    """One environment file for all machines of a rack, as systemd reads it; only the id is a flag."""
    given = options(
        PENSTOCK_MACHINE_ID="machine-7",
        PENSTOCK_LOG_DIR="/var/log/penstock",
        PENSTOCK_NODE_LABELS="zone=a disk=ssd",
        PENSTOCK_NODE_GATEWAY="https://gateway:8470",
        PENSTOCK_NODE_CA="/etc/penstock/ca.pem",
        PENSTOCK_NODE_TASK_GATEWAY="https://inside:8470",
        PENSTOCK_NODE_CHECKPOINT_DIR="/scratch/saves",
        PENSTOCK_NODE_LOG_BIND="10.0.0.7:8471",
        PENSTOCK_NODE_LOG_CA="/etc/penstock/logs.pem",
    )
    assert given.machine_id == "machine-7"
    assert given.log_dir == Path("/var/log/penstock")
    assert given.label == ["zone=a", "disk=ssd"]
    assert given.gateway_ca == Path("/etc/penstock/ca.pem")
    assert (given.gateway, given.task_gateway) == ("https://gateway:8470", "https://inside:8470")
    assert given.checkpoint_dir == Path("/scratch/saves")
    assert (given.log_bind, given.log_ca) == ("10.0.0.7:8471", Path("/etc/penstock/logs.pem"))


def test_a_flag_comes_before_its_variable() -> None:
    """One machine of the rack differs: its unit names the address itself."""
    given = options("--log-bind", "10.0.0.9:8471", PENSTOCK_NODE_LOG_BIND="10.0.0.7:8471")
    assert given.log_bind == "10.0.0.9:8471"


def test_amounts_of_memory_are_read_with_their_units() -> None:
    """A laptop plays a node with two large GPUs."""
    given = options(
        "--virtual-gpus",
        "2",
        "--virtual-gpu-model",
        "A100",
        "--virtual-gpu-memory",
        "24GiB",
        "--log-limit",
        "128",
    )
    assert (given.virtual_gpus, given.virtual_gpu_model, given.virtual_gpu_memory_mib) == (2, "A100", 24_576)
    assert given.log_limit_mib == 128
