"""One part, alone in this process: `python -m weightcast.benchmarks.alone PART OPTIONS FILE`.

OPTIONS is JSON, the result is written to FILE as JSON; stdout and stderr are for people.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .part import Options, run_part


def main() -> None:
    """Run it."""
    name, options, file = sys.argv[1:]
    Path(file).write_text(run_part(name, Options.model_validate_json(options)).model_dump_json())


if __name__ == "__main__":
    main()
