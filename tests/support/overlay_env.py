"""An environment that sees the packages of the Python that runs this, torch among them, and holds others beside them.

    PYTHON tests/support/overlay_env.py FOLDER

The folder is made where it is not there. Which packages it sees is written each time: a cache outlives the checkout, and
the environment, that it was made from.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def seen() -> list[str]:
    """Folders that are no part of the standard library."""
    std = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
    own = str(Path(__file__).parent)
    outside = (p for p in sys.path if p and p != own)
    return [p for p in outside if "site-packages" in p or not p.startswith((*std, sys.base_prefix))]


def main(folder: Path) -> None:
    """Make it, or bring it up to date."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "base.pth").write_text("\n".join(seen()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
