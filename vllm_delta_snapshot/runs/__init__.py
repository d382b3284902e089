# SPDX-License-Identifier: Apache-2.0
"""A run in a store: what is there (`run_folder`), ways through it (`chain`, `replay`), its files."""
