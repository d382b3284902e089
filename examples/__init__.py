# SPDX-License-Identifier: Apache-2.0
"""Runnable examples; start one with ``python -m examples.NAME``."""
