"""Write the generated pages anew: docs/configuration.md from the schema, and tables in two pages.

docs/models.md has tables of families and presets, docs/metrics.md one of `StepRecord`.
"""

import argparse
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]  # a clone works without being installed

from documentation.configuration import configuration_page  # noqa: E402
from documentation.model_tables import metrics_page, model_page  # noqa: E402

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    return run_tool(write)


def write() -> None:
    docs = TOOLS.parent / "docs"
    pages = {
        docs / "configuration.md": configuration_page(),
        docs / "models.md": model_page(docs / "models.md", TOOLS.parent / "configs" / "models"),
        docs / "metrics.md": metrics_page(docs / "metrics.md"),
    }
    for page, text in pages.items():
        changed = page.read_text(encoding="utf-8") != text
        page.write_text(text, encoding="utf-8")
        print(f"{page}: {'written' if changed else 'as it was'}")


if __name__ == "__main__":
    raise SystemExit(main())
