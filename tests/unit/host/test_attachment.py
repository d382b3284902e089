"""Attachments: who lives, which version each has, and where its weights lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_delta_snapshot.errors import StageError
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.host.attachment import Attachment, Worker, living_workers

PLACES = "0123456789abcdef"


@pytest.fixture
def area(tmp_path: Path) -> StageArea:
    return StageArea.of(tmp_path / "stage", StagerConfig(sync_dir="/run", checkpoint="/base"))


def test_worker_that_has_not_said_yet_has_the_version_of_the_checkpoint(area: StageArea) -> None:
    attachment = Attachment(area)
    assert living_workers(area, 4) == [Worker(4, "")]
    attachment.close()


def test_worker_is_what_it_told_last(area: StageArea) -> None:
    attachment = Attachment(area)
    attachment.tell(12_345_678, PLACES)
    assert living_workers(area, 0) == [Worker(12_345_678, PLACES)]
    attachment.tell(3, PLACES)
    assert living_workers(area, 0) == [Worker(3, PLACES)]
    attachment.tell(0)
    assert living_workers(area, 4) == [Worker(0, "")]
    attachment.close()


def test_each_worker_speaks_for_itself(area: StageArea) -> None:
    attachments = [Attachment(area) for _ in range(3)]
    for version, attachment in enumerate(attachments):
        attachment.tell(version, PLACES if version else "")
    assert sorted(living_workers(area, 9)) == [Worker(0, ""), Worker(1, PLACES), Worker(2, PLACES)]
    attachments[1].close()
    assert sorted(living_workers(area, 9)) == [Worker(0, ""), Worker(2, PLACES)]
    for attachment in attachments:
        attachment.close()
        attachment.close()
    assert living_workers(area, 9) == []
    assert list(area.attached.iterdir()) == []


def test_worker_that_has_detached_says_nothing_any_more(area: StageArea) -> None:
    attachment = Attachment(area)
    attachment.close()
    attachment.tell(3, PLACES)
    assert living_workers(area, 0) == []


def test_dead_worker_is_forgotten_and_its_file_removed(area: StageArea) -> None:
    (area.attached / "dead").write_text(f"00000002 {PLACES}")  # the lock of a process that is gone is gone too
    assert living_workers(area, 0) == []
    assert list(area.attached.iterdir()) == []


def test_area_that_cannot_be_written_is_a_stage_error(area: StageArea) -> None:
    area.attached.rmdir()
    with pytest.raises(StageError, match="cannot attach"):
        Attachment(area)
