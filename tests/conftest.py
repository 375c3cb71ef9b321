from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_server import LiveServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long; run it with --full or `make test-full`")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, made on the spot."""
    from tiny_model import write_tiny_model  # torch: not for the tests of the cache alone

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    """A server of the tiny model, one for each file of tests."""
    from live_server import running

    with running(model) as live:
        yield live


@pytest.fixture
def text(request: pytest.FixtureRequest) -> str:
    """A prompt of the test's own, so that no other test has cached it."""
    from live_server import text_of

    return text_of(request.node.nodeid)
