"""A cache of the Hub, as huggingface_hub lays it out."""

from __future__ import annotations

import shutil
from pathlib import Path


def hub_cache(cache: Path, plain: Path, revision: str) -> Path:
    """Lay out a folder as huggingface_hub's cache keeps a snapshot."""
    repository = cache / "models--some-org--tiny"
    commit_id = "0" * 39 + "1"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(commit_id)
    snapshot_folder = repository / "snapshots" / commit_id
    snapshot_folder.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot_folder / path.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot_folder
