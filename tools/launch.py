"""Start a run elsewhere: on hosts over ssh, on Slurm, Kubernetes, SageMaker or SkyPilot. --dry-run prints exactly what would be started.

What a target has to be told is in launch/targets/TARGET.yaml: --set name=value.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import ConfigError, LaunchError, reason_of, run_tool  # noqa: E402

if TYPE_CHECKING:
    from pretrain.launching.targets import Launch


def main(argv: list[str] | None = None) -> int:
    from pretrain.launching.targets import target_names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file of the run, as the target sees it from the repository"
    )
    parser.add_argument("--target", required=True, choices=target_names())
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="N",
        help="nodes, or FEWEST:MOST for a run that goes on with those that are there (default: 1)",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="G", help="GPUs, and so processes, per node (default: 1)")
    parser.add_argument("--cpu", action="store_true", help="--gpus is a number of processes that need no device")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the target")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and stop")
    parser.add_argument("--output", type=Path, metavar="FILE", help="new file for the manifest (default: one in runs/launch/, which the next launch replaces)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a configuration value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.gpus < 1:
        parser.error(f"--gpus {arguments.gpus} is not above 0")
    given = re.fullmatch(r"(?:([1-9]\d*):)?([1-9]\d*)", arguments.nodes)
    if given is None or int(given[1] or 1) > int(given[2]):
        parser.error(f"--nodes {arguments.nodes} is neither a number above 0 nor FEWEST:MOST")
    arguments.nodes, arguments.fewest = int(given[2]), int(given[1] or given[2])
    return run_tool(lambda: launch(arguments))


def launch(arguments: argparse.Namespace) -> int:
    from pretrain.launching.over_ssh import host_commands, run_over_ssh
    from pretrain.launching.targets import Launch, parse_settings, read_target

    target, given = read_target(arguments.target), parse_settings(arguments.set)
    described = Launch(arguments.config, arguments.nodes, arguments.gpus, arguments.overrides, arguments.cpu, arguments.fewest)
    if arguments.output and target.manifest is None:
        raise LaunchError(
            f"--output {arguments.output}: {target.name} is started by a command and has no manifest; leave it out"
        )
    if target.name == "ssh":
        settings = target.chosen(described, given)
        commands = host_commands(described, settings)
        check_runs(described)
        if arguments.dry_run:
            for command in commands.values():
                print(shlex.join(command))
            return 0
        return run_over_ssh(described, settings)
    name = f"{described.facts()['label']}.{target.name}.{target.format}"
    file = arguments.output or Path("runs") / "launch" / name
    manifest, command = target.rendered(described, given, str(file))
    check_runs(described)
    if manifest is not None:
        if arguments.dry_run:
            print(f"# {file}\n{manifest}", end="")
        else:
            keep(manifest, file, replaces=arguments.output is None)
    if arguments.dry_run:
        print(shlex.join(command))
        return 0
    print(shlex.join(command), flush=True)
    try:
        if manifest is None:
            os.execvp(command[0], command)  # signals go straight to it
        return subprocess.run(command).returncode
    except FileNotFoundError as error:
        kept = f"; the manifest is {file}" if manifest is not None else ""
        raise LaunchError(
            f"{command[0]} is not installed here{kept}; run the command where it is: {shlex.join(command)}"
        ) from error


def check_runs(described: Launch) -> None:
    """Raise ConfigError or LaunchError for a run that could not start on so many processes: a job would find it out hours later."""
    from pretrain.config.load import load_config
    from pretrain.train.plan import check_without_device

    config, _ = load_config(described.config, described.overrides)
    for nodes in sorted({described.fewest_nodes, described.nodes}):
        place = f"--nodes {nodes} --gpus {described.gpus}"
        try:
            check_without_device(config, nodes * described.gpus)
        except LaunchError as error:
            raise LaunchError(f"{place}: {error.problem}", "choose other numbers, or change the key") from error
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error


def keep(manifest: str, file: Path, replaces: bool) -> None:
    """Write the manifest. `replaces`: over whatever is there; otherwise LaunchError is raised, unless that is the same manifest."""
    try:
        if not replaces and os.path.lexists(file) and not (file.is_file() and file.read_bytes() == manifest.encode()):
            raise LaunchError(f"--output {file}: already exists with other content; choose another file or remove it first")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(manifest, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the manifest cannot be kept: {reason_of(error)}; name another file: --output FILE") from error


if __name__ == "__main__":
    raise SystemExit(main())
