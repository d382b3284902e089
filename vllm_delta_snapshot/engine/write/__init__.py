# SPDX-License-Identifier: Apache-2.0
"""Writing an update into live weights, all or nothing: prove old values, apply, read back, undo; full check, repair."""
