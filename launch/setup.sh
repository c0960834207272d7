#!/usr/bin/env bash
# Make .venv in the repository and install the project into it with the pinned versions; quick when that was done before. Started by
# launch/quickstart.sh and tests/run.sh.  PYTHON=python3.12 chooses the interpreter.
#   bash launch/setup.sh [EXTRAS]      e.g. test,plot

set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-plot}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "error: Python 3.10 or newer is needed, and '$python' is $("$python" --version 2>&1 || true); name one with PYTHON=..." >&2
  exit 2
fi
# Everything the installation depends on; when none of it changed there is nothing to do.
wanted="$extras $("$python" -c 'import sys; print(sys.version)') $(cat pyproject.toml constraints.txt | cksum) $(pwd -P)"
if [ "$(cat .venv/installed-"$extras" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
echo "== installing into .venv (about a minute; torch is the large part)"
existed=$([ ! -e .venv ] || echo yes)
if ! "$python" -m venv .venv; then
  [ -n "$existed" ] || rm -rf .venv # one that runs may use stays
  echo "error: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
  exit 2
fi
# One line per package is progress enough; what pip has to say besides is shown when it fails.
if ! .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extras]" 2> .venv/install.log |
  sed -un 's/^Collecting \([^ =<>~!(;[]*\).*/   \1/p; s/^Installing collected packages.*/   unpacking/p'; then
  cat .venv/install.log >&2
  exit 1
fi
printf '%s' "$wanted" > .venv/installed-"$extras"
