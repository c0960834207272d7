"""The entry of a training run: the same command under python, torchrun and accelerate launch.

python pretrain/run.py --config configs/pretrain/llama-125m.yaml key=value ...
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Started by path, Python puts this package's own folder first, where `data`, `config`, ... would shadow other modules.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pretrain.errors import INTERRUPTED, ConfigError, DataError, LaunchError, UserError, print_error

if TYPE_CHECKING:
    from pretrain.observe.sinks import Sink
    from pretrain.train.callbacks import Callback


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The typed arguments. Ends the process with a line and exit code 2 where they cannot go together."""
    parser = argparse.ArgumentParser(prog="pretrain/run.py", description="Train a language model.")
    parser.add_argument("--config", required=True, help="YAML file; see docs/configuration.md")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--origins", action="store_true", help="with --print-config: where every value was written")
    parser.add_argument("--check", action="store_true", help="check configuration, data and layout, and stop")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --check: for how many processes (no launcher needed)")
    parser.add_argument(
        "--explain", action="store_true", help="with --check: which samples, positions and weights each rank has"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a configuration value")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(_unrecognized(unknown))
    if arguments.ranks is not None and not arguments.check:
        parser.error("--ranks goes with --check; a launcher decides how many processes train, e.g. torchrun --nproc-per-node 8")
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks={arguments.ranks} must be at least 1")
    if arguments.explain and not arguments.check:
        parser.error("--explain goes with --check; add --ranks N for N processes")
    if arguments.origins and not arguments.print_config:
        parser.error("--origins goes with --print-config")
    if arguments.check and arguments.print_config:
        parser.error("--check and --print-config both stop before training; give one")
    return arguments


def _unrecognized(unknown: list[str]) -> str:
    from pretrain.config.foreign import answer_to

    answers = [(word, answer_to(word.partition("=")[0].lstrip("-"))) for word in unknown if word.startswith("--")]
    known = [f"{word.partition('=')[0]}: {answer}" for word, answer in answers if answer]
    return "; ".join(
        [f"unrecognized arguments: {' '.join(unknown)}; settings are given as key=value, e.g. optim.lr=1e-3", *known]
    )


def main(
    argv: list[str] | None = None,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
    end: contextlib.ExitStack | None = None,
) -> int:
    """Run, and return the exit code.

        0    finished, preempted or stopped
        1    failed
        2    a configuration or launch that cannot work
        130  interrupted by SIGINT where there is nothing to save

    `callbacks` and `sinks`: code of your own in the run (docs/extending.md). `end`: where it closes, handlers of signals are what they were
    before; by default before this returns.
    """
    arguments = parse(argv)
    try:
        with contextlib.nullcontext(end) if end else contextlib.ExitStack() as until:
            run(arguments, callbacks, sinks, until)
            return 0
    except UserError as error:
        # One line for the user. The traceback is in logs/rank-N.log if the run got far enough to have that file.
        is_alone = arguments.check or arguments.print_config
        print_error(error, None if is_alone else functools.partial(tell_others, error))
        return error.exit_code
    except KeyboardInterrupt:  # a run that trains takes the first one as a request to stop
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def tell_others(error: UserError) -> None:
    """Send the error to the other ranks, so that each ends with the same line."""
    from pretrain.distributed.joining import tell

    tell(error)


def run(arguments: argparse.Namespace, callbacks: Sequence[Callback], sinks: Sequence[Sink], end: contextlib.ExitStack) -> None:
    """Print the configuration, check it or train, as the arguments say. Raises UserError."""
    from pretrain.config.load import load_config
    from pretrain.config.read import origin_of
    from pretrain.config.written import to_yaml
    from pretrain.train.garbage import first_import

    config, origins = load_config(arguments.config, arguments.overrides)
    _refuse_without_folders()
    try:
        if arguments.print_config:
            from pretrain.train.resolve import resolve

            print(to_yaml(resolve(config), origins if arguments.origins else None), end="")
            return
        with first_import(until=end):
            from pretrain.train.extensions import Extensions
            from pretrain.train.session import check, train

        extensions = Extensions(callbacks, sinks)
        if arguments.check:
            check(config, arguments.ranks, arguments.explain)
        else:
            train(config, end, extensions)
    except (ConfigError, DataError) as error:
        # Such a message begins with the key whose value is at fault: `model.dim=33 is not ...`, `data.sources: every weight ...`.
        key = re.match(r"[a-z_]+(?:\.\w+)+", str(error))
        place = origin_of(key[0], origins) if key else "default"
        if place != "default":
            error.args = (f"{place}: {error}",)  # the same error, of which others may have been told
        raise


def _refuse_without_folders() -> None:
    """Raise LaunchError if the current folder is gone, or none takes temporary files. torch would fail to be imported, with a traceback."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the folder in which this command was started was removed; change to one that exists") from error
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise LaunchError(f"{error.strerror}; set TMPDIR to a directory with room that can be written to") from error


if __name__ == "__main__":
    # Signals are given back to nobody: a run that is over ignores them until its process has ended.
    sys.exit(main(end=contextlib.ExitStack()))
