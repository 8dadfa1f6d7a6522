"""What several test files share: the default model, fetched once and kept in the user's cache."""

from pathlib import Path
from typing import Any

import pytest

from infinilm import hub


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return hub.resolve(None)


@pytest.fixture(scope="session")
def default_model_metadata(default_model_path: Path) -> dict[str, Any]:
    from infinilm.checkpoint import open_checkpoint  # imports torch, which not every test needs

    return open_checkpoint(default_model_path).metadata
