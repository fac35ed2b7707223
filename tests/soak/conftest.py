"""The server of the API tests, under load for long."""

import importlib.util
import pathlib
import sys

API = pathlib.Path(__file__).resolve().parents[1] / "api"
sys.path.insert(0, str(API))
_spec = importlib.util.spec_from_file_location("api_fixtures_of_soak", API / "conftest.py")
_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_api)

model_dir = _api.model_dir
sanitized = _api.sanitized
serve = _api.serve
