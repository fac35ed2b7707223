"""Shared by all Python tests: which build is tested."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--build", default="build/release", help="build folder whose nibble is tested")
    parser.addoption("--ranks", type=int, default=1, help="servers of tests/api and tests/fault run on so many ranks")
    parser.addoption("--serve-options", default="",
                     help='for every server of tests/api and tests/fault, e.g. "--device cuda --kv-cache-dtype fp8_e4m3"')
    parser.addoption("--long", action="store_true", help="the long form of the tests that have one")


@pytest.fixture(scope="session")
def repo():
    """Root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def nibble_bin(request):
    """The program under test."""
    path = ROOT / request.config.getoption("--build") / "nibble"
    if not path.exists():
        pytest.fail(f"{path} is not built")
    return path
