"""Both sides stand on this package; it stands on neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import weightcast.mapping


def test_mapping_imports_codec_and_schemas_alone() -> None:
    folder = Path(str(weightcast.mapping.__file__)).parent
    modules = sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert {"record", "converter", "slices"} <= set(modules)
    lines = [
        "import sys",
        *(f"import weightcast.mapping.{name}" for name in modules),
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('weightcast.')}))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['codec', 'mapping', 'schemas']"
