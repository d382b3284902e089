# SPDX-License-Identifier: Apache-2.0
"""Deltas of other projects: SkyRL's and OpenRL's folders are found, read, verified, merged and made into checkpoints.

`chain` finds out what a folder is and which deltas follow each other, `replay` turns them into patches, `verify` and
`materialize` are for these what those of `audit` and `runs` are for runs. `export` writes OpenRL's form. Nothing here
writes into a foreign folder. How the folders look is known to `skyrl` and `openrl` alone.
"""
