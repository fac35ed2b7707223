"""The fixtures of tests/api that start servers, for the folders beside it."""

import importlib.util
import pathlib
import sys

API = pathlib.Path(__file__).resolve().parent / "api"
sys.path.insert(0, str(API))
_spec = importlib.util.spec_from_file_location("api_fixtures", API / "conftest.py")
_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_api)

model_dir = _api.model_dir
sanitized = _api.sanitized
serve = _api.serve
