"""The server of the API tests, under load for long."""

from server_fixtures import model_dir, sanitized, serve
