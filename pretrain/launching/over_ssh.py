"""A run on a list of hosts: launch/torchrun_multinode.sh on each over ssh, its output here, and one end for all."""

from __future__ import annotations

import ipaddress
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import LaunchError, flush_output, say
from pretrain.launching.targets import Launch

PID_MARK = "pretrain-pid"
LAST_PORT = 65535
KILL_SECONDS = 30
"""How long the ssh that delivers a signal may take."""
READ_SECONDS = 5
"""How long the last lines of a host may take after its ssh has ended."""


def host_commands(launch: Launch, settings: dict[str, Any]) -> dict[str, list[str]]:
    """By host, the command that runs here. Raises LaunchError if the hosts do not fit the number of nodes."""
    hosts = settings["hosts"]
    if len(hosts) != launch.nodes:
        raise LaunchError(f"--nodes {launch.nodes}, and --set hosts= names {len(hosts)} hosts; name one for each node")
    if not 0 < settings["port"] <= LAST_PORT:
        raise LaunchError(
            f"--set port={settings['port']}: there are ports 1 to {LAST_PORT}; choose one that is free on {hosts[0]}"
        )
    ssh = ssh_words(settings)
    head = f"[{_address(hosts[0])}]" if ":" in hosts[0] else _address(hosts[0])
    folder = settings["folder"] or str(Path.cwd())
    arguments = launch.facts()["arguments"]
    commands = {}
    for rank, host in enumerate(hosts):
        variables = {
            "NODES": launch.node_range,
            "GPUS": launch.gpus,
            "HEAD": f"{head}:{settings['port']}",
            "NODE_RANK": rank,
            "MAX_RESTARTS": settings["restarts"],
        }
        if _is_reachable(_address(host)):  # how the others find this host, whatever its own name leads to
            variables["LOCAL_ADDR"] = _address(host)
        exported = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
        activate = f"{settings['activate']} && " if settings["activate"] else ""
        # `exec` keeps the process number that is told first: a signal to it reaches torchrun, which passes it on.
        script = (
            f"cd {shlex.quote(folder)} && {activate}echo {PID_MARK} $$ && "
            f"{exported} exec bash launch/torchrun_multinode.sh {shlex.join(arguments)}"
        )
        commands[host] = [*ssh, host, f"bash -c {shlex.quote(script)}"]
    return commands


def ssh_words(settings: dict[str, Any]) -> list[str]:
    """The words of the setting `ssh`. Raises LaunchError if a quote in it is open."""
    try:
        return shlex.split(settings["ssh"])
    except ValueError as error:
        raise LaunchError(f"--set ssh={settings['ssh']}: {error}; write it as in a shell") from error


def _address(host: str) -> str:
    return host.rpartition("@")[2]


def _is_reachable(address: str) -> bool:
    """Whether this is an IP address for other hosts. A name may be one of the ssh configuration alone."""
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass
class Host:
    """A host's part of the run, as seen from here."""

    name: str
    process: subprocess.Popen
    pid: int | None = None
    reader: threading.Thread = field(init=False)


class HostRun:
    """The run on all hosts. `fewest`: it goes on when a host fails, as long as so many have not; all of them by default."""

    def __init__(
        self, commands: dict[str, list[str]], ssh: Sequence[str], say: Callable[[str], None] = print, fewest: int | None = None
    ) -> None:
        self._ssh, self._say = list(ssh), say
        self._fewest = len(commands) if fewest is None else fewest
        self._lock = threading.RLock()  # a signal may come while the main thread holds it
        self._asked: str | None = None
        self._width = max(map(len, commands))
        self.hosts = []
        for name, command in commands.items():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                start_new_session=True,  # Ctrl-C is for the hosts' processes, not for ssh
            )  # fmt: skip
            host = Host(name, process)
            host.reader = threading.Thread(target=self._read, args=(host,), daemon=True)
            self.hosts.append(host)
            host.reader.start()

    def _read(self, host: Host) -> None:
        for line in host.process.stdout:
            if line.startswith(PID_MARK):
                host.pid = int(line.split()[1])
                if self._asked:  # the signal came before the host had said whom to send it to
                    self._signal(host)
                continue
            self._tell(line.rstrip(), host)

    def _tell(self, line: str, host: Host | None = None) -> None:
        """Print a line of this program, or of a host."""
        with self._lock:
            self._say(f"{host.name:{self._width}} | {line}" if host else line)

    def stop(self, why: str) -> None:
        """Ask the processes of all hosts to save and end (SIGTERM). A second call leaves the hosts alone, and ends their ssh here."""
        if self._asked:
            self._tell(f"{why} again: not waiting for the hosts any longer; their processes may still be saving")
            for host in self.hosts:
                if host.process.poll() is None:
                    host.process.kill()
            return
        self._asked = why
        self._tell(f"{why}: asking all hosts to save and stop")
        for host in self.hosts:
            if host.pid is not None and host.process.poll() is None:
                threading.Thread(target=self._signal, args=(host,)).start()

    def _signal(self, host: Host) -> None:
        try:
            done = subprocess.run([*self._ssh, host.name, f"kill -TERM {host.pid}"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=KILL_SECONDS)  # fmt: skip
            problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            problem = [f"no answer within {KILL_SECONDS} s"]
        for line in problem:
            self._tell(f"could not be signalled: {line}", host)

    def wait(self) -> int:
        """Wait for all hosts. When too many have failed, the others are asked to stop. Return the exit code of the whole."""
        running, failed = list(self.hosts), 0
        while running:
            ended = [host for host in running if host.process.poll() is not None]
            if not ended:
                time.sleep(0.2)
            for host in ended:
                code = host.process.returncode
                host.reader.join(READ_SECONDS)  # what ssh left behind may hold its output open
                running.remove(host)
                failed += code != 0
                if code and not self._asked:
                    self._host_failed(f"{host.name} ended with exit code {code}", len(self.hosts) - failed)
        return 0 if len(self.hosts) - failed >= self._fewest else 1

    def _host_failed(self, what: str, left: int) -> None:
        if left < self._fewest:
            self.stop(what)
        else:
            self._tell(f"{what}: the run goes on with {left} of {len(self.hosts)} hosts, from its newest checkpoint")


class Output:
    """Prints the lines of the hosts. If that fails (`| tee` ends at Ctrl-C, the disk is full), it says so once, and the run goes on.

    A host whose output nobody takes would stand still, and one that is not told to stop would not save.
    """

    def __init__(self) -> None:
        self._told = False

    def __call__(self, line: str) -> None:
        try:
            print(line, flush=True)
        except (OSError, ValueError) as error:
            if not self._told:
                self._told = True
                say(f"what the hosts say cannot be printed: {error}; the run goes on, and its logs have it", to_errors=True)


def run_over_ssh(launch: Launch, settings: dict[str, Any]) -> int:
    """Start the run, pass its output on, and stop it in order on SIGINT, SIGTERM and SIGHUP (unless nohup ignores that one)."""
    commands, ssh = host_commands(launch, settings), ssh_words(settings)
    if shutil.which(ssh[0]) is None:
        raise LaunchError(f"--set ssh: there is no program {ssh[0]} here; install it, or name another")
    run = HostRun(commands, ssh, Output(), launch.fewest_nodes)
    kept = {}
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        kept[number] = signal.signal(number, lambda got, frame: run.stop(signal.Signals(got).name))
    try:
        return run.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        flush_output()
