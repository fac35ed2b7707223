"""The server with the embedded model, as the API tests start it."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "api"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
