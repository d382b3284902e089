# SPDX-License-Identifier: Apache-2.0
"""The digest of every tensor at any version of a run: those of the checkpoint, moved by each delta.

Needs the checkpoint once and the metadata of the deltas; no payload, but for a jump to an anchor.
"""

from __future__ import annotations

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, ChainError, OutOfOrder
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import add_digests, format_digest, tensor_digest
from vllm_delta_snapshot.host.fetched import FetchedVersions

__all__ = ["TensorDigests"]


class TensorDigests:
    """See the module.

    Args:
        fetched: the run's deltas.
        checkpoint: some version of it, local.
        version: which.
    """

    def __init__(self, fetched: FetchedVersions, checkpoint: Checkpoint, version: int) -> None:
        self._fetched = fetched
        self._checkpoint = checkpoint
        self._version = version
        self._known: dict[int, dict[str, int]] = {}

    def at(self, version: int) -> dict[str, str]:
        """Return the digests at a version, by checkpoint name. Blocks; the first time reads the whole checkpoint.

        Raises:
            OutOfOrder: it is before the checkpoint's.
            BaseMismatch: the versions do not lead to the state that they claim.
            BrokenChain, CorruptFile, UnsupportedFormat, StoreUnavailable: a version cannot be read.
        """
        if version < self._version:
            raise OutOfOrder(
                "nothing is known of versions before the engine's checkpoint",
                file=str(self._checkpoint.folder),
                hint="Ask for that version or a later one; or start the engine from an earlier checkpoint.",
                expected=f"version {self._version} or later",
                found=f"version {version}",
            )
        if not self._known:
            self._known = {
                self._version: {spec.name: tensor_digest(spec, bits) for spec, bits in self._checkpoint.items()}
            }
        start = max(known for known in self._known if known <= version)
        try:
            way = self._fetched.way(start, version)
        except ChainError:
            # The deltas from there on may have been pruned; from the checkpoint there may be another way.
            if start == self._version:
                raise
            start = self._version
            way = self._fetched.way(start, version)
        digests = dict(self._known[start])
        for metadata in map(self._fetched.read_metadata, way):
            for entry in metadata.tensors:
                digests[entry.name] = add_digests(digests[entry.name], entry.moves_digest)
            found = format_digest(add_digests(*digests.values()))
            if found != metadata.state_digest:
                raise BaseMismatch(
                    f"version {metadata.version} does not lead to the state it claims",
                    file=layout.version_key(metadata.version),
                    hint="Find the damage: delta-snapshot verify SYNC_DIR",
                    expected=f"state digest {metadata.state_digest}",
                    found=f"state digest {found}",
                )
        self._known = {at: self._known[at] for at in (self._version,)} | {version: digests}
        return {name: format_digest(digest) for name, digest in digests.items()}
