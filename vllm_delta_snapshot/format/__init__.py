# SPDX-License-Identifier: Apache-2.0
"""What lies in a run's folder, byte for byte. docs/format.md is the norm; this package is its one reader and writer."""
