"""One inference host in this process: a stage area, its stager round by round, and workers that attach."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.runs import State, TinyRun, assert_same_state
from tests.support.tensors import apply_by_hand
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, seeded_digests
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import StageArea, StagerConfig, StagerState
from vllm_delta_snapshot.host.attachment import Attachment
from vllm_delta_snapshot.host.mapping import read_lanes
from vllm_delta_snapshot.host.places import PlaceMap, Segment
from vllm_delta_snapshot.host.stager import Stager
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.types import TensorDifference


class Host:
    """See the module.

    Args:
        run: what it follows.
        root: the folder for stage areas.
        checkpoint: what its engines start from; by default the base of the run.
        retry_interval_s: how long the stager waits after something went wrong.
    """

    def __init__(
        self, run: TinyRun, root: Path, checkpoint: Path | None = None, *, retry_interval_s: float = 1e-9
    ) -> None:
        self.run = run
        config = StagerConfig(
            sync_dir=str(run.sync_dir), checkpoint=str(checkpoint or run.base), retry_interval_s=retry_interval_s
        )
        self.area = StageArea.of(root, config)
        self.workers = [Attachment(self.area)]
        self.start_stager()

    def start_stager(self) -> None:
        """Start a stager; the one before, if any, is as good as dead."""
        self.stager = Stager(self.area)
        self.stager.start()

    def close(self) -> None:
        """Detach every worker."""
        for worker in self.workers:
            worker.close()

    def attach(self, version: int, places: PlaceMap | None = None) -> Attachment:
        """Attach another worker."""
        self.workers.append(Attachment(self.area))
        self.tell(-1, version, places)
        return self.workers[-1]

    def tell(self, worker: int, version: int, places: PlaceMap | None = None) -> None:
        """Let a worker say which version it has, and where its weights lie."""
        if places is not None:
            places.save(self.area.places / places.id)
        self.workers[worker].tell(version, places.id if places else "")

    def want(self, base: int, version: int) -> None:
        """Let a worker ask for an update."""
        self.area.wanted_file(base, version).touch()

    @property
    def state(self) -> StagerState:
        """What the stager says of itself."""
        state = self.area.read_state()
        assert state is not None
        return state

    def staged(self) -> set[str]:
        """Return the names of what is staged."""
        return {path.name for path in self.area.staged.iterdir()}

    def mapped(self) -> set[str]:
        """Return the names of what is mapped."""
        return {path.name for path in self.area.mapped.iterdir()}

    def check_update(self, base: int, version: int) -> DeltaMetadata:
        """Apply what is staged by hand, and compare with the trainer's states; digests of old values too."""
        folder = self.area.staged_folder(base, version)
        metadata = read_folder_metadata(folder)
        assert isinstance(metadata, DeltaMetadata)
        assert (metadata.base_version, metadata.version) == (base, version)
        state = {name: bits.copy() for name, bits in self.run.history[base].items()}
        for entry, change in zip(metadata.tensors, decode(metadata, folder, self.run.specs), strict=True):
            spec, positions = change.spec, change.positions
            old = state[spec.name]
            state[spec.name] = apply_by_hand(old, change)
            before, after = (patch_digest(spec, positions, bits[positions]) for bits in (old, state[spec.name]))
            assert entry.old_digest == format_digest(before) or (
                entry.old_digest is None and isinstance(change, TensorDifference)
            )
            assert format_digest(entry.moves_digest) == format_digest(after - before)
        assert_same_state(state, self.run.history[version])
        return metadata

    def check_mapped(self, base: int, version: int, places: PlaceMap) -> None:
        """Write what is mapped into storages by hand, and compare with the trainer's states; digests too."""
        lanes, head = read_lanes(self.area.mapped_folder(base, version, places.id))
        assert (head["base_version"], head["version"]) == (base, version)
        storages = storages_of(self.run.history[base], places)
        digests: dict[str, tuple[int, int]] = {}
        for lane in lanes:
            old = storages[lane.storage][lane.index]
            new = lane.resolve(old)
            found = [seeded_digests(lane.seeds, bits, lane.starts).tolist() for bits in (old, new)]
            for run, before, after in zip(lane.runs, *found, strict=True):
                known = digests.get(run.name, (0, 0))
                digests[run.name] = (known[0] + before, known[1] + after)
            storages[lane.storage][lane.index] = new
        assert head["has_differences"] == any(lane.relative is not None for lane in lanes)
        assert digests.keys() == {name for name, changed, _, _ in head["tensors"] if changed}
        for name, _, old_digest, move in head["tensors"]:
            before, after = digests.get(name, (0, 0))
            assert old_digest in (None, format_digest(before))
            assert move == format_digest(after - before)
        expected = storages_of(self.run.history[version], places)
        assert {n: s.tolist() for n, s in storages.items()} == {n: s.tolist() for n, s in expected.items()}


def places_of(run: TinyRun, *, shift: int = 3) -> PlaceMap:
    """Return places that put every tensor into a storage of its own, each behind some other elements."""
    return PlaceMap(
        {
            spec.name: [Segment(number, (spec.numel,), 0, (1,), shift, (1,))]
            for number, spec in enumerate(run.specs.values())
        }
    )


def storages_of(state: State, places: PlaceMap) -> dict[int, np.ndarray]:
    """Return the storages in which a state lies."""
    storages = {}
    for name, piece in places:
        first, _ = piece.extent
        storages[piece.storage] = np.concatenate([np.zeros(first, state[name].dtype), state[name]])
    return storages
