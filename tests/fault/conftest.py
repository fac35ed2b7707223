"""The fixtures of the API tests: the same servers, made to suffer."""

from server_fixtures import model_dir, sanitized, serve
