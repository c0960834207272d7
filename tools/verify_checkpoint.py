"""Compare the files of a checkpoint, or of all checkpoints of a run, with their sha256 hashes."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="CKPT_OR_RUN_DIR")
    arguments = parser.parse_args(argv)
    return run_tool(lambda: verify_all(arguments.path))


def verify_all(path: Path) -> None:
    from pretrain.checkpoint import files
    from pretrain.checkpoint.payload import Payload
    from pretrain.errors import CheckpointError, OtherFormatError, UnreadableError

    problems = []
    for checkpoint in files.checkpoints_at(path):
        try:
            files.verify(checkpoint)
            tensors = len(Payload(checkpoint).items)
            print(f"good     {checkpoint}: {len(files.read_manifest(checkpoint))} files, {tensors} tensors", flush=True)
        except CheckpointError as error:
            if checkpoint != path and not checkpoint.exists():  # hashing takes minutes, and a run retires checkpoints (checkpoint.keep_last)
                print(f"removed  {checkpoint}: by the run, while it was verified", flush=True)
                continue
            problems.append(str(error))
            # A file that cannot be read now may be good or damaged.
            unknown = isinstance(error, UnreadableError) and not error.missing
            word = "other  " if isinstance(error, OtherFormatError) else "unread " if unknown else "damaged"
            print(f"{word}  {error}", flush=True)
    if problems:
        raise CheckpointError(f"{len(problems)} not good: {problems[0]}")


if __name__ == "__main__":
    raise SystemExit(main())
