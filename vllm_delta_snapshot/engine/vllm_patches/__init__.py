# SPDX-License-Identifier: Apache-2.0
"""Everything of ours that changes what vLLM does, each with its reason and its gate (docs/design.md)."""
