# SPDX-License-Identifier: Apache-2.0
"""Small things that any room may use: threads in order, regular files, folders that appear whole, counted bytes."""
