"""Follow a run in the terminal: state, speed, losses, what each rank does, warnings of all ranks. It only reads files: it works on any host that sees them."""

import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

SECONDS = 2.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"between two looks (default: {SECONDS:g})")
    parser.add_argument("--once", action="store_true", help="print the page once, and end")
    arguments = parser.parse_args(argv)
    if arguments.once and arguments.seconds is not None:
        parser.error("--seconds has no effect with --once; leave one of them out")
    arguments.seconds = SECONDS if arguments.seconds is None else arguments.seconds
    if not 0 < arguments.seconds < threading.TIMEOUT_MAX:
        parser.error(f"--seconds {arguments.seconds:g} is no time above 0")
    return run_tool(lambda: watch(arguments))


def watch(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from pretrain.observe.followed_log import FollowedLog
    from pretrain.observe.metrics import METRICS_FILE
    from pretrain.observe.watch import page

    console, log = Console(), FollowedLog(arguments.run / METRICS_FILE)
    if arguments.once:
        console.print(page(arguments.run, console.width))
        return
    try:
        with Live(
            page(arguments.run, console.width, console.height, log),
            console=console,
            screen=console.is_terminal,
            auto_refresh=False,
        ) as live:
            while True:
                time.sleep(arguments.seconds)
                live.update(page(arguments.run, console.width, console.height, log), refresh=True)
    except KeyboardInterrupt:
        console.print(page(arguments.run, console.width, log=log))


if __name__ == "__main__":
    raise SystemExit(main())
