from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_checkpoint import write_checkpoint

from vitpt.objectives import Task


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Path, Task]]:
    """`write(**options)` -> (folder, model)."""

    def written(*args: Any, **options: Any) -> tuple[Path, Task]:
        folder = tmp_path / "native"
        return folder, write_checkpoint(folder, *args, **options)

    return written
