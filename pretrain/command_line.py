"""The one way in which command-line tools end.

    if __name__ == "__main__":
        raise SystemExit(main())

with `main(argv=None)` returning `run_tool(...)`: 0 on success, 1 on failure, 2 on bad usage (argparse exits with 2 itself).
"""

import sys
from collections.abc import Callable

from pretrain.errors import UserError

INTERRUPTED = 130  # what shells report for a process ended by SIGINT


def run_tool(function: Callable[[], object]) -> int:
    """Call `function` and return the exit code of the process.

    A `UserError` becomes one line on standard error and its own exit code. Any other exception is a defect of ours and
    keeps its traceback.
    """
    try:
        function()
    except UserError as error:
        print("error: " + " ".join(str(error).split("\n")), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
