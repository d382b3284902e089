# SPDX-License-Identifier: Apache-2.0
"""Deltas of other tools: SkyRL's and OpenRL's folders are found, read, verified, merged and made into checkpoints.

`chain` finds out what a folder is and which deltas follow each other, `replay` turns them into patches, `verify` and
`materialize` are for these what the modules of the same name are for runs. `export` writes OpenRL's form. Nothing here
writes into a foreign folder. How the folders look is known to `format.skyrl` and `format.openrl` alone.
"""
